"""Decode steps of given shapes, timed in their parts: scheduled, launched, read and committed like in EngineCore.

Sequences reach their context without a prefill: the scheduler plans it and commits it, but nothing is launched. So
lengths, pages and page tables are as in serving, and attention costs the same over any KV in memory. The
engine is useless afterwards, because its prefix cache holds pages that were never computed.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from app.engine.load.engine import Engine
from app.engine.schedule.batch import Batch, StepResult
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import PendingStep
from app.messages import Request

BLOCK_STEPS = 2
"""Timed steps of whole blocks, after one that warms the caches."""
PLAIN_STEPS = 32
"""Timed plain steps, because the context KV of 32 plain steps is written at once."""
HOST_STEPS = 16
QUEUED_STEPS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode step of `batch` sequences of `context` tokens. If it `drafts` it verifies whole blocks."""

    batch: int
    context: int
    drafts: bool

    @property
    def timed(self) -> int:
        """Steps in a row that are timed."""
        return BLOCK_STEPS if self.drafts else PLAIN_STEPS


class Split(NamedTuple):
    """Milliseconds of a step. `build`, the arrays of the batch, is timed apart and is a part of `launch` too."""

    schedule: float
    build: float
    launch: float
    read: float
    commit: float

    @property
    def total(self) -> float:
        return self.schedule + self.launch + self.read + self.commit


@dataclass(slots=True)
class Measured:
    """Milliseconds of a step of one shape, by round."""

    splits: list[Split] = field(default_factory=list)
    """Means of the timed steps."""
    hosts: list[float] = field(default_factory=list)
    """Scheduling, building and committing, without a launch between them."""
    queued: list[float] = field(default_factory=list)
    """A step among several queued ones, on a device that runs asynchronously."""

    @property
    def totals(self) -> list[float]:
        return [split.total for split in self.splits]

    @property
    def ms(self) -> float:
        return median(self.totals)

    def middle(self, part: Callable[[Split], float]) -> float:
        return median(part(split) for split in self.splits)


class Bench:
    """An engine and the prompts that fill it."""

    def __init__(self, engine: Engine) -> None:
        self._core, self._sizes = engine.core, engine.sizes
        self._vocab_size = engine.target.vocab_size
        self.is_asynchronous = not engine.device.startswith("cpu")

    @property
    def longest(self) -> int:
        """The longest context that leaves room for the steps."""
        return self._sizes.max_model_len - room(self._sizes.block_size)

    def fits(self, shape: Shape) -> bool:
        """Return True if all sequences have slots, rows and pages at once."""
        pool = self._core.scheduler.pool
        pages = pool.pages_for(shape.context + room(self._sizes.block_size) + self._sizes.block_size)
        return (
            shape.batch <= self._sizes.max_num_seqs
            and shape.context <= self.longest
            and shape.batch * (pages + 1) <= pool.num_usable
        )

    def time(self, shape: Shape, found: Measured) -> None:
        """Add a round to the findings."""
        splits = self.steps(shape)
        found.splits.append(Split(*map(fmean, zip(*splits, strict=True))))
        found.hosts.append(self._host(shape))
        if self.is_asynchronous:
            found.queued.append(self._queued(shape))

    def steps(self, shape: Shape) -> list[Split]:
        """Time the steps of one seating, after one that warms the caches."""
        with self._seated(shape):
            self._step(shape)
            return [self._step(shape) for _ in range(shape.timed)]

    def _step(self, shape: Shape) -> Split:
        """Run a step like EngineCore."""
        scheduler, runner = self._core.scheduler, self._core.runner
        begun = time.perf_counter()
        batch = self._decode_batch(shape)
        scheduled = time.perf_counter()
        inputs = self._arrays(batch)
        built = time.perf_counter()
        pending = runner.launch(inputs)
        launched = time.perf_counter()
        result = pending.read()
        read = time.perf_counter()
        scheduler.commit(batch, result)
        moments = (begun, scheduled, built, launched, read, time.perf_counter())
        return Split(*(1000 * (end - start) for start, end in pairwise(moments)))

    def _arrays(self, batch: Batch) -> StepInputs:
        """Return the arrays that `launch` takes."""
        return self._core.runner.layout.build(batch)

    def _host(self, shape: Shape) -> float:
        """Return milliseconds of the host's part of a step with one token for each sequence."""
        with self._seated(shape):
            self._pretend()
            begun = time.perf_counter()
            for _ in range(HOST_STEPS):
                batch = self._decode_batch(shape)
                self._arrays(batch)
                self._commit(batch)
            return 1000 * (time.perf_counter() - begun) / HOST_STEPS

    def _queued(self, shape: Shape) -> float:
        """Return milliseconds of a step when the device gets the next step before the last one ends.

        This is the device's time, or the launch's if that is longer. All steps have the same rows, so each one writes
        its context KV.
        """
        runner = self._core.runner

        def launch() -> PendingStep:
            pending = runner.launch(runner.layout.build(batch))
            runner.forward.pending_context.write()
            return pending

        with self._seated(shape):
            batch = self._decode_batch(shape)
            launch().read()
            begun = time.perf_counter()
            pending = [launch() for _ in range(QUEUED_STEPS)]
            result = pending[-1].read()
            seconds = time.perf_counter() - begun
            self._core.scheduler.commit(batch, result)
        return 1000 * seconds / QUEUED_STEPS

    def _decode_batch(self, shape: Shape) -> Batch:
        batch = self._core.scheduler.schedule()
        width = self._sizes.block_size if shape.drafts else 1
        assert [entry.count for entry in batch.entries] == [width] * shape.batch, (
            "a step has another shape than planned"
        )
        return batch

    @contextmanager
    def _seated(self, shape: Shape) -> Iterator[None]:
        """Keep all sequences of the shape decoding until the context ends.

        The first run lets each prompt's pages into the prefix cache. The second finds them there, so all prompts end in
        the same step.
        """
        core, scheduler, names = self._core, self._core.scheduler, [f"s{number}" for number in range(shape.batch)]
        prompt = self._tokens[: shape.context - 1]  # the first token completes the context
        for max_tokens in (1, room(self._sizes.block_size)):
            for name in names:
                core.add(Request(name, prompt, max_tokens, speculate=shape.drafts, cache_salt=name))
            while scheduler.waiting or not all(seq.is_decoding for seq in scheduler.running):
                self._pretend()
        yield
        for name in names:
            core.abort(name)

    def _pretend(self) -> None:
        """Commit a step that computes nothing."""
        self._commit(self._core.scheduler.schedule())

    def _commit(self, batch: Batch) -> None:
        count = len(batch.sampling)
        self._core.scheduler.commit(batch, StepResult([[0]] * count, [0] * count))

    @cached_property
    def _tokens(self) -> tuple[int, ...]:
        return tuple(random.Random(0).choices(range(self._vocab_size), k=self.longest))


def room(block_size: int) -> int:
    """Return the tokens that a sequence may emit, so that no step is cut short.

    These are the tokens of all steps, one more block, and 8 that it may emit while others are still prompts.
    """
    return max((1 + BLOCK_STEPS) * block_size, 1 + PLAIN_STEPS, 1 + HOST_STEPS) + block_size + 8


def measure(
    bench: Bench,
    shapes: Sequence[Shape],
    rounds: int,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[Shape, Measured]:
    """Time every shape once in each round, in a random order, because the machine's speed drifts.

    `on_step` is called after each measurement.
    """
    found = {shape: Measured() for shape in shapes}
    for shape in shapes:
        bench.steps(shape)
        on_step("warming up")
    order = random.Random(0)
    turn = list(shapes)
    for number in range(rounds):
        order.shuffle(turn)
        for shape in turn:
            bench.time(shape, found[shape])
            on_step(f"round {number + 1} of {rounds}")
    return found
