"""Memory of the machine, or of the container, of this process."""

import math
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""The container's cgroup, version 2."""


def host_memory() -> tuple[int, int]:
    """Return (free, total) bytes. Linux's cache of files counts as free, and SC_AVPHYS_PAGES would leave it out."""
    total = os.sysconf("SC_PHYS_PAGES") * (page := os.sysconf("SC_PAGE_SIZE"))
    available = _number(MEMINFO, r"^MemAvailable: +(\d+) kB$")
    free = os.sysconf("SC_AVPHYS_PAGES") * page if available is None else available << 10
    limit = _number(CGROUP / "memory.max", r"^(\d+)$")
    used = _number(CGROUP / "memory.current", r"^(\d+)$")
    if limit is not None and used is not None:
        files = _number(CGROUP / "memory.stat", r"^inactive_file (\d+)$") or 0
        free, total = min(free, max(0, limit - used + files)), min(total, limit)
    return free, total


def zeros_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages are mapped when they are first written, because writing 4 GiB takes seconds."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _number(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
