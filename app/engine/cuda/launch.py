"""What all kernels share. They are compiled on a GPU, and for tests they run in Triton's interpreter on a CPU."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_if_chained(CHAINED: tl.constexpr):
    """Wait for the end of the previous kernel, and allow the next one to be launched. A kernel calls it first."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


INTERPRETED = not isinstance(wait_if_chained, triton.JITFunction)
"""True in the interpreter, where a program of any size takes milliseconds."""
UPCAST = tl.constexpr(INTERPRETED)
MAX_TILES = 1 << 14


@triton.jit
def operand(x):
    """Return an operand of `tl.dot`, which is in fp32 in the interpreter, because bfloat16 is 16 bits there."""
    if UPCAST:
        x = x.to(tl.float32)
    return x


def dot_size(count: int) -> int:
    """Return the size of a side of `tl.dot` for `count` rows or columns: a power of two, and 16 at least."""
    return max(16, int(triton.next_power_of_2(count)))


def items_per_program(total: int, on_gpu: int) -> int:
    """Return how many of `total` items one program takes, a power of two."""
    return triton.next_power_of_2(total) if INTERPRETED else on_gpu


@cache
def counters(device: torch.device) -> Tensor:
    """Return a zero for each tile. The last program of a tile resets its zero, so every launch finds zeros.

    Launches that share it must follow one another, as those of one stream do.
    """
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def chain(*, on: bool) -> dict[str, Any]:
    """Return options of a launch that may begin before the previous kernel ends (programmatic dependent launch)."""
    return {"CHAINED": on and not INTERPRETED, "launch_pdl": on}
