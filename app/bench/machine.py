"""What a figure was measured on, in one line."""

import os
import platform
from pathlib import Path

import torch


def describe() -> str:
    return f"{_cpu()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
