"""A decode step of the demo pair: how long it takes, and how much of that the host takes to launch it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

from app import demo
from app.engine.core import EngineCore
from app.messages import Request
from tools.report.command import Options
from tools.report.engine import demo_engine
from tools.report.part import Part, Result

WAYS = {"eager": True, "graphs": False}
"""Way -> `enforce_eager`."""
SEQUENCES = (1, 4, 16)
REPEATS = 60
MAX_TOKENS = 300


def parts(options: Options, ends: float) -> list[Part]:
    steps = Steps(options, SEQUENCES[-1])
    return [
        Part(f"{way}, {n} sequence{'s' * (n > 1)}", partial(steps.measured, way, n, REPEATS))
        for way in WAYS
        for n in SEQUENCES
    ]


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of a step: to schedule and launch it, to wait for its result and read it, and in all."""

    launch: float
    read: float
    step: float


class Steps:
    """Engines of `max_num_seqs` sequences, one for each way, made when first asked for."""

    def __init__(self, options: Options, max_num_seqs: int) -> None:
        self._options, self._max_num_seqs = options, max_num_seqs
        self._cores: dict[str, EngineCore] = {}

    def measured(self, way: str, n: int, repeats: int) -> Result:
        core = self.core(way)
        list(decode_steps(core, n, 2))
        taken = list(decode_steps(core, n, repeats))
        times = {name: spread([getattr(step, name) for step in taken]) for name in ("step", "launch", "read")}
        return times | {"steps": len(taken), "found": f"{times['step']['median_ms']:.4g} ms"}

    def core(self, way: str) -> EngineCore:
        if way not in self._cores:
            self._cores[way] = demo_engine(
                self._options.device,
                "bfloat16",
                enforce_eager=WAYS[way],
                max_num_seqs=self._max_num_seqs,
                max_num_batched_tokens=16 * self._max_num_seqs + 512,
                max_model_len=1024,
                kv_cache_memory=256 << 20,
            )
        return self._cores[way]


def decode_steps(core: EngineCore, n: int, count: int) -> Iterator[Taken]:
    """Yield `count` steps in which all of n sequences decode.

    Prompts come round again, and no answer ends before MAX_TOKENS.
    """
    prompts, left = demo.token_ids(n), count
    while left:
        for i in range(n):
            core.add(Request(f"s{i}", prompts[i % len(prompts)], MAX_TOKENS))
        while core.has_work and left:
            started = time.perf_counter()
            batch = core.scheduler.schedule()
            pending = core.launch(batch)
            launched = time.perf_counter()
            result = pending.read()
            read = time.perf_counter()
            core.scheduler.commit(batch, result)
            if batch.kind == "decode" and len(batch.decodes) == n:
                left -= 1
                yield Taken(launched - started, read - launched, time.perf_counter() - started)
        for i in range(n):
            core.abort(f"s{i}")


def spread(seconds: list[float]) -> Result:
    """Return the median and the 90th percentile in milliseconds."""
    high = quantiles(seconds, n=10)[-1] if len(seconds) > 1 else seconds[0]
    return {"median_ms": 1e3 * median(seconds), "p90_ms": 1e3 * high}
