"""What a figure was measured on, in one line."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe() -> str:
    """Of this process, which computes with torch itself."""
    import torch

    return f"{_cpu()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def describe_host() -> str:
    """Of a process that only asks others; imports no torch."""
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f", OMP_NUM_THREADS={threads}" if threads else ""
    return f"{_cpu()}, {os.cpu_count()} cores{limit}, torch {version('torch')}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
