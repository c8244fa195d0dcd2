"""How long a device takes, by the host's clock: work is queued, and then a copy behind it is waited for."""

import time
from collections.abc import Callable
from statistics import median, quantiles

import torch

from app.doctor.report.npu.part import Result, milliseconds
from app.engine.backend.base import Backend


def seconds_each(backend: Backend, run: Callable[[], object], calls: int, repeats: int) -> float:
    """Seconds of one `run`, launching included: the median over `repeats` of `calls` that are queued together."""
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


def spread(seconds: list[float]) -> Result:
    """Median and 90th percentile in milliseconds."""
    high = quantiles(seconds, n=10)[-1] if len(seconds) > 1 else seconds[0]
    return {"median_ms": milliseconds(median(seconds)), "p90_ms": milliseconds(high)}
