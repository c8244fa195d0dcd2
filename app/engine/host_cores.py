"""CPU cores that this process may use."""

import contextlib
import os
from math import ceil
from pathlib import Path

import torch

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def use_own_cores() -> None:
    """Give PyTorch one thread per physical core of this process, unless OMP_NUM_THREADS is set.

    Two threads of one core share its multipliers. Threads beyond a container's CPU quota throttle all of them.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), num_own_cores()))


def num_own_cores() -> int:
    """Return the number of physical cores that this process may use, within its CPU quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_siblings(cpu) for cpu in allowed})
    return max(1, ceil(min(cores, _cgroup_quota())))


def _siblings(cpu: int) -> str:
    """Return a key of the physical core that `cpu` belongs to."""
    with contextlib.suppress(OSError):
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    return str(cpu)


def _cgroup_quota() -> float:
    """Return this container's CPU quota in cores, by cgroup v2 or v1, or infinity without one."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((_CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float("inf") if int(quota) < 0 else int(quota) / int(period)
    return float("inf")
