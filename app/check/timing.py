"""Time that a device takes for a call."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

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


def seconds_each(backend: Backend, run: Callable[[], object], calls: int, repeats: int) -> float:
    """Return seconds of one `run` by the host's clock, launching included.

    It is the median over `repeats` of `calls` that are queued together, with a copy behind them that is waited for.
    """
    behind = torch.zeros(1, device=backend.device)
    run()
    backend.start_download(behind)()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            run()
        backend.start_download(behind)()
        taken.append((time.perf_counter() - started) / calls)
    return median(taken)


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
