"""Matrix products C = X W^T: of few rows, and whose rows have the same bits in every batch (`--batch-invariant`).

A tile of W has 64 rows or more, which fill the tensor core's wide side, and the rows of X are the narrow one. Tiles
have one size and K has one split for a weight. With few rows each split is a program's, and the last program of a tile
sums the partial results in their order. With many rows a program makes all splits, in the same order.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import dot_size, memory_of_splits, operand, sum_of_splits
from app.engine.errors import UnsupportedError

ROWS = 64
"""Rows of X in a tile."""
DEPTHS = (128, 64, 32, 16)
MAX_SPLITS = 8
FEW_ROWS = 32
"""Rows up to which the launches of `few_rows` were faster than cuBLAS on an H200."""
LEAST_SHARE, LONG_SHARE = 2048, 3072
"""Numbers of K that a split has at least, with up to one program a multiprocessor and with up to two."""


class Product(NamedTuple):
    """Shape of a launch: rows of X and of W and depth (numbers of K) of a tile, splits of K, and Triton's warps."""

    x_rows: int
    rows: int
    depth: int
    splits: int
    warps: int


def product_of(weight: Tensor, multiprocessors: int) -> Product:
    """Return the launch for a weight and any number of rows, with as few splits as give all multiprocessors a tile.

    Raises UnsupportedError unless K is a whole number of tiles.
    """
    out_features, in_features = weight.shape
    most = 128 // max(2, weight.itemsize)  # more takes a second program's registers
    depth = next((depth for depth in DEPTHS if depth <= most and in_features % depth == 0), 0)
    if not depth:
        raise UnsupportedError(
            f"--batch-invariant: a weight of {out_features} x {in_features}; its columns must be a multiple of "
            f"{DEPTHS[-1]} on a GPU"
        )
    rows = 128 if weight.itemsize == 2 else 64  # fp32 takes the registers of three
    tiles, splits = triton.cdiv(out_features, rows), 1
    while tiles * splits < multiprocessors and splits < MAX_SPLITS and in_features % (2 * splits * depth) == 0:
        splits *= 2
    return Product(ROWS, rows, depth, splits, rows // 16)


def few_rows(weight: Tensor, num_rows: int, multiprocessors: int) -> Product | None:
    """Return the launch for few rows if it is faster than cuBLAS's by what an H200 showed, else None.

    It was so for Qwen3-8B's products in 16 bits but gate_up, whose tiles fill the places of programs, two on a
    multiprocessor, one and a half times. A weight goes this way if its programs fill them once or many times over, and
    each reads as much as those that were measured. Other sizes were not measured, small ones least of all.
    """
    (out_features, in_features), rows, depth = weight.shape, 64, DEPTHS[0]
    if num_rows > FEW_ROWS or weight.itemsize != 2 or in_features % depth or in_features < LEAST_SHARE:
        return None
    tiles, splits = triton.cdiv(out_features, rows), 1
    while splits < MAX_SPLITS and in_features % (2 * splits * depth) == 0:
        share = in_features // (2 * splits)
        most = 2 if share >= LONG_SHARE else 1 if share >= LEAST_SHARE else 0
        if 2 * splits * tiles > most * multiprocessors:
            break
        splits *= 2
    programs = tiles * splits / multiprocessors
    fills = 2 / 3 <= programs <= 2 or programs >= 16
    return Product(dot_size(num_rows), rows, depth, splits, rows // 16) if fills else None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, multiprocessors: int, launch: Product | None = None
) -> Tensor:
    """Return x @ weight.T + bias `[T, out]` for x `[T, in]`, rounded once. A `launch` of `few_rows` takes as many rows
    as it was made for. Without one any number is taken, and a row has the same bits in every batch."""
    (num_rows, in_features), out_features = x.shape, len(weight)
    launch = launch or product_of(weight, multiprocessors)
    tiles, row_tiles = triton.cdiv(out_features, launch.rows), triton.cdiv(num_rows, launch.x_rows)
    one_program = row_tiles * tiles >= multiprocessors
    out = x.new_empty(num_rows, out_features)
    partials, arrived = None, None
    if is_split := launch.splits > 1 and not one_program:
        size = launch.rows * launch.x_rows
        partials, arrived = memory_of_splits(row_tiles * tiles, launch.splits, size, x.device)
    tensors = x.contiguous(), weight, bias, out, partials, arrived
    product[row_tiles, tiles, launch.splits if is_split else 1](  # neighbouring programs share a tile of W
        *tensors,
        num_rows,
        out_features,
        in_features,
        launch.splits,
        LOOPS=launch.splits > 1 and one_program,
        BLOCK_M=launch.x_rows,
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
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = (rows < num_rows)[None, :], (column < out_features)[:, None]
    steps = in_features // (splits * BLOCK_K)  # a share begins at a multiple of BLOCK_K, so that loads are wide
    depth = tl.arange(0, BLOCK_K)
    w = w_ptr + column.to(tl.int64)[:, None] * in_features + depth[None, :]
    x = x_ptr + rows.to(tl.int64)[None, :] * in_features + depth[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if LOOPS:
        for share in range(splits):
            acc += share_of(x, w, is_row, is_column, share, steps, BLOCK_K)
    else:
        acc = share_of(x, w, is_row, is_column, split, steps, BLOCK_K)

    is_last = True
    if partial_ptr is not None:
        index = row_tile * tl.num_programs(1) + tile
        acc, is_last = sum_of_splits(acc, partial_ptr, arrived_ptr, index, split, splits)
    if is_last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[:, None]
        out = out_ptr + rows.to(tl.int64)[None, :] * out_features + column[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def share_of(x, w, is_row, is_column, share, steps, BLOCK_K: tl.constexpr):
    """Return the sums over the `steps` tiles of K of a share, in their order."""
    acc = tl.zeros([w.shape[0], x.shape[1]], tl.float32)
    w += share * steps * BLOCK_K
    x += share * steps * BLOCK_K
    for _ in range(steps):
        w_tile, x_tile = tl.load(w, mask=is_column, other=0.0), tl.load(x, mask=is_row, other=0.0)
        acc = tl.dot(operand(w_tile), operand(x_tile), acc, input_precision="tf32x3")
        w += BLOCK_K
        x += BLOCK_K
    return acc
