"""Ways to decode on a GPU by turns: each round runs each way once on one engine, because clocks and heat drift."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median

from app.bench.paired import ratio
from app.doctor.report.command import Options
from app.doctor.report.part import Part, Result
from app.engine.build.engine import Engine
from tools.lab import simulated
from tools.lab.floors import Load
from tools.lab.speeds import TAU, random_engine, timed

ANSWER = 256
ROUNDS = 6
FIRST = "DFlash"
WAYS = {
    FIRST: {"speculate": True, "overlap": True},
    "DFlash again": {"speculate": True, "overlap": True},
    "DFlash, one step at a time": {"speculate": True, "overlap": False},
    "plain": {"speculate": False, "overlap": True},
}
"""Way -> how it decodes. The second is the first again, and its interval is the noise of all others."""


def parts(options: Options, ends: float) -> list[Part]:
    return parts_of(options.model, options.concurrency, options.device, options.prompt, ends)


def parts_of(
    model: str, concurrency: Sequence[int], device: str, prompt: int, ends: float, answer: int = ANSWER
) -> list[Part]:
    """Return a part for each number of requests at once, all with one engine."""

    @cache
    def opened() -> Engine:
        sizes = {"max_num_seqs": max(concurrency), "max_model_len": prompt + answer, "verify": "full"}
        engine = random_engine(model, draft=True, device=device, **sizes)
        assert engine.draft
        simulated.simulate(engine.core, simulated.even_rates(TAU, engine.draft.block_size))
        return engine

    return [Part(f"at {count}", partial(by_turns, opened, Load(count, prompt, answer), ends)) for count in concurrency]


def by_turns(opened: Callable[[], Engine], load: Load, ends: float) -> Result:
    """Return each way's tokens per second of the steps that decode all requests, and its ratio to the first way.

    Every other round runs the ways backwards. Rounds end with the section, but for the first two.
    """
    engine = opened()
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    overlaps, took = engine.core.overlap, 0.0
    timed(engine, replace(load, answer=min(64, load.answer)))
    for number in range(ROUNDS):
        if number > 1 and time.monotonic() + took > ends:
            break
        begun = time.monotonic()
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            engine.core.overlap = overlaps and WAYS[way]["overlap"]
            whole, steps, tokens = timed(engine, load, speculate=WAYS[way]["speculate"])
            speeds[way].append(1000 * tokens / sum(steps) if steps else whole)
        took = time.monotonic() - begun
    engine.core.overlap = overlaps
    cases = []
    for way, found in speeds.items():
        compared = ratio(found, speeds[FIRST])
        cases.append({"way": way, "tok/s": median(found), "ratio": compared.middle, "interval": str(compared)})
    told = "; ".join(f"{way} {case['interval']}" for way, case in zip(WAYS, cases, strict=True) if way != FIRST)
    return {"cases": cases, "rounds": len(speeds[FIRST]), "found": f"of {FIRST}: {told}"}
