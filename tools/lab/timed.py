"""A run of requests on an engine, with its steps timed: what the host does of a step, and what it waits for."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

from torch import Tensor

from app.engine.device.base import Backend
from app.engine.load.engine import Engine
from app.messages import Request, StepOutput
from tools.lab.floors import Load


def requests(count: int, prompt: int, answer: int, vocab_size: int) -> list[Request]:
    draw = random.Random(count)
    return [Request(f"r{i}", tuple(draw.choices(range(vocab_size), k=prompt)), answer) for i in range(count)]


@dataclass(slots=True)
class Timed:
    """A run of all requests at once. Lists have the steps that decoded all of them: milliseconds and tokens.

    `reads` are milliseconds that the host waited for a step's result, and `rows` counts those steps by their rows.
    """

    seconds: float = 0.0
    tokens: int = 0
    of_prompts: float = 0.0
    steps: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    emitted: int = 0
    verified: int = 0
    rows: Counter[int] = field(default_factory=Counter)

    def add(self, step: StepOutput, read_ms: float, concurrency: int) -> None:
        stats, emitted = step.stats, sum(len(delta.token_ids) for delta in step.deltas)
        if errors := [delta.error for delta in step.deltas if delta.error]:
            raise RuntimeError(errors[0])
        self.tokens += emitted
        if stats.kind != "decode":
            self.of_prompts += stats.seconds
        elif stats.num_decoding == concurrency:
            self.steps.append(1000 * stats.seconds)
            self.reads.append(read_ms)
            self.emitted += emitted
            self.verified += concurrency
            self.rows[concurrency + sum(delta.steps[0].n_verified for delta in step.deltas)] += 1

    @property
    def speed(self) -> float:
        """Return output tokens per second, prompts included."""
        return self.tokens / self.seconds

    @property
    def steady(self) -> float:
        """Return the tokens per second of the steps that decoded all requests."""
        return 1000 * self.emitted / sum(self.steps)

    @property
    def step_ms(self) -> float:
        return median(self.steps)

    @property
    def read_ms(self) -> float:
        return median(self.reads)

    @property
    def host_ms(self) -> float:
        """Return the rest of a step, in which the host works. A device that is ahead of it waits."""
        return median(step - read for step, read in zip(self.steps, self.reads, strict=True))

    @property
    def acceptance_length(self) -> float | None:
        return self.emitted / self.verified if self.verified else None

    @property
    def share_of_prompts(self) -> float:
        return self.of_prompts / self.seconds


def timed(engine: Engine, load: Load, *, speculate: bool = True) -> Timed:
    """Run all requests at once, to the last one's end. Raises RuntimeError if one ends with an error."""
    core, run = engine.core, Timed()
    for request in requests(load.concurrency, load.prompt, load.answer, engine.target.vocab_size):
        core.add(replace(request, speculate=speculate))
    with reads(core.runner.backend) as waited:
        started = time.perf_counter()
        while core.has_work:
            waited.clear()
            run.add(core.step(), 1000 * sum(waited), load.concurrency)
        run.seconds = time.perf_counter() - started
    return run


@contextmanager
def reads(backend: Backend) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each wait for a copy to the host."""
    waited, start_download = list[float](), backend.start_download

    def watched(x: Tensor) -> Callable[[], Tensor]:
        wait = start_download(x)

        def timed_wait() -> Tensor:
            begun = time.perf_counter()
            found = wait()
            waited.append(time.perf_counter() - begun)
            return found

        return timed_wait

    backend.start_download = watched  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        del backend.start_download
