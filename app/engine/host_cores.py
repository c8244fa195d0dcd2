"""Processor cores that this process may use."""

import contextlib
import os
from math import ceil
from pathlib import Path

import torch

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def use_own_cores() -> None:
    """Let PyTorch have a thread for each of this process's cores, unless OMP_NUM_THREADS says how many.

    Two threads of one core share its multipliers. Threads above a container's share of time stop all of them.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), num_own_cores()))


def num_own_cores() -> int:
    """Return the physical cores of the processors that this process may run on, at most its share of their time."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_siblings(cpu) for cpu in allowed})
    return max(1, ceil(min(cores, _cgroup_share())))


def _siblings(cpu: int) -> str:
    """Return a name of the core that has the processor."""
    with contextlib.suppress(OSError):
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    return str(cpu)


def _cgroup_share() -> float:
    """Return the processors that this container may keep busy, by cgroup v2 or v1, or infinity without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((_CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float("inf") if int(quota) < 0 else int(quota) / int(period)
    return float("inf")
