"""Kernels are compiled on a GPU. For tests they run in Triton's interpreter on a CPU."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _nothing(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 0)


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
"""True in the interpreter. It holds bfloat16 as 16 bits, so products are computed in float32 there. A program of any
size costs it milliseconds."""
MAX_TILES = 1 << 14


def items_per_program(total: int, on_gpu: int) -> int:
    """Return how many of `total` items one program takes, a power of two."""
    return triton.next_power_of_2(total) if INTERPRETED else on_gpu


@cache
def counters(device: torch.device) -> Tensor:
    """Return a zero for each tile. The last program of a tile resets its zero, so every launch finds zeros.

    Launches that share it must follow one another, as those of one stream do.
    """
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def wait_if_chained(CHAINED: tl.constexpr):
    """Wait for the end of the previous kernel, and allow the next one to be launched. A kernel calls it first."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


def chain(*, on: bool) -> dict[str, Any]:
    """Return options of a launch that may begin before the previous kernel ends (programmatic dependent launch)."""
    return {"CHAINED": on and not INTERPRETED, "launch_pdl": on}
