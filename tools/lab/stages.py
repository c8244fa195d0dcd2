"""Parts of a step in a trace: the target's layers, its head, the context KV and the draft with its own head.

A graph that is replayed names its kernels, and not what they are of. So an operator that no model calls is captured
where a part begins, as a mark. A step has at most six of them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from app.engine.device.base import Backend
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.sampling.sampler import Sampler
from app.engine.step.forward import Forward

MARKS = {"target": "asinh_", "head": "acosh_", "context": "atanh_", "draft": "frac_"}
"""Part -> method of a tensor. PyTorch's operator and its kernel have this in their names."""
BEGINNINGS: dict[str, tuple[type, str]] = {
    "target": (Forward, "deciding"),
    "head": (Sampler, "choose_greedily"),
    "context": (DFlashDrafter, "write_context"),
    "draft": (Forward, "draft"),
}
"""Part -> the method that is all of it, but for parts inside."""
OF_MARKS = "marks"
COPIES = ("Memcpy", "Memset")
"""Beginnings of copies' names in a trace of a GPU."""


class Launch(NamedTuple):
    """Kernel of a trace, or operator on a CPU, with its own microseconds and the part of the step that it is of."""

    name: str
    us: float
    part: str


@contextmanager
def marked() -> Iterator[None]:
    """Mark where a part of a step begins, also in graphs that are captured in the block."""
    within: list[str] = []

    def mark(part: str, owner: Any) -> None:
        backend: Backend = getattr(owner, "backend", None) or owner._backend
        getattr(torch.empty(1, device=backend.device), MARKS[part])()

    def marking(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_marked(owner: Any, *args: Any, **options: Any) -> Any:
            if within[-1:] == ["draft"]:
                return run(owner, *args, **options)
            within.append(part)
            mark(part, owner)
            try:
                return run(owner, *args, **options)
            finally:
                within.pop()
                if within:
                    mark(within[-1], owner)

        return run_marked

    with ExitStack() as patches:
        for part, (owner, name) in BEGINNINGS.items():
            patches.enter_context(patch.object(owner, name, marking(part, getattr(owner, name))))
        yield


@contextmanager
def traced(*, on_gpu: bool) -> Iterator[list[Launch]]:
    """Yield a list that gets the launches of the block at its end, in order."""
    found: list[Launch] = []
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        yield found
        if on_gpu:
            torch.cuda.synchronize()
    found += launches(trace.events() or (), on_gpu=on_gpu)


def launches(events: Iterable[Any], *, on_gpu: bool) -> list[Launch]:
    """Return the kernels among a trace's events by their start. A trace of a GPU has copies and calls of the host too.

    A kernel of cuBLAS may begin before the previous one ends, and only its time after that counts.
    """
    part, found, last = "target", list[Launch](), 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        if on_gpu and (event.device_type == DeviceType.CPU or event.name.startswith(COPIES)):
            continue
        begun = next((name for name, mark in MARKS.items() if mark in event.name), None)
        part = begun or part
        end = event.time_range.end
        us = max(0.0, end - max(event.time_range.start, last)) if on_gpu else event.self_cpu_time_total
        last = max(last, end)
        found.append(Launch(event.name, us, OF_MARKS if begun else part))
    return found
