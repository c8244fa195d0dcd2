"""Ways to decode on a GPU by turns: each round runs each way once on one engine, because clocks and heat drift."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any
from unittest.mock import patch

from app.engine.load.engine import Engine
from app.engine.step.graphs import StepGraphs
from app.engine.step.runner import ModelRunner
from tools.bench.paired import ratio
from tools.lab import expected, simulated
from tools.lab.floors import Load
from tools.lab.speeds import TAU, random_engine
from tools.lab.timed import timed
from tools.report.command import Options
from tools.report.part import Part, Result

ANSWER = 256
ROUNDS = 6
FIRST = "DFlash"
ATTENTION: dict[str, Callable[[Any], dict[str, Any]]] = {
    "half of attention's splits": lambda at: {"splits": max(1, at.splits // 2)},
    "twice attention's splits": lambda at: {"splits": min(MOST_SPLITS, 2 * at.splits)},
}
"""Launches of attention by what they change of a Geometry."""
MOST_SPLITS = 16
"""Largest number of splits that attention takes."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode. `runner` has the engine's weights and KV; None is the engine's own."""

    runner: ModelRunner | None = None
    speculate: bool = True
    overlap: bool = True


WAYS = {
    FIRST: Way(),
    f"{FIRST} again": Way(),
    f"{FIRST}, one step at a time": Way(overlap=False),
    "plain": Way(speculate=False),
}
"""Ways that need nothing but the engine. The second is the first again, and its interval is the noise of all others."""


def parts(options: Options, ends: float) -> list[Part]:
    return parts_of(options.model, options.concurrency, options.device, options.prompt, ends, ANSWER)


def parts_of(model: str, concurrency: Sequence[int], device: str, prompt: int, ends: float, answer: int) -> list[Part]:
    """Return a part for each number of requests at once, all with one engine."""

    @cache
    def opened() -> Engine:
        sizes: dict[str, Any] = {"max_num_seqs": max(concurrency), "max_model_len": prompt + answer, "verify": "full"}
        return random_engine(model, draft=True, device=device, **sizes)

    def turned(load: Load) -> Result:
        return by_turns(opened(), WAYS | others(opened(), load.concurrency), model, load, ends)

    return [Part(f"at {count}", partial(turned, Load(count, prompt, answer))) for count in concurrency]


def others(engine: Engine, concurrency: int) -> dict[str, Way]:
    """Return ways that need a runner of their own: without graphs, and from graphs with other launches."""
    own = engine.core.runner
    if not own.graphs:
        return {}
    layout = replace(own.layout, graphs=None)
    eager = ModelRunner(own.forward, own.backend, own.counts, layout, own.pools)
    found = {f"{FIRST}, eager, one step at a time": Way(eager, overlap=False)}
    for name, change in ATTENTION.items() if hasattr(own.backend, "geometry") else ():
        with changed_attention(own.backend, change) as differs:
            runner = captured(engine, own, concurrency)
        if differs:
            found[f"{FIRST}, {name}"] = Way(runner)
    return found


@contextmanager
def changed_attention(backend: Any, change: Callable[[Any], dict[str, Any]]) -> Iterator[list[bool]]:
    """Let attention be launched otherwise. Yield a list that is empty until a launch differs."""
    own, differs = backend.geometry, list[bool]()

    def geometry(*args: Any) -> Any:
        at = own(*args)
        changed = replace(at, **change(at))
        differs.extend([True] * (changed != at))
        return changed

    with patch.object(backend, "geometry", geometry):
        yield differs


def captured(engine: Engine, own: ModelRunner, concurrency: int) -> ModelRunner:
    """Return a runner with graphs of their own for steps in which `concurrency` sequences verify whole blocks."""
    assert own.layout.graphs
    sizes, block = own.layout.graphs, engine.sizes.block_size
    most = sizes.target(concurrency, concurrency * block)
    wide = [(seqs, rows) for seqs, rows in sizes.targets if concurrency * block < 2 * rows <= 2 * most[1]]
    targets = [size for size in wide if size[0] == most[0]]
    graphs = StepGraphs(
        own.forward,
        own.layout,
        replace(sizes, targets=targets, drafts=[sizes.draft(concurrency, block)]),
        None,
        pages=max(engine.sizes.pages_per_sequence, engine.sizes.scratch_pages),
        on_graph=lambda done, total: None,
    )
    return ModelRunner(own.forward, own.backend, own.counts, own.layout, own.pools, graphs)


def by_turns(engine: Engine, ways: Mapping[str, Way], model: str, load: Load, ends: float) -> Result:
    """Return each way's tokens per second of the steps that decode all requests, and its ratio to the first way.

    Every other round runs the ways backwards. Rounds end with the section, but for the first two.
    """
    core, speeds = engine.core, {way: list[float]() for way in ways}
    runner, overlaps, took = core.runner, core.overlap, 0.0

    def run(name: str, answer: int) -> float:
        way = ways[name]
        core.runner, core.overlap = way.runner or runner, overlaps and way.overlap
        if engine.draft:
            simulated.simulate(core, simulated.even_rates(TAU, engine.draft.block_size))
        found = timed(engine, replace(load, answer=answer), speculate=way.speculate)
        return found.steady if found.steps else found.speed

    for name in ways:
        run(name, min(64, load.answer))
    for number in range(ROUNDS):
        if number > 1 and time.monotonic() + took > ends:
            break
        begun = time.monotonic()
        for name in list(ways)[:: -1 if number % 2 else 1]:
            speeds[name].append(run(name, load.answer))
        took = time.monotonic() - begun
    core.runner, core.overlap = runner, overlaps
    cases = []
    for name, found in speeds.items():
        compared = ratio(found, speeds[FIRST])
        case = {"way": name, "tok/s": median(found), "ratio": compared.middle, "interval": str(compared)}
        cases.append(case | {"expected ratio": expected_ratio(model, load.concurrency, name)})
    told = "; ".join(f"{case['way']} {case['interval']}" for case in cases if case["way"] != FIRST)
    return {"cases": cases, "rounds": len(speeds[FIRST]), "found": f"of {FIRST}: {told}"}


def expected_ratio(model: str, concurrency: int, way: str) -> float | None:
    """Return what the performance model says of a way of WAYS."""
    whole, plain = (expected.of_rows(model, concurrency, width) for width in (16, 1))
    host = expected.host_ms(model, concurrency)
    if whole is None or plain is None or host is None:
        return None
    one_at_a_time = whole.step / (whole.step + host)
    return dict(zip(WAYS, (1.0, 1.0, one_at_a_time, plain.steady / whole.steady), strict=True)).get(way)
