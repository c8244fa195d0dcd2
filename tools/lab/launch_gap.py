"""Time between the launches of a graph: empty kernels in a row, each after the last one."""

import time
from collections.abc import Callable
from functools import partial

import torch
import triton

from app.engine.device.base import Backend
from tools.lab import expected
from tools.report.part import Result
from tools.report.timing import Timer, timer

KERNELS = 50
"""Kernels of a timed call. A graph has twenty calls."""


@triton.jit
def empty():  # type: ignore[no-untyped-def]
    return


def launched(count: int) -> None:
    for _ in range(count):
        empty[(1,)]()


@torch.inference_mode()
def measured(opened: Callable[[], Backend], timed: Timer = timer) -> Result:
    """Return the microseconds of an empty kernel in a graph, and those of its launch by the host."""
    us = 1e6 * timed(opened())(partial(launched, KERNELS)) / KERNELS
    begun = time.perf_counter()
    launched(KERNELS)
    host = 1e6 * (time.perf_counter() - begun) / KERNELS
    case = {"us": us, "host us": host, "expected us": expected.GAP_US}
    return {"kernels": KERNELS, "cases": [case], "found": f"{us:.3g} us a launch"}
