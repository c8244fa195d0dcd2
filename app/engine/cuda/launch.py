"""Kernels are compiled on a GPU. For tests they run in Triton's interpreter on a CPU."""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _nothing(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 0)


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
"""True in the interpreter. It holds bfloat16 as 16 bits, so products are computed in float32 there. A program of any
size costs it milliseconds."""


def lines_of_a_program(total: int, on_gpu: int) -> int:
    """Return the number of lines that one program takes of `total`, a power of two."""
    return triton.next_power_of_2(total) if INTERPRETED else on_gpu


@triton.jit
def wait_if_chained(CHAINED: tl.constexpr):
    """Wait for the end of the kernel before, and let the next one begin to be launched. A kernel calls it first."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


def chain(*, on: bool) -> dict[str, Any]:
    """Return options of a launch that may begin before the last kernel ends (programmatic dependent launch)."""
    return {"CHAINED": on and not INTERPRETED, "launch_pdl": on}
