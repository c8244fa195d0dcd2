"""Time that a device takes for a call: the one stopwatch of a report."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from app.check.collectives import seconds_each
from app.engine.device.base import AttentionMetadata, Backend, Graph

Seconds = Callable[[Callable[[], object]], float]
Timer = Callable[[Backend], Seconds]
CALLS = 20
"""Calls in the graph that is timed, because a launch from Python costs more than most kernels take."""


def timer(backend: Backend) -> Seconds:
    """Return the more exact clock: calls in a graph if a device's graphs take any call, else queued calls."""
    if backend.captures and not backend.lengths_on_host:
        return partial(seconds_in_a_graph, backend)
    return lambda run: seconds_each(backend, run, calls=4, repeats=10)


def seconds_in_a_graph(
    backend: Backend,
    run: Callable[[], object],
    metas: Sequence[AttentionMetadata] = (),
    *,
    calls: int | None = None,
    repeats: int = 10,
) -> float:
    """Return seconds of one `run`, from `calls` (CALLS by default) of them in a graph; the median of some replays.

    `metas` are of its attention calls.
    """
    count = calls or CALLS

    def many() -> tuple[Tensor, ...]:
        for _ in range(count):
            run()
        return ()

    replay = graph_apart(backend, many, metas).replay
    # The host gives a graph with metas its lengths at each replay, so such replays are not queued.
    return seconds_each(backend, replay, calls=1 if metas else 4, repeats=repeats) / count


def graph_apart(
    backend: Backend, run: Callable[[], tuple[Tensor, ...]], metas: Sequence[AttentionMetadata] = ()
) -> Graph:
    """Return a graph of `run` that may be freed before others.

    On a GPU it has a separate pool and stream: a pool ends with its last graph, and no later capture can use it.
    """
    if backend.device.type != "cuda":
        return backend.capture(run, list(metas))
    from app.engine.cuda.backend import CudaGraph  # needs Triton

    run()
    return CudaGraph(run, None, torch.cuda.Stream(backend.device))
