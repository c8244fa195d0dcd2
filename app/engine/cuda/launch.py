"""What all kernels share. They are compiled on a GPU, and for tests they run in Triton's interpreter on a CPU."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def operand(x):
    """Return an operand of `tl.dot`, which is in fp32 in the interpreter, because bfloat16 is 16 bits there."""
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def rounded(x, dtype):
    """Return fp32 x in `dtype`, to nearest. The interpreter's own cast to bfloat16 cuts off."""
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def sum_of_splits(acc, partial_ptr, arrived_ptr, index, split, splits):
    """Store the partial result `acc` of a tile, number `index`. Return (the sum of all `splits` in their order, True)
    in the last program of the tile, and (anything, False) in others."""
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    place = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    partial = partial_ptr + (index * splits).to(tl.int64) * SIZE + place
    tl.store(partial + split * SIZE, acc)
    tl.debug_barrier()  # all warps have stored before one of them counts
    is_last = tl.atomic_add(arrived_ptr + index, 1, sem="acq_rel") == splits - 1
    if is_last:
        acc = tl.zeros([acc.shape[0], acc.shape[1]], tl.float32)
        for other in range(splits):
            # Reads bypass the multiprocessor's L1 cache, which may still hold an earlier launch's.
            acc += tl.load(partial + other * SIZE, cache_modifier=".cg")
        tl.store(arrived_ptr + index, 0)
    return acc, is_last


INTERPRETED = not isinstance(operand, triton.JITFunction)
"""True in the interpreter, where a program of any size takes milliseconds."""
UPCAST = tl.constexpr(INTERPRETED)
MAX_TILES = 1 << 14


def dot_size(count: int) -> int:
    """Return the size of a side of `tl.dot` for `count` rows or columns: a power of two, and 16 at least."""
    return max(16, int(triton.next_power_of_2(count)))


def items_per_program(total: int, on_gpu: int) -> int:
    """Return how many of `total` items one program takes, a power of two."""
    return triton.next_power_of_2(total) if INTERPRETED else on_gpu


@cache
def counters(device: torch.device) -> Tensor:
    """Return a zero for each tile. The last program of a tile resets its zero, so every launch finds zeros.

    Launches that share it must run one after the other, as in one stream.
    """
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def memory_of_splits(tiles: int, splits: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (memory [tiles, splits, size] fp32 for the partial results of `sum_of_splits`, counters of tiles)."""
    assert tiles <= MAX_TILES
    return torch.empty(tiles, splits, size, dtype=torch.float32, device=device), counters(device)
