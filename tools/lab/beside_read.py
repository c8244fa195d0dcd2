"""An operator of our own beside a plain read of the same memory, and beside PyTorch's operator, by turns."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

READ, OWN, PYTORCH = "read", "own", "PyTorch"


def timed(ways: Mapping[str, Callable[[int], object]], count: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of a call by way, one a round. In a round each way is called with 0 to `count` - 1.

    One thread is timed in seconds of its processor, so other processes take no time but caches and memory.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for number in range(rounds + 1):
        for way, run in ways.items():
            start = now()
            for i in range(count):
                run(i)
            if number:  # the first round takes memory
                times[way].append((now() - start) / count)
    return times


def ratios(times: Mapping[str, list[float]]) -> dict[str, str]:
    """Return the columns of our speed over the others'."""
    read, pytorch = (median(a / b for a, b in zip(times[way], times[OWN], strict=True)) for way in (READ, PYTORCH))
    return {"own / read": f"{read:.0%}", "own / PyTorch": f"{pytorch:.2f}"}


def rate(num_bytes: int, times: list[float]) -> str:
    """Return GB/s of calls that each read so many bytes."""
    return f"{num_bytes / median(times) / 1e9:.1f}"
