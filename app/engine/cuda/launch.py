"""Kernels are compiled on a GPU. For tests they run in Triton's interpreter on a CPU."""

import triton
import triton.language as tl


@triton.jit
def _nothing(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 0)


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
"""True in the interpreter. It holds bfloat16 as 16 bits, so products are computed in float32 there. A program of any
size costs it milliseconds."""


def lines_of_a_program(total: int, on_gpu: int) -> int:
    """Return the number of lines that one program takes of `total`, a power of two."""
    return triton.next_power_of_2(total) if INTERPRETED else on_gpu
