"""Matrix products of few rows, where reading the weights is the time: C = X W^T, with its epilogue in the same launch.

A tile of W has 64 rows or more, which fill the tensor core's wide side, and the rows of X are the narrow one. K is
split so that all multiprocessors read. The last program of a tile sums the parts in their order.
So a row's bits depend neither on other rows of its tile nor on timing.

`fixed_linear` takes any number of rows, in tiles of one size and with one split of K for a weight. So a row's bits
depend on the weight alone (`--batch-invariant`).

Interpreted and compiled for sm_90; not run on a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import INTERPRETED, MAX_TILES, chain, counters, lines_of_a_program, wait_if_chained
from app.engine.errors import UnsupportedError

MAX_ROWS = 64
MIN_DOT = 16
"""Least number of columns of Triton's matrix product."""
SHARED_MEMORY = 227 << 10
"""Bytes of a program on sm_90."""
ROWS = (1, 16, 32, MAX_ROWS)
"""Rows up to which a product has a way of its own. One row alone is cuBLAS's matrix by vector."""
AHEAD = tl.constexpr(64 << 10)
"""Bytes of weights that a chained program asks for before it waits. Two programs a multiprocessor ask for 17 MB, which
an H200's memory reads in 4 us and which a third of its L2 cache holds."""


class Product(NamedTuple):
    """A way to launch a product: rows of W and numbers of K of a tile, parts of K, and Triton's warps and stages.

    `chained` is 1 for programmatic dependent launch.
    """

    rows: int
    depth: int
    splits: int
    warps: int = 4
    stages: int = 4
    chained: int = 0


FIXED_ROWS = 64
"""Rows of X in a tile of `fixed_linear`."""
FIXED_DEPTHS = (64, 32, 16)
MAX_SPLITS = 8
CHOICE_WAYS = [Product(64, 128, 1), Product(64, 256, 1), Product(128, 128, 1, warps=8)]
FIXED_WAYS = [Product(rows, 64, splits, warps=rows // 16) for rows in (64, 128) for splits in (1, 2, 4, 8)]
WAYS = [Product(64, depth, splits) for splits in (4, 2, 8, 1) for depth in (128, 256)]


def chained_ways(way: Sequence[int]) -> list[Product]:
    """Return the way as a chained launch, which is timed for the quickest way alone."""
    return [Product(*way)._replace(chained=1)]


def fits(way: Product, out_features: int, in_features: int, num_rows: int, *, gated: bool) -> bool:
    """Return True if K is whole tiles in each of its parts, and the tiles in flight have room in 16 bits."""
    shared = 2 * way.stages * way.depth * (way.rows * (1 + gated) + columns_of(num_rows))
    tiles = triton.cdiv(out_features, way.rows)
    return in_features % (way.splits * way.depth) == 0 and shared <= SHARED_MEMORY and tiles <= MAX_TILES


def columns_of(num_rows: int) -> int:
    columns: int = max(MIN_DOT, triton.next_power_of_2(num_rows))
    return columns


def rows_up_to(num_rows: int) -> int:
    """Return the entry of ROWS that `num_rows` share a way with."""
    return next(most for most in ROWS if most >= num_rows)


def linear(x: Tensor, weight: Tensor, way: Product, *, gated: bool = False) -> Tensor:
    """Return x @ weight.T `[T, out]` for x `[T, in]` of at most MAX_ROWS rows and a weight `[out, in]`.

    With `gated` the weight is `[2 * I, in]`, gate first, and the result silu(gate) * up `[T, I]`, from products in fp32
    that are rounded once.
    """
    num_rows, in_features = x.shape
    assert num_rows <= MAX_ROWS and fits(way, len(weight) // (1 + gated), in_features, num_rows, gated=gated)
    return _launch(x, weight, None, way, columns_of(num_rows), gated=gated)


def fixed_way(weight: Tensor, multiprocessors: int) -> Product:
    """Return the way of `fixed_linear` for a weight, with as few parts of K as give all multiprocessors a tile.

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
    while tiles * splits < multiprocessors and splits < MAX_SPLITS and in_features % (2 * splits * depth) == 0:
        splits *= 2
    return Product(rows, min(depth, 128 // weight.itemsize), splits, warps=rows // 16)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: Product, multiprocessors: int) -> Tensor:
    """Return x @ weight.T + bias `[T, out]` for x `[T, in]` of any number of rows, rounded once.

    With few rows each part of K is a program's. With many a program makes all parts of its tile, in the same order.
    """
    tiles = triton.cdiv(len(weight), way.rows) * triton.cdiv(len(x), FIXED_ROWS)
    return _launch(x, weight, bias, way, FIXED_ROWS, alone=tiles >= multiprocessors)


def choose(x: Tensor, lm_head: Tensor, way: Product, lost: int) -> Tensor:
    """Return the argmax [T] int64 of `linear`'s logits for x `[T, H]` and lm_head `[V, H]`, which are not written.

    Ties go to the lowest id, after logits are rounded to x's dtype. A row whose best is NaN or infinite gets `lost`.
    """
    assert len(x) <= MAX_ROWS and fits(way, len(lm_head), x.shape[1], len(x), gated=False)
    return _best(x, lm_head, way, columns_of(len(x)), lost, alone=False)


def fixed_choose(x: Tensor, lm_head: Tensor, way: Product, lost: int, multiprocessors: int) -> Tensor:
    """Return `choose` for any number of rows, with the logits of `fixed_linear`."""
    tiles = triton.cdiv(len(lm_head), way.rows) * triton.cdiv(len(x), FIXED_ROWS)
    return _best(x, lm_head, way, FIXED_ROWS, lost, alone=tiles >= multiprocessors)


def _best(x: Tensor, lm_head: Tensor, way: Product, columns: int, lost: int, *, alone: bool) -> Tensor:
    num_rows, tiles = len(x), triton.cdiv(len(lm_head), way.rows)
    out = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    if not num_rows:
        return out
    ids = torch.empty(num_rows, tiles, dtype=torch.int32, device=x.device)
    best = _launch(x, lm_head, None, way, columns, ids=ids, alone=alone)
    lines = lines_of_a_program(num_rows, on_gpu=1)
    pick[triton.cdiv(num_rows, lines),](
        best, ids, out, num_rows, tiles, lost, LINES=lines, BLOCK=triton.next_power_of_2(tiles), num_warps=4
    )
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    way: Product,
    columns: int,
    *,
    ids: Tensor | None = None,
    gated: bool = False,
    alone: bool = False,
) -> Tensor:
    """Launch `product` for tiles of `columns` rows. `alone` programs make all parts of their tile.

    With `ids` [T, tiles] these get the column of each tile's best, and its value [T, tiles] fp32 is the result.
    """
    assert not way.chained or weight.data_ptr() % 16 == 0, "the prefetch of its lines would be a fault"
    num_rows, in_features = x.shape
    out_features = len(weight) // (1 + gated)
    tiles, row_tiles = triton.cdiv(out_features, way.rows), triton.cdiv(num_rows, columns)
    shape, dtype = ((num_rows, out_features), x.dtype) if ids is None else (ids.shape, torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    parts, arrived, split = out, out, way.splits > 1 and not alone
    if split:
        of_parts = (row_tiles * tiles, way.splits, 1 + gated, way.rows, columns)
        parts = torch.empty(of_parts, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
        assert row_tiles * tiles <= MAX_TILES
    product[row_tiles, tiles, way.splits if split else 1](  # programs beside one another share a tile of W
        x.contiguous(),
        weight,
        out if bias is None else bias,
        out,
        out if ids is None else ids,
        parts,
        arrived,
        num_rows,
        out_features,
        in_features,
        way.splits,
        GATED=gated,
        SPLIT=split,
        ALONE=way.splits > 1 and alone,
        HAS_BIAS=bias is not None,
        BEST=ids is not None,
        UPCAST=INTERPRETED,
        BLOCK_M=columns,
        BLOCK_N=way.rows,
        BLOCK_K=way.depth,
        num_warps=way.warps,
        num_stages=way.stages,
        **chain(on=bool(way.chained)),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "splits"])
def product(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    id_ptr,
    part_ptr,
    arrived_ptr,
    num_rows,
    out_features,
    in_features,
    splits,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    ALONE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BEST: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute a tile of the result over one of `splits` parts of K, and finish it if the others have come.

    With ALONE a program makes all parts. With BEST only the best of the tile's columns is written. Sizes of the weight
    are no part of what is compiled, because a start must try several ways in seconds.

    With CHAINED a program asks the L2 cache for weights, and then waits for the end of the kernel before. It reads and
    writes memory only behind that. Each program waits, so the kernel before ended behind all kernels before itself.
    Then no part, counter or output is touched while an earlier kernel uses its memory, as if nothing were chained. A
    line of the L2 cache cannot be stale, because all multiprocessors write there.
    """
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, BLOCK_N)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + columns
    is_row, is_column = (rows < num_rows)[None, :], (column < out_features)[:, None]
    steps = in_features // (splits * BLOCK_K)  # a multiple of BLOCK_K begins a part, so that loads are wide
    depth = split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    w = w_ptr + column.to(tl.int64)[:, None] * in_features + depth[None, :]
    x = x_ptr + rows.to(tl.int64)[None, :] * in_features + depth[:, None]
    up_of_w = w + out_features.to(tl.int64) * in_features
    if CHAINED:
        part_of_w = w_ptr + split * steps * BLOCK_K
        inside = tl.minimum(column, out_features - 1)
        ask_for(part_of_w, inside, in_features, steps * BLOCK_K, BLOCK_N * (1 + GATED))
        if GATED:
            ask_for(part_of_w, inside + out_features, in_features, steps * BLOCK_K, BLOCK_N * 2)
    wait_if_chained(CHAINED)
    if ALONE:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for part in range(splits):
            at = part * steps * BLOCK_K
            some, some_up = sum_over_part(
                x + at, w + at, up_of_w + at, is_row, is_column, steps, GATED, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K
            )
            acc += some
            if GATED:
                up += some_up
    else:
        acc, up = sum_over_part(x, w, up_of_w, is_row, is_column, steps, GATED, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K)

    is_last = True
    if SPLIT:
        size = BLOCK_N * BLOCK_M * (1 + GATED)
        place = row_tile * tl.num_programs(1) + tile
        places = part_ptr + (place * splits).to(tl.int64) * size
        places += columns[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(places + split * size, acc)
        if GATED:
            tl.store(places + split * size + BLOCK_N * BLOCK_M, up)
        tl.debug_barrier()  # all warps have stored before one of them counts
        is_last = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == splits - 1
        if is_last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(splits):
                # Past the multiprocessor's own cache, which may still have the parts of an earlier launch.
                acc += tl.load(places + other * size, cache_modifier=".cg")
                if GATED:
                    up += tl.load(places + other * size + BLOCK_N * BLOCK_M, cache_modifier=".cg")
            tl.store(arrived_ptr + place, 0)
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + column, mask=column < out_features, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if BEST:
            logits = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
            logits = tl.where(logits == logits, logits, float("inf"))  # either ends the row
            logits = tl.where(is_column, logits, float("-inf"))
            best = tl.max(logits, 0)
            first = tl.min(tl.where(logits == best[None, :], column[:, None], out_features), 0)
            of_tile = rows.to(tl.int64) * tl.num_programs(1) + tile
            tl.store(out_ptr + of_tile, best, mask=rows < num_rows)
            tl.store(id_ptr + of_tile, first, mask=rows < num_rows)
        else:
            to = out_ptr + rows.to(tl.int64)[None, :] * out_features + column[:, None]
            tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=is_row & is_column)


@triton.jit(do_not_specialize=["num_rows", "lost"])
def pick(best_ptr, id_ptr, out_ptr, num_rows, tiles, lost, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Find the best of all tiles of LINES rows, the lowest id if several are equal."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    of_tile = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (of_tile < tiles)
    at = row.to(tl.int64)[:, None] * tiles + of_tile
    values = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + at, mask=inside, other=0x7FFFFFFF)
    best = tl.max(values, 1)
    first = tl.min(tl.where(values == best[:, None], ids, 0x7FFFFFFF), 1)
    is_finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite, first, lost).to(tl.int64), mask=row < num_rows)


@triton.jit
def ask_for(w_ptr, line, in_features, count, LINES: tl.constexpr):
    """Have the L2 cache read the first `count` numbers of each line of W, but no more than its share of AHEAD.

    A line has two threads, and each asks for half. Addresses and sizes are multiples of 16 bytes.
    """
    size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    half = tl.minimum(count, AHEAD // (size * LINES)) // 2
    at = w_ptr + line.to(tl.int64)[:, None] * in_features + tl.arange(0, 2)[None, :] * half
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0"
    tl.inline_asm_elementwise(asm, "=r,l,r", [at.to(tl.int64), half * size], tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_over_part(
    x,
    w,
    up_of_w,
    is_row,
    is_column,
    steps,
    GATED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums over `steps` tiles of K, in their order, and those of the second half of W with GATED."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(steps):
        x_part = tl.load(x, mask=is_row, other=0.0)
        w_part = tl.load(w, mask=is_column, other=0.0)
        if UPCAST:
            x_part = x_part.to(tl.float32)
            w_part = w_part.to(tl.float32)
        acc = tl.dot(w_part, x_part, acc, input_precision="tf32x3")
        if GATED:
            up_part = tl.load(up_of_w, mask=is_column, other=0.0)
            if UPCAST:
                up_part = up_part.to(tl.float32)
            up = tl.dot(up_part, x_part, up, input_precision="tf32x3")
            up_of_w += BLOCK_K
        w += BLOCK_K
        x += BLOCK_K
    return acc, up
