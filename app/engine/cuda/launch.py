"""Where kernels run: compiled on a GPU, or in Triton's interpreter on a CPU, for tests."""

import triton
import triton.language as tl


@triton.jit
def _nothing(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 0)


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
"""In the interpreter bfloat16 is 16 bits of something, so that products are made in float32; and a program costs
milliseconds, whatever its size."""


def lines_of_a_program(total: int, on_gpu: int) -> int:
    """How many of `total` lines one program takes, a power of two."""
    return triton.next_power_of_2(total) if INTERPRETED else on_gpu
