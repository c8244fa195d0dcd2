"""Matrix products C = X W^T of numbers in 8 bits, e4m3 or int8, on the tensor core as they are.

128 numbers of a row share a scale, of X and of W: products of 128 are summed, scaled, and added in fp32, in their
order. A row of X is quantised by itself, and neither the number of rows nor the splits of K change the order of its
sums. A tile of W has 64 rows or more, which fill the tensor core's wide side.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import UPCAST, items_per_program, memory_of_splits, operand, sum_of_splits
from app.engine.quantised import QuantisedRows, QuantisedWeight

GROUP = tl.constexpr(128)
"""Numbers of a row that share a scale."""
ONE_TILE_ROWS = 64
"""Rows of X up to which one tile has them all."""
OWN_ROWS = 32
"""Rows of X up to which `linear` was faster than `scaled_mm` on an H200."""
MAX_SPLITS = 8
MIN_GROUPS = 8
"""Groups of a split, below which tiles of 64 rows of W, and so fewer splits, are faster."""


class Product(NamedTuple):
    """Shape of a launch: rows of X and of W in a tile, splits of K, and Triton's warps and stages."""

    x_rows: int
    rows: int
    splits: int
    warps: int
    stages: int


def multiplies(weight: QuantisedWeight) -> bool:
    """Return True if `linear` takes this weight."""
    return weight.dtype.itemsize == 2 and weight.group % GROUP.value == 0


def product_of(weight: QuantisedWeight, num_rows: int, multiprocessors: int) -> Product:
    """Return the launch for a weight (docs/cuda.md). Up to ONE_TILE_ROWS it differs only in the rows of X."""
    out_features, groups = len(weight.data), weight.data.shape[1] // GROUP.value
    if num_rows > ONE_TILE_ROWS:
        # One program keeps a multiprocessor busy. Splits pay while some would have none.
        tiles = triton.cdiv(out_features, 64) * triton.cdiv(num_rows, 128)
        allowed = range(1, min(groups, 4 if tiles < multiprocessors else 1) + 1)
        splits = min(allowed, key=lambda n: triton.cdiv(tiles * n, multiprocessors) * triton.cdiv(groups, n))
        return Product(128, 64, splits, 4, 4)
    tiles = triton.cdiv(out_features, 128)
    x_rows, rows, splits = 16 if num_rows <= 16 else 32 if num_rows <= 32 else ONE_TILE_ROWS, 128, 1
    while tiles * splits < multiprocessors and 2 * splits <= min(MAX_SPLITS, groups):
        splits *= 2
    if splits == 1 or groups < MIN_GROUPS * splits:
        rows, tiles, splits = 64, triton.cdiv(out_features, 64), 1
        while tiles * splits < multiprocessors and 2 * splits <= min(MAX_SPLITS, groups):
            splits *= 2
    return Product(x_rows, rows, splits, 8 if (x_rows, rows) == (16, 128) else 4, 4)


def linear(
    x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None, multiprocessors: int, *, fixed: bool = False
) -> Tensor:
    """Return x @ weight.T + bias `[T, out]` in the weight's dtype, for x `[T, in]` of the weight's kind, rounded once.
    If `fixed` the launch has the same tiles and splits of K for any number of rows."""
    (num_rows, in_features), out_features = x.data.shape, len(weight.data)
    launch = product_of(weight, ONE_TILE_ROWS if fixed else num_rows, multiprocessors)
    if fixed:
        launch = launch._replace(warps=launch.rows // 16)  # one program of all splits has a third accumulator
    tiles, row_tiles = triton.cdiv(out_features, launch.rows), triton.cdiv(num_rows, launch.x_rows)
    one_program = fixed and row_tiles * tiles >= multiprocessors
    out = torch.empty(num_rows, out_features, dtype=weight.dtype, device=x.data.device)
    partials, arrived = None, None
    if is_split := launch.splits > 1 and not one_program:
        size = launch.rows * launch.x_rows
        partials, arrived = memory_of_splits(row_tiles * tiles, launch.splits, size, x.data.device)
    tensors = x.data, x.scales, weight.data, weight.scales, bias, out, partials, arrived
    product8[row_tiles, tiles, launch.splits if is_split else 1](  # neighbouring programs share a tile of W
        *tensors,
        num_rows,
        x.scales.stride(0),
        out_features,
        in_features,
        launch.splits,
        LOOPS=launch.splits > 1 and one_program,
        BLOCK_M=launch.x_rows,
        BLOCK_N=launch.rows,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out


def has_scaled_mm() -> bool:
    """Return True if this PyTorch has `scaled_mm`, and a cuBLAS that takes a scale for each 128 numbers."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return hasattr(F, "scaled_mm") and version >= (12, 9)


def scaled_mm_is_faster(weight: QuantisedWeight, num_rows: int) -> bool:
    """Return True if `scaled_mm` takes this weight, and is faster than `linear` (docs/cuda.md)."""
    in_bf16_by_e4m3 = (weight.dtype, weight.data.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    return num_rows > OWN_ROWS and in_bf16_by_e4m3 and len(weight.data) % 16 == 0


def scaled_mm(x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Return `linear` by cuBLAS. Rows are filled up to a whole four by what lies behind them."""
    num_rows, in_features = x.data.shape
    rows = x.data.as_strided((x.scales.shape[1], in_features), (in_features, 1))
    by_128 = F.ScalingType.BlockWise1x128
    scales = x.scales.t(), by_128, weight.scales, by_128
    return F.scaled_mm(rows, weight.data.t(), *scales, bias=bias, output_dtype=weight.dtype)[:num_rows]


def quantised(x: Tensor, kind: torch.dtype) -> QuantisedRows:
    """Return rows [T, K] in 8 bits of `kind`, with scales as `empty_rows` makes them, by one launch."""
    out, (num_rows, size) = empty_rows(x, kind), x.shape
    rows = items_per_program(num_rows, on_gpu=1)
    groups = triton.next_power_of_2(min(size // GROUP.value, 32))
    grid = triton.cdiv(num_rows, rows), triton.cdiv(size, groups * GROUP.value)
    quantise[grid](x.contiguous(), out.data, out.scales, num_rows, out.scales.stride(0), size, ROWS=rows, GROUPS=groups)
    return out


def empty_rows(like: Tensor, kind: torch.dtype) -> QuantisedRows:
    """Return memory for rows [T, K] in 8 bits and their scales [K / 128, T rounded up to 4] fp32. `scaled_mm` takes
    only whole fours of rows, so there is memory behind the last."""
    num_rows, size = like.shape
    padded = triton.cdiv(num_rows, 4) * 4
    data = torch.empty(padded, size, dtype=kind, device=like.device)[:num_rows]
    return QuantisedRows(data, torch.empty(size // GROUP.value, padded, dtype=torch.float32, device=like.device))


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def quantise(x_ptr, out_ptr, scale_ptr, num_rows, scale_stride, size, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Quantise GROUPS groups of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * (GROUPS * GROUP)
    columns = first + tl.arange(0, GROUPS * GROUP)
    inside = (row < num_rows)[:, None] & (columns < size)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * size + columns[None, :], mask=inside, other=0.0)
    store_in_8_bits(x.to(tl.float32), row, first, out_ptr, scale_ptr, num_rows, scale_stride, size)


@triton.jit
def store_in_8_bits(x, row, first, out_ptr, scale_ptr, num_rows, scale_stride, size):
    """Store the fp32 columns from `first` on, whole groups, of the rows with numbers `row`, in 8 bits with scales.
    `first` is one for all, or each row's own.

    A group that holds NaN or an infinity gets a scale of NaN, because a product by it must be NaN.
    """
    COUNT: tl.constexpr = x.shape[1] // GROUP
    MOST: tl.constexpr = 127.0 if out_ptr.dtype.element_ty == tl.int8 else 448.0
    x = tl.reshape(x, [x.shape[0], COUNT, GROUP])
    most = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 2)  # as integers NaN is the largest, behind infinity
    is_finite = most < 0x7F800000
    most = tl.where(is_finite, tl.maximum(most, 0x0D800000), 0x7FC00000)  # 2^-100 at least: 0 has no inverse
    most = most.to(tl.float32, bitcast=True)
    x = tl.where(is_finite[:, :, None], x * (MOST / most)[:, :, None], 0.0)
    # Whole numbers are the nearest, ties to even, because the last bit of 1.5 * 2^23 is 1.
    x = (x + 12582912.0) - 12582912.0 if out_ptr.dtype.element_ty == tl.int8 else e4m3_number(x)
    group = (tl.zeros_like(row) + first)[:, None] // GROUP + tl.arange(0, COUNT)[None, :]
    place = row.to(tl.int64)[:, None, None] * size + group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    inside = (row < num_rows)[:, None] & (group * GROUP < size)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=inside[:, :, None])
    tl.store(scale_ptr + group * scale_stride + row[:, None], most / MOST, mask=inside)


@triton.jit
def e4m3_number(x):
    """Return the e4m3 number nearest to fp32 |x| <= 448, ties to even, in fp32, so that the cast is exact. The cast of
    Triton 3.7.1's interpreter is wrong where rounding carries, and at ties."""
    bits = x.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
    # Below 2^-6 numbers are multiples of 2^-9, the last bit of 1.5 * 2^14.
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@triton.jit(do_not_specialize=["num_rows", "x_stride", "splits"])
def product8(
    x_ptr,
    x_scales_ptr,
    w_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    x_stride,
    out_features,
    in_features,
    splits,
    LOOPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a tile of the result over one of `splits` shares of K, and finish it if the other programs have.

    Scales are [K / 128, x_stride] of X and [K / 128, out_features] of W. With LOOPS a program makes all shares.
    """
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    depth, groups = tl.arange(0, GROUP), in_features // GROUP
    x = x_ptr + row.to(tl.int64)[None, :] * in_features + depth[:, None]
    w = w_ptr + column.to(tl.int64)[:, None] * in_features + depth[None, :]
    x_scales, w_scales = x_scales_ptr + row, w_scales_ptr + column
    is_row, is_column = row < num_rows, column < out_features
    steps = tl.cdiv(groups, splits)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if LOOPS:
        for share in range(splits):
            first = share * steps
            last = tl.minimum(first + steps, groups)
            acc += share_of(x, x_scales, w, w_scales, x_stride, out_features, is_row, is_column, first, last)
    else:
        first = split * steps
        last = tl.minimum(first + steps, groups)
        acc = share_of(x, x_scales, w, w_scales, x_stride, out_features, is_row, is_column, first, last)
    is_last = True
    if partial_ptr is not None:
        index = row_tile * tl.num_programs(1) + tile
        acc, is_last = sum_of_splits(acc, partial_ptr, arrived_ptr, index, split, splits)
    if is_last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        out = out_ptr + row.to(tl.int64)[None, :] * out_features + column[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def share_of(x, x_scales, w, w_scales, x_stride, w_stride, is_row, is_column, first, last):
    """Return the sums over the groups from `first` to `last` of W x [N, T], in their order."""
    x += first * GROUP
    w += first * GROUP
    x_scales += first * x_stride
    w_scales += first * w_stride
    # Scales are loaded one group ahead, because Triton pipelines only what a product of tiles reads.
    next_x = tl.load(x_scales, mask=is_row & (first < last), other=0.0)
    next_w = tl.load(w_scales, mask=is_column & (first < last), other=0.0)
    acc = tl.zeros([w.shape[0], x.shape[1]], tl.float32)
    for group in range(first, last):
        scale = next_w[:, None] * next_x[None, :]
        x_scales += x_stride
        w_scales += w_stride
        next_x = tl.load(x_scales, mask=is_row & (group + 1 < last), other=0.0)
        next_w = tl.load(w_scales, mask=is_column & (group + 1 < last), other=0.0)
        w_tile = tl.load(w, mask=is_column[:, None], other=0.0)
        acc += dot8(w_tile, tl.load(x, mask=is_row[None, :], other=0.0)) * scale
        x += GROUP
        w += GROUP
    return acc


@triton.jit
def dot8(w, x):
    """Return the product [N, T] fp32 of tiles in 8 bits, of 128 numbers each."""
    if w.dtype == tl.int8 and not UPCAST:
        sums = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
    else:
        sums = tl.dot(operand(w), operand(x))
    return sums
