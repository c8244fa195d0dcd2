"""CPU time of other processes and the cores they run on: what a busy machine leaves as it is, unlike the clock."""

import ctypes
import os
import time
from collections.abc import Collection
from pathlib import Path

from app.config.settings import ConfigError

_PROC = Path("/proc")
_PARENT = 1  # behind the name, of /proc/PID/stat


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, with all its threads and no children. Raises OSError if it is gone."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return time.clock_gettime(clock.value)


def only_child(pid: int) -> int:
    """The process that this one has started, an engine."""
    found = []
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            try:
                if _parent(int(folder.name)) == pid:
                    found.append(int(folder.name))
            except OSError:  # It has just ended.
                continue
    (child,) = found
    return child


def check() -> None:
    """Raises ConfigError where there is no such figure."""
    if not (_PROC / "self" / "stat").exists():
        raise ConfigError("the CPU time of other processes is asked for as Linux tells it", "measure on Linux")


def cores() -> list[int]:
    """The cores that this process may run on; none where the platform does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def stay_on(chosen: Collection[int]) -> None:
    """Run on these cores only, from now on and with all children; on any of them where none is named."""
    if chosen:
        os.sched_setaffinity(0, chosen)


def _parent(pid: int) -> int:
    return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[_PARENT])
