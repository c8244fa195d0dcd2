"""Copies and memory of a device with memory of its own. `runtime` is torch.cuda or torch_npu.npu."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def upload(host: Tensor, to: Tensor) -> None:
    """Queue `Backend.upload`. The host waits unless the copy is pinned and non-blocking, both (N24)."""
    to.copy_(host.pin_memory(), non_blocking=True)


def start_download(x: Tensor, runtime: Any) -> Callable[[], Tensor]:
    """Begin `Backend.start_download` into pinned memory, with an event of the current stream behind it."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = runtime.Event()
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return host

    return wait


def memory(device: torch.device, runtime: Any) -> tuple[int, int]:
    """Return (free, total) bytes of the device."""
    free, total = runtime.mem_get_info(device)
    return int(free), int(total)


def peak_memory(run: Callable[[], object], runtime: Any) -> int:
    """Return `Backend.peak_memory` by the allocator's own count."""
    runtime.reset_peak_memory_stats()
    before = runtime.memory_allocated()
    run()
    peak = runtime.max_memory_allocated() - before
    runtime.empty_cache()
    return int(peak)
