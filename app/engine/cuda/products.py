"""Matrix products C = X W^T whose rows have the same bits in every batch (`--batch-invariant`).

A tile of W has 64 rows or more, which fill the tensor core's wide side, and the rows of X are the narrow one. Tiles
have one size and K has one split for a weight. With few rows each split is a program's, and the last program of a tile
sums the partial results in their order. With many rows a program makes all splits, in the same order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import MAX_TILES, counters, operand
from app.engine.errors import UnsupportedError

ROWS = 64
"""Rows of X in a tile."""
DEPTHS = (64, 32, 16)
MAX_SPLITS = 8


class Product(NamedTuple):
    """Shape of a launch: rows of W and depth (numbers of K) of a tile, splits of K, and Triton's warps."""

    rows: int
    depth: int
    splits: int
    warps: int


def product_of(weight: Tensor, multiprocessors: int) -> Product:
    """Return the launch for a weight, with as few splits as give all multiprocessors a tile.

    Raises UnsupportedError if K is no whole number of tiles.
    """
    out_features, in_features = weight.shape
    depth = next((depth for depth in DEPTHS if in_features % depth == 0), None)
    if depth is None:
        raise UnsupportedError(
            f"--batch-invariant: a weight of {out_features} x {in_features}; its columns must be a multiple of "
            f"{DEPTHS[-1]} on a GPU"
        )
    rows = 128 if weight.itemsize <= 2 else 64  # in fp32 a product takes the registers of three
    tiles, splits = triton.cdiv(out_features, rows), 1
    while tiles * splits < multiprocessors and splits < MAX_SPLITS and in_features % (2 * splits * depth) == 0:
        splits *= 2
    return Product(rows, min(depth, 128 // weight.itemsize), splits, rows // 16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, multiprocessors: int) -> Tensor:
    """Return x @ weight.T + bias `[T, out]` for x `[T, in]` of any number of rows, rounded once."""
    launch, (num_rows, in_features), out_features = product_of(weight, multiprocessors), x.shape, len(weight)
    tiles, row_tiles = triton.cdiv(out_features, launch.rows), triton.cdiv(num_rows, ROWS)
    one_program = row_tiles * tiles >= multiprocessors
    out = x.new_empty(num_rows, out_features)
    partials, arrived = None, None
    if is_split := launch.splits > 1 and not one_program:
        shape = (row_tiles * tiles, launch.splits, launch.rows, ROWS)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
        assert row_tiles * tiles <= MAX_TILES
    product[row_tiles, tiles, launch.splits if is_split else 1](  # neighbouring programs share a tile of W
        x.contiguous(),
        weight,
        bias,
        out,
        partials,
        arrived,
        num_rows,
        out_features,
        in_features,
        launch.splits,
        LOOPS=launch.splits > 1 and one_program,
        BLOCK_M=ROWS,
        BLOCK_N=launch.rows,
        BLOCK_K=launch.depth,
        num_warps=launch.warps,
        num_stages=4,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "splits"])
def product(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    out_features,
    in_features,
    splits,
    LOOPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of the result over one of `splits` shares of K, and finish it if the other programs have.

    With LOOPS a program makes all shares.
    """
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, BLOCK_N)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + columns
    is_row, is_column = (rows < num_rows)[None, :], (column < out_features)[:, None]
    steps = in_features // (splits * BLOCK_K)  # a share begins at a multiple of BLOCK_K, so that loads are wide
    depth = split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    w = w_ptr + column.to(tl.int64)[:, None] * in_features + depth[None, :]
    x = x_ptr + rows.to(tl.int64)[None, :] * in_features + depth[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if LOOPS:
        for share in range(splits):
            offset = share * steps * BLOCK_K
            acc += share_of(x + offset, w + offset, is_row, is_column, steps, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        acc = share_of(x, w, is_row, is_column, steps, BLOCK_M, BLOCK_N, BLOCK_K)

    is_last = True
    if partial_ptr is not None:
        index = row_tile * tl.num_programs(1) + tile
        partial = partial_ptr + (index * splits).to(tl.int64) * (BLOCK_N * BLOCK_M)
        partial += columns[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partial + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # all warps have stored before one of them counts
        is_last = tl.atomic_add(arrived_ptr + index, 1, sem="acq_rel") == splits - 1
        if is_last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(splits):
                # Reads bypass the multiprocessor's own cache, which may still have those of an earlier launch.
                acc += tl.load(partial + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(arrived_ptr + index, 0)
    if is_last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[:, None]
        out = out_ptr + rows.to(tl.int64)[None, :] * out_features + column[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def share_of(x, w, is_row, is_column, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the sums over `steps` tiles of K, in their order."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(steps):
        x_tile = operand(tl.load(x, mask=is_row, other=0.0))
        w_tile = operand(tl.load(w, mask=is_column, other=0.0))
        acc = tl.dot(w_tile, x_tile, acc, input_precision="tf32x3")
        w += BLOCK_K
        x += BLOCK_K
    return acc
