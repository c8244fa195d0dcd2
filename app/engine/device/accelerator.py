"""Copies and memory of a device that is not the host. `runtime` is torch.cuda or torch_npu.npu."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.engine.errors import UnsupportedError


def start_download(x: Tensor, runtime: Any) -> Callable[[], Tensor]:
    """Begin `Backend.start_download` into pinned memory, followed by an event of the current stream."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = runtime.Event()
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return host

    return wait


def check_ranks(device: torch.device, size: int, runtime: Any, variable: str) -> None:
    """Raise UnsupportedError, as `Backend.check_ranks`. `variable` in the environment chooses visible devices."""
    first, count = device.index or 0, runtime.device_count()
    if first + size > count:
        with_variable = f" with {variable}={os.environ[variable]}" if variable in os.environ else ""
        raise UnsupportedError(
            f"--tensor-parallel-size {size}: each rank needs a separate device, {device.type}:{first} to "
            f"{device.type}:{first + size - 1}, and {count} are visible{with_variable}"
        )


def peak_memory(run: Callable[[], object], runtime: Any) -> int:
    """Return `Backend.peak_memory` as the allocator counts it."""
    runtime.reset_peak_memory_stats()
    before = runtime.memory_allocated()
    run()
    peak = runtime.max_memory_allocated() - before
    runtime.empty_cache()
    return int(peak)
