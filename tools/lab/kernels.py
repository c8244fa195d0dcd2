"""Where a decode step's time goes on a GPU: what each captured graph takes, and each kernel's share of a step."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from app.engine.device.base import Backend, Graph
from app.engine.device.factory import make_backend
from app.engine.load.engine import Engine
from app.engine.load.made_up_steps import made_up
from app.engine.schedule.costs import Shape
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner
from tools.lab import expected, simulated, stages
from tools.lab.floors import Load, step_seconds
from tools.lab.speeds import TAU, random_engine
from tools.lab.timed import requests
from tools.report.command import Options
from tools.report.part import Part, Result

CONTEXT = 1024
REPLAYS = 10
STEPS = 5
ANSWER = 400
"""Tokens of each answer, which none ends before all steps were taken."""
MOST_KERNELS = 25
WIDTHS = (None, 8, 16)
"""Values of `--verify` that are profiled, None without a draft."""

OTHER = "small kernels"
STAGES = {
    "attention": ("attend", "combine", "fmha", "flash", "attention"),
    "products": ("product", "pick", "gemm", "gemv", "nvjet", "cutlass", "splitk", "linear", "addmm", "::mm"),
    OTHER: (),
}
"""Stage -> parts of its kernels' names: ours, those of cuBLAS, and PyTorch's operators on a CPU."""

Replayed = Callable[[Graph], list[float]]
"""Returns the seconds of some replays."""


@dataclass(frozen=True, slots=True)
class Stairs:
    """An engine whose graphs are timed behind `context` tokens a sequence.

    It took `built` seconds to build, and `captured` of them were from the first graph to the last.
    """

    engine: Engine
    built: float
    captured: float
    context: int
    replayed: Replayed

    @property
    def runner(self) -> ModelRunner:
        return self.engine.core.runner

    @property
    def graphs(self) -> StepGraphs:
        assert self.runner.graphs
        return self.runner.graphs

    def inputs(self, count: int, width: int) -> StepInputs:
        shape = Shape(count, count if width > 1 else 0, width, width)
        return self.runner.layout.build(made_up(shape, self.engine.sizes, self.context))

    def case(self, count: int, width: int, graph: Graph) -> Result:
        ms = [1e3 * seconds for seconds in self.replayed(graph)]
        return {"run": f"{count} x {width}", "ms": median(ms), "slowest ms": max(ms)}


def graph_parts(options: Options, ends: float) -> list[Part]:
    return graph_parts_of(options.model, max(options.concurrency), options.device, CONTEXT, replays)


def graph_parts_of(model: str, concurrency: int, device: str, context: int, replayed: Replayed) -> list[Part]:
    """Return parts that time every graph of the target and of the draft, with one engine."""

    @cache
    def opened() -> Stairs:
        begun, captures = time.monotonic(), list[float]()

        def note(stage: str, done: int, total: int) -> None:
            captures.extend([time.monotonic()] * (stage == "graphs"))

        sizes: dict[str, Any] = {"max_num_seqs": concurrency, "max_model_len": context + 64, "enforce_eager": False}
        engine = random_engine(model, draft=True, device=device, on_progress=note, **sizes)
        return Stairs(engine, time.monotonic() - begun, captures[-1] - captures[0], context, replayed)

    return [
        Part("target graphs", lambda: staircase(opened(), model)),
        Part("draft graphs", lambda: of_drafts(opened(), model)),
    ]


@torch.inference_mode()
def staircase(stairs: Stairs, model: str) -> Result:
    """Time every target graph. The table is the staircase that `--verify auto` decides by."""
    engine, runner, cases = stairs.engine, stairs.runner, list[Result]()
    for seqs, rows in reversed(stairs.graphs.target_graphs):
        whole = max(1, rows // engine.sizes.block_size)
        count = min(seqs, rows) if rows % min(seqs, rows) == 0 else min(seqs, whole)
        width = rows // count
        stairs.graphs.target(stairs.inputs(count, width).target)
        case = stairs.case(count, width, stairs.graphs.target_graphs[seqs, rows][0])
        floor = step_seconds(engine.target, None, Load(count, stairs.context, 0))
        step = expected.of_rows(model, count, width)
        sizes = {"sequences of the graph": seqs, "rows": rows}
        cases.append(sizes | case | {"expected ms": step and step.of_target, "floor of reads ms": 1e3 * floor})
    found = f"{len(cases)} target graphs, the engine was built in {stairs.built:.3g} s"
    times = {"seconds to build": stairs.built, "of which captures": stairs.captured}
    return {"cases": cases, "found": found} | times | {"MB of the graphs": pool_mb(runner.backend)}


def pool_mb(backend: Backend) -> float | None:
    """Return the megabytes that graphs share on a GPU."""
    pool = getattr(backend, "_graph_pool", None)
    if pool is None:
        return None
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if tuple(each.get("segment_pool_id", ())) == tuple(pool)) / 1e6


@torch.inference_mode()
def of_drafts(stairs: Stairs, model: str) -> Result:
    """Time every draft graph: the blocks, the head and the choices."""
    cases = list[Result]()
    for blocks, width in reversed(stairs.graphs.draft_graphs):
        inputs = stairs.inputs(blocks, width).draft
        assert inputs is not None
        stairs.graphs.draft(inputs)
        case = stairs.case(blocks, width, stairs.graphs.draft_graphs[blocks, width][0])
        step = expected.of_rows(model, blocks, width)
        cases.append({"rows": blocks * width} | case | {"expected ms": step and step.draft})
    return {"cases": cases, "found": f"{len(cases)} draft graphs"}


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
    from tools.lab import launch_gap  # it needs Triton

    gap = Part("launch gap", partial(launch_gap.measured, cache(partial(make_backend, options.device))))
    return [gap, *profile_parts_of(options.model, options.concurrency, options.device, options.prompt, WIDTHS)]


def profile_parts_of(
    model: str, concurrency: Sequence[int], device: str, prompt: int, widths: Sequence[int | None]
) -> list[Part]:
    """Return a part for each width and number of sequences, all of a width with one engine."""
    made: dict[int | None, Engine] = {}

    def engine(width: int | None) -> Engine:
        if width not in made:
            made.clear()
            lengths = {"max_num_seqs": max(concurrency), "max_model_len": prompt + ANSWER}
            sizes: dict[str, Any] = lengths | {"verify": width or "full"}
            made[width] = random_engine(model, draft=width is not None, device=device, **sizes)
            if draft := made[width].draft:
                simulated.simulate(made[width].core, simulated.even_rates(TAU, draft.block_size))
        return made[width]

    def part(width: int | None, count: int) -> Result:
        with stages.marked():
            return profiled(engine, model, width, count, prompt)

    return [
        Part(f"{named(width)} at {count}", partial(part, width, count)) for width in widths for count in concurrency
    ]


def named(width: int | None) -> str:
    return "plain" if width is None else f"width {width}"


def profiled(engine: Callable[[int | None], Engine], model: str, width: int | None, count: int, prompt: int) -> Result:
    """Return each kernel's launches, time and share of a step, over STEPS steps in which all sequences decode.

    What kernels do not fill are gaps between them.
    """
    made = engine(width)
    core = made.core
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
    with stages.traced(on_gpu=made.device.startswith("cuda")) as launches:
        for _ in range(STEPS):
            core.step()
    for number in range(count):
        core.abort(f"r{number}")
    core.run([])
    model_says = expected.of_rows(model, count, width or 1)
    us: Counter[str] = Counter()
    launched: Counter[str] = Counter()
    kernels: dict[tuple[str, str], list[float]] = {}
    for name, taken, part in launches:
        kernels.setdefault((part, name), []).append(taken)
        us.update({part: taken / STEPS, stage_of(name): taken / STEPS})
        launched[part] += 1
    rows: list[Result] = [
        {
            "kernel": name[:80],
            "stage": stage_of(name),
            "of": part,
            "launches": len(taken) / STEPS,
            "us": sum(taken) / STEPS,
            "share": sum(taken) / STEPS / 1e3 / step_ms,
        }
        for (part, name), taken in kernels.items()
    ]
    busy = sum(us[part] for part in launched) / 1e3
    return {
        "step ms": step_ms,
        "expected ms": model_says and model_says.step,
        "kernels ms": busy,
        "launches": len(launches) / STEPS,
        "launches of": {part: number / STEPS for part, number in launched.items()},
        "ms of": {part: us[part] / 1e3 for part in launched},
        "expected ms of": model_says and model_says.parts,
        "stages ms": {stage: us[stage] / 1e3 for stage in STAGES} | {"gaps": step_ms - busy},
        "expected stages ms": model_says and model_says.stages,
        "cases": sorted(rows, key=lambda row: -row["us"])[:MOST_KERNELS],
        "found": f"{len(launches) / STEPS:.0f} launches take {busy:.4g} of {step_ms:.4g} ms, {busy / step_ms:.0%}",
    }


def stage_of(kernel: str) -> str:
    """Return the stage that a kernel belongs to by its name. Products of the head and of a draft are products too."""
    name = kernel.lower()
    return next((stage for stage, parts in STAGES.items() if any(part in name for part in parts)), OTHER)
