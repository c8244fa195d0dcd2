"""Time that a device takes for a call."""

from collections.abc import Callable
from functools import partial

import torch

from app.check.collectives import seconds_each
from app.engine.device.base import Backend

Seconds = Callable[[Callable[[], object]], float]
Timer = Callable[[Backend], Seconds]
CALLS = 20
"""Calls in the graph that is timed, because a launch from Python costs more than most kernels take."""


def timer(backend: Backend) -> Seconds:
    """Return the more exact clock: calls in a graph where the device can time one apart, else queued calls."""
    if hasattr(backend, "capture_apart"):
        return partial(seconds_in_a_graph, backend)
    return lambda run: seconds_each(backend, run, calls=4, repeats=10)


def seconds_in_a_graph(backend: Backend, run: Callable[[], object], repeats: int = 5) -> float:
    """Return seconds of one `run`, from CALLS of them in a CUDA graph; the least of some replays."""

    def calls() -> tuple[torch.Tensor, ...]:
        for _ in range(CALLS):
            run()
        return ()

    graph, taken = backend.capture_apart(calls), []  # type: ignore[attr-defined]
    for _ in range(repeats):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        taken.append(started.elapsed_time(ended) / 1e3 / CALLS)
    return min(taken)
