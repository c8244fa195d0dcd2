"""Where a decode step's time goes on a GPU: what each captured graph takes, and each kernel's share of a step."""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app.doctor.report.command import Options
from app.doctor.report.part import Part, Result
from app.engine.backend.graph import Graph
from app.engine.build.cost_table import Shape
from app.engine.build.engine import Engine
from app.engine.build.time_steps import made_up
from app.engine.step.graph_runner import GraphRunner
from tools.lab import simulated
from tools.lab.floors import Load, step_seconds
from tools.lab.speeds import EXPECTED_STEP_MS, TAU, random_engine, requests

CONTEXT = 1024
REPLAYS = 10
STEPS = 5
ANSWER = 400
"""Tokens of each answer, which none ends before all steps were taken."""
MOST_KERNELS = 25
WIDTHS = (None, 8, 16)
"""Values of `--verify` that are profiled, None without a draft."""

Replayed = Callable[[Graph], list[float]]
"""Returns the seconds of some replays."""


def graph_parts(options: Options, ends: float) -> list[Part]:
    return graph_parts_of(options.model, max(options.concurrency), options.device)


def graph_parts_of(
    model: str, concurrency: int, device: str, context: int = CONTEXT, replayed: Replayed | None = None
) -> list[Part]:
    """Return a part that times every target graph. Its table is the staircase that `--verify auto` decides by."""
    return [Part("target graphs", partial(staircase, model, concurrency, device, context, replayed or replays))]


@torch.inference_mode()
def staircase(model: str, concurrency: int, device: str, context: int, replayed: Replayed) -> Result:
    begun = time.monotonic()
    engine = random_engine(
        model, draft=True, device=device, enforce_eager=False, max_num_seqs=concurrency, max_model_len=context + 64
    )
    built, runner = time.monotonic() - begun, engine.core.runner
    assert isinstance(runner, GraphRunner) and runner.padded_to and engine.draft
    cases: list[Result] = []
    for seqs, rows in runner.padded_to.targets:
        whole = max(1, rows // engine.draft.block_size)
        count = min(seqs, rows) if rows % min(seqs, rows) == 0 else min(seqs, whole)
        width = rows // count
        shape = Shape(count, count if width > 1 else 0, width, width)
        inputs = runner.layout.build(made_up(shape, engine.sizes, context))
        runner.graphs.target(inputs.target)
        taken = replayed(runner.graphs.target_graph(seqs, rows))
        floor = step_seconds(engine.target, None, Load(count, context, 0))
        case = {"sequences of the graph": seqs, "rows": rows, "run": f"{count} x {width}"}
        cases.append(
            case | {"ms": 1e3 * median(taken), "slowest ms": 1e3 * max(taken), "floor of reads ms": 1e3 * floor}
        )
    found = f"{len(cases)} target graphs, the engine was built in {built:.3g} s"
    return {"cases": cases, "seconds to build": built, "found": found}


def replays(graph: Graph) -> list[float]:
    """Return the seconds of each of REPLAYS replays on a GPU, by its events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def profile_parts(options: Options, ends: float) -> list[Part]:
    return profile_parts_of(options.model, options.concurrency, options.device, options.prompt)


def profile_parts_of(model: str, concurrency: Any, device: str, prompt: int) -> list[Part]:
    """Return a part for each width and number of sequences, all of a width with one engine."""
    made: dict[int | None, Engine] = {}

    def engine(width: int | None) -> Engine:
        if width not in made:
            made.clear()
            sizes = {"max_num_seqs": max(concurrency), "max_model_len": prompt + ANSWER, "verify": width or "full"}
            made[width] = random_engine(model, draft=width is not None, device=device, **sizes)
            if draft := made[width].draft:
                simulated.simulate(made[width].core, simulated.even_rates(TAU, draft.block_size))
        return made[width]

    return [
        Part(f"{named(width)} at {count}", partial(profiled, engine, width, count, prompt))
        for width in WIDTHS
        for count in concurrency
    ]


def named(width: int | None) -> str:
    return "plain" if width is None else f"width {width}"


def profiled(engine: Callable[[int | None], Engine], width: int | None, count: int, prompt: int) -> Result:
    """Return each kernel's launches, time and share of a step, over STEPS steps in which all sequences decode.

    What kernels do not fill are gaps between them.
    """
    made = engine(width)
    core, on_gpu = made.core, made.device.startswith("cuda")
    for request in requests(count, prompt, ANSWER - 1, made.target.vocab_size):
        core.add(request)
    while (step := core.step()).stats.kind != "decode" or step.stats.num_decoding < count:
        pass
    for _ in range(STEPS):
        core.step()
    begun = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    step_ms = 1e3 * (time.perf_counter() - begun) / STEPS
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        for _ in range(STEPS):
            core.step()
        if on_gpu:
            torch.cuda.synchronize()
    for number in range(count):
        core.abort(f"r{number}")
    core.run([])
    rows = [
        {
            "kernel": event.key[:80],
            "launches": event.count / STEPS,
            "us": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / STEPS,
        }
        for event in found.key_averages()
    ]
    rows.sort(key=lambda row: -row["us"])
    busy = sum(row["us"] for row in rows) / 1e3
    cases = [row | {"share": row["us"] / 1e3 / step_ms} for row in rows[:MOST_KERNELS]]
    launches = sum(row["launches"] for row in rows)
    return {
        "step ms": step_ms,
        "expected ms": EXPECTED_STEP_MS.get((named(width), count)),
        "kernels ms": busy,
        "launches": launches,
        "cases": cases,
        "found": f"{launches:.0f} launches take {busy:.4g} of {step_ms:.4g} ms, {busy / step_ms:.0%}",
    }
