"""Time between the launches of a graph: empty kernels in a row, each waiting for the last one, chained and not."""

import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from app.engine.cuda.launch import chain, wait_if_chained
from app.engine.device.base import Backend
from tools.lab import expected
from tools.report.part import Result
from tools.report.timing import Timer, timer

KERNELS = 50
"""Kernels of a timed call. A graph has twenty calls."""
WAYS = {"launched one by one": False, "chained (programmatic dependent launch)": True}


@triton.jit
def empty(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_if_chained(CHAINED)


def launched(count: int, *, chained: bool) -> None:
    for _ in range(count):
        empty[(1,)](**chain(on=chained))


@torch.inference_mode()
def measured(opened: Callable[[], Backend], timed: Timer = timer) -> Result:
    """Return the microseconds of an empty kernel in a graph, chained and not, and those of its launch by the host."""
    seconds, cases = timed(opened()), list[Result]()
    for way, chained in WAYS.items():
        taken = seconds(partial(launched, KERNELS, chained=chained)) / KERNELS
        begun = time.perf_counter()
        launched(KERNELS, chained=chained)
        host = (time.perf_counter() - begun) / KERNELS
        cases.append({"way": way, "us": 1e6 * taken, "host us": 1e6 * host})
    cases[0]["expected us"] = expected.GAP_US
    one, chained = (case["us"] for case in cases)
    return {"kernels": KERNELS, "cases": cases, "found": f"{one:.3g} us a launch, {chained:.3g} us chained"}
