"""Where a decode step's time goes on a GPU: each kernel's launches and its share of a step."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from app.engine.core import EngineCore
from app.engine.load.engine import Engine
from tools.lab.in_process import random_requests
from tools.report.part import Result

STEPS = 5
ANSWER = 400
"""Tokens of each answer, so that none ends before all steps were taken."""
MOST_KERNELS = 25

OTHER = "small kernels"
STAGES = {
    "attention": ("attend", "combine", "fmha", "flash", "attention"),
    "products": ("product", "pick", "gemm", "gemv", "nvjet", "cutlass", "splitk", "linear", "addmm", "::mm"),
    OTHER: (),
}
"""Stage -> parts of its kernels' names: ours, cuBLAS's, and PyTorch's operators on a CPU."""
COPIES = ("Memcpy", "Memset")
"""Beginnings of copies' names in a trace of a GPU."""


def profiled(engine: Engine, count: int, prompt: int) -> Result:
    """Return each kernel's launches, time and share of a step, over STEPS steps in which `count` sequences decode.

    What kernels do not fill are gaps between them.
    """
    core = engine.core
    for request in random_requests(count, prompt, ANSWER - 1, engine.target.vocab_size):
        core.add(request)
    while (step := core.step()).stats.kind != "decode" or step.stats.num_decoding < count:
        pass
    _steps(core)
    begun = time.perf_counter()
    _steps(core)
    step_ms = 1e3 * (time.perf_counter() - begun) / STEPS
    on_gpu = engine.device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        _steps(core)
        if on_gpu:
            torch.cuda.synchronize()
    for number in range(count):
        core.abort(f"r{number}")
    core.run([])
    return table(kernels(trace.events() or (), on_gpu=on_gpu), step_ms)


def _steps(core: EngineCore) -> None:
    for _ in range(STEPS):
        core.step()


def kernels(events: Iterable[Any], *, on_gpu: bool) -> list[tuple[str, float]]:
    """Return (name, microseconds) of the kernels among a trace's events, in order of their start.

    A trace of a GPU has copies and calls of the host too. A kernel of cuBLAS may begin before the previous one ends,
    and only its time after that counts.
    """
    found, last = list[tuple[str, float]](), 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        if on_gpu and (event.device_type == DeviceType.CPU or event.name.startswith(COPIES)):
            continue
        end = event.time_range.end
        us = max(0.0, end - max(event.time_range.start, last)) if on_gpu else event.self_cpu_time_total
        last = max(last, end)
        found.append((event.name, us))
    return found


def table(launches: Sequence[tuple[str, float]], step_ms: float) -> Result:
    """Return the kernels of STEPS steps of `step_ms` each, the longest first, and what each stage takes."""
    us = dict.fromkeys(STAGES, 0.0)
    of_kernels: dict[str, list[float]] = {}
    for name, taken in launches:
        of_kernels.setdefault(name, []).append(taken)
        us[stage_of(name)] += taken / STEPS
    rows: list[Result] = [
        {
            "kernel": name[:80],
            "stage": stage_of(name),
            "launches": len(taken) / STEPS,
            "us": sum(taken) / STEPS,
            "share": sum(taken) / STEPS / 1e3 / step_ms,
        }
        for name, taken in of_kernels.items()
    ]
    busy, count = sum(us.values()) / 1e3, len(launches) / STEPS
    return {
        "step ms": step_ms,
        "kernels ms": busy,
        "launches": count,
        "stages ms": {stage: taken / 1e3 for stage, taken in us.items()} | {"gaps": step_ms - busy},
        "cases": sorted(rows, key=lambda row: -row["us"])[:MOST_KERNELS],
        "found": f"{count:.0f} launches take {busy:.4g} of {step_ms:.4g} ms, {busy / step_ms:.0%}",
    }


def stage_of(kernel: str) -> str:
    """Return the stage that a kernel belongs to by its name. Products of the head and of a draft are products too."""
    name = kernel.lower()
    return next((stage for stage, parts in STAGES.items() if any(part in name for part in parts)), OTHER)
