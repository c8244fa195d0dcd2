"""Matrix products of few rows, where reading the weights is the time: C = X W^T, with its epilogue in the same launch.

A tile of W has 64 rows or more, which fill the tensor core's wide side, and the rows of X are the narrow one. K is
split so that all multiprocessors read. The last program of a tile sums the partial results in their order.
So a row's bits depend neither on other rows of its tile nor on timing.

`fixed_linear` takes any number of rows, in tiles of one size and with one split of K for a weight. So a row's bits
depend on the weight only (`--batch-invariant`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import MAX_TILES, counters, dot_size, operand
from app.engine.errors import UnsupportedError

MAX_ROWS = 64
SHARED_MEMORY = 227 << 10
"""Bytes of a program on sm_90."""
ROWS = (1, 16, 32, MAX_ROWS)
"""Most rows of the products that share a variant. One row is apart: cuBLAS has a matrix-vector kernel for it."""


class Product(NamedTuple):
    """Variant of a launch: rows of W and depth (numbers of K) of a tile, splits of K, and Triton's warps and stages."""

    rows: int
    depth: int
    splits: int
    warps: int = 4
    stages: int = 4


VARIANTS = [Product(64, 128, splits) for splits in (4, 2, 8, 1)]
"""All are compiled once, because `splits` is an argument of the kernel."""
FIXED_ROWS = 64
"""Rows of X in a tile of `fixed_linear`."""
FIXED_DEPTHS = (64, 32, 16)
FIXED_MAX_SPLITS = 8


def fits(variant: Product, out_features: int, in_features: int, num_rows: int, *, gated: bool) -> bool:
    """Return True if K is whole tiles in each of its splits, and the tiles in flight have room in 16 bits."""
    shared = 2 * variant.stages * variant.depth * (variant.rows * (1 + gated) + dot_size(num_rows))
    tiles = triton.cdiv(out_features, variant.rows)
    return in_features % (variant.splits * variant.depth) == 0 and shared <= SHARED_MEMORY and tiles <= MAX_TILES


Key = tuple[int, int, bool, int]


def key(weight: Tensor, num_rows: int, *, gated: bool) -> Key:
    """Return what products that share a variant have in common, of at most MAX_ROWS rows."""
    out_features, in_features = weight.shape
    return out_features, in_features, gated, next(most for most in ROWS if most >= num_rows)


def linear(x: Tensor, weight: Tensor, variant: Product, *, gated: bool = False) -> Tensor:
    """Return x @ weight.T `[T, out]` for x `[T, in]` of at most MAX_ROWS rows and a weight `[out, in]`.

    With `gated` the weight is `[2 * I, in]`, gate first, and the result silu(gate) * up `[T, I]`, from products in fp32
    that are rounded once.
    """
    num_rows, in_features = x.shape
    assert num_rows <= MAX_ROWS and fits(variant, len(weight) // (1 + gated), in_features, num_rows, gated=gated)
    return _launch(x, weight, None, variant, dot_size(num_rows), gated=gated)


def fixed_variant(weight: Tensor, multiprocessors: int) -> Product:
    """Return the variant of `fixed_linear` for a weight, with as few splits as give all multiprocessors a tile.

    Raises UnsupportedError if K is no whole number of tiles.
    """
    out_features, in_features = weight.shape
    depth = next((depth for depth in FIXED_DEPTHS if in_features % depth == 0), None)
    if depth is None:
        raise UnsupportedError(
            f"--batch-invariant: a weight of {out_features} x {in_features}; its columns must be a multiple of "
            f"{FIXED_DEPTHS[-1]} on a GPU"
        )
    rows = 128 if weight.itemsize <= 2 else 64  # in fp32 a product takes the registers of three
    tiles, splits = triton.cdiv(out_features, rows), 1
    while tiles * splits < multiprocessors and splits < FIXED_MAX_SPLITS and in_features % (2 * splits * depth) == 0:
        splits *= 2
    return Product(rows, min(depth, 128 // weight.itemsize), splits, warps=rows // 16)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, multiprocessors: int) -> Tensor:
    """Return x @ weight.T + bias `[T, out]` for x `[T, in]` of any number of rows, rounded once.

    With few rows each split of K is a program's. With many a program makes all splits of its tile, in the same order.
    """
    variant = fixed_variant(weight, multiprocessors)
    tiles = triton.cdiv(len(weight), variant.rows) * triton.cdiv(len(x), FIXED_ROWS)
    return _launch(x, weight, bias, variant, FIXED_ROWS, one_program=tiles >= multiprocessors)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    variant: Product,
    columns: int,
    *,
    gated: bool = False,
    one_program: bool = False,
) -> Tensor:
    """Launch `product` for tiles of `columns` rows. With `one_program` a program makes all splits of its tile."""
    num_rows, in_features = x.shape
    out_features = len(weight) // (1 + gated)
    tiles, row_tiles = triton.cdiv(out_features, variant.rows), triton.cdiv(num_rows, columns)
    out = x.new_empty(num_rows, out_features)
    partials, arrived = None, None
    if is_split := variant.splits > 1 and not one_program:
        shape = (row_tiles * tiles, variant.splits, 1 + gated, variant.rows, columns)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
        assert row_tiles * tiles <= MAX_TILES
    product[row_tiles, tiles, variant.splits if is_split else 1](  # neighbouring programs share a tile of W
        x.contiguous(),
        weight,
        bias,
        out,
        partials,
        arrived,
        num_rows,
        out_features,
        in_features,
        variant.splits,
        GATED=gated,
        LOOPS=variant.splits > 1 and one_program,
        BLOCK_M=columns,
        BLOCK_N=variant.rows,
        BLOCK_K=variant.depth,
        num_warps=variant.warps,
        num_stages=variant.stages,
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
    GATED: tl.constexpr,
    LOOPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of the result over one of `splits` shares of K, and finish it if the other programs have.

    With LOOPS a program makes all shares. Sizes of the weight are no part of what is compiled, because a start must try
    several variants in seconds.
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
    up_of_w = w + out_features.to(tl.int64) * in_features
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if LOOPS:
        for share in range(splits):
            offset = share * steps * BLOCK_K
            its_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            its_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            its_acc, its_up = add_share(
                its_acc, its_up, x + offset, w + offset, up_of_w + offset, is_row, is_column, steps, GATED, BLOCK_K
            )
            acc += its_acc
            if GATED:
                up += its_up
    else:
        acc, up = add_share(acc, up, x, w, up_of_w, is_row, is_column, steps, GATED, BLOCK_K)

    is_last = True
    if partial_ptr is not None:
        size = BLOCK_N * BLOCK_M * (1 + GATED)
        index = row_tile * tl.num_programs(1) + tile
        partial = partial_ptr + (index * splits).to(tl.int64) * size
        partial += columns[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partial + split * size, acc)
        if GATED:
            tl.store(partial + split * size + BLOCK_N * BLOCK_M, up)
        tl.debug_barrier()  # all warps have stored before one of them counts
        is_last = tl.atomic_add(arrived_ptr + index, 1, sem="acq_rel") == splits - 1
        if is_last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(splits):
                # Reads bypass the multiprocessor's own cache, which may still have those of an earlier launch.
                acc += tl.load(partial + other * size, cache_modifier=".cg")
                if GATED:
                    up += tl.load(partial + other * size + BLOCK_N * BLOCK_M, cache_modifier=".cg")
            tl.store(arrived_ptr + index, 0)
    if is_last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        out = out_ptr + rows.to(tl.int64)[None, :] * out_features + column[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def add_share(acc, up, x, w, up_of_w, is_row, is_column, steps, GATED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the sums with `steps` tiles of K, in their order, and those of the second half of W with GATED."""
    for _ in range(steps):
        x_tile = operand(tl.load(x, mask=is_row, other=0.0))
        w_tile = operand(tl.load(w, mask=is_column, other=0.0))
        acc = tl.dot(w_tile, x_tile, acc, input_precision="tf32x3")
        if GATED:
            up_tile = operand(tl.load(up_of_w, mask=is_column, other=0.0))
            up = tl.dot(up_tile, x_tile, up, input_precision="tf32x3")
            up_of_w += BLOCK_K
        w += BLOCK_K
        x += BLOCK_K
    return acc, up
