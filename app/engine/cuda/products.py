"""Matrix products C = X W^T: of few rows, by quantised weights, and whose rows have the same bits in every batch
(`--batch-invariant`).

A tile of W has 64 rows or more, which fill the tensor core's wide side, and the rows of X are the narrow one. Tiles
have one size and K has one split for a weight. With few rows each split is a program's, and the last program of a tile
sums the partial results in their order. With many rows a program makes all splits, in the same order.

A quantised weight is read in 8 bits, which become 16 in registers, exactly. Sums in fp32 are multiplied by the scales.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import MAX_TILES, UPCAST, counters, dot_size, operand, sum_of_splits
from app.engine.errors import UnsupportedError
from app.engine.quantised import QuantisedWeight, Weight

ROWS = 64
"""Rows of X in a tile."""
DEPTHS = (128, 64, 32, 16)
MAX_SPLITS = 8
FEW_ROWS = 32
"""Rows up to which the launches of `few_rows` were faster than cuBLAS on an H200."""
LEAST_SHARE, LONG_SHARE = 2048, 3072
"""Numbers of K that a split has at least, with up to one program a multiprocessor and with up to two."""
INT8 = tl.constexpr(
    """{ .reg .b32 t, u; cvt.u32.u16 t, $1;
    prmt.b32 t, t, 0, 0x4140;
    lop3.b32 u, t, 0x00800080, 0x43004300, 0xea;
    lop3.b32 t, t, 0x007f007f, 0x43004300, 0xea;
    sub.rn.bf16x2 $0, t, u; }"""
)
"""Two int8 to bfloat16. In bfloat16 0x4300 is 128 with a last bit of 1: 128 + the low bits - (128, or 256 if < 0)."""
E4M3 = tl.constexpr(
    """{ .reg .b32 t, u; cvt.u32.u16 t, $1;
    prmt.b32 t, t, 0, 0x1404;
    shr.u32 u, t, 4;
    and.b32 t, t, 0x80008000;
    lop3.b32 t, u, 0x07f007f0, t, 0xea;
    mov.b32 u, 0x7b807b80;
    mul.rn.bf16x2 $0, t, u; }"""
)
"""Two e4m3 to bfloat16. The same bits are 2^-120 of the number there, also if it is subnormal. NaN becomes 480.

Triton converts each number with an instruction, through float16; these convert two at a time.
"""


class Product(NamedTuple):
    """Shape of a launch: rows of X and of W and depth (numbers of K) of a tile, splits of K, and Triton's warps."""

    x_rows: int
    rows: int
    depth: int
    splits: int
    warps: int


def multiplies(weight: QuantisedWeight) -> bool:
    """Return True if `linear` takes this weight."""
    return weight.dtype.itemsize == 2 and weight.group % DEPTHS[-1] == 0


def depth_of(group: int, most: int) -> int:
    """Return the depth of a tile that lies in one group of numbers, or 0."""
    return next((depth for depth in DEPTHS if depth <= most and group % depth == 0), 0)


def product_of(weight: Weight, multiprocessors: int, num_rows: int = ROWS) -> Product:
    """Return the launch for a weight, with as few splits as give all multiprocessors a tile. It is the same for any
    `num_rows` from ROWS on.

    Raises UnsupportedError unless K is a whole number of tiles.
    """
    data, group = (weight, weight.shape[1]) if isinstance(weight, Tensor) else (weight.data, weight.group)
    out_features, in_features = data.shape
    x_rows = min(ROWS, dot_size(num_rows))
    most = 128 // (data.itemsize if x_rows < ROWS else max(2, data.itemsize))  # more takes a second program's registers
    depth = depth_of(group, most)
    if not depth:
        raise UnsupportedError(
            f"--batch-invariant: a weight of {out_features} x {in_features}; its columns must be a multiple of "
            f"{DEPTHS[-1]} on a GPU"
        )
    rows = 128 if data.itemsize == 2 else 64  # fp32 takes the registers of three; 8 bits gain 15 % on an H200
    tiles, splits = triton.cdiv(out_features, rows), 1
    while tiles * splits < multiprocessors and splits < MAX_SPLITS and in_features % (2 * splits * depth) == 0:
        splits *= 2
    return Product(x_rows, rows, depth, splits, rows // 16)


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
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    multiprocessors: int,
    launch: Product | None = None,
    *,
    fixed: bool = True,
) -> Tensor:
    """Return x @ weight.T + bias `[T, out]` for x `[T, in]`, rounded once. A `launch` of `few_rows` takes as many rows
    as it was made for. Without one any number is taken, and if `fixed` a row has the same bits in every batch."""
    data, scales = (weight, None) if isinstance(weight, Tensor) else (weight.data, weight.scales)
    (num_rows, in_features), out_features = x.shape, len(data)
    launch = launch or product_of(weight, multiprocessors, ROWS if fixed else num_rows)
    tiles, row_tiles = triton.cdiv(out_features, launch.rows), triton.cdiv(num_rows, launch.x_rows)
    one_program = row_tiles * tiles >= multiprocessors
    out = x.new_empty(num_rows, out_features)
    partials, arrived = None, None
    if is_split := launch.splits > 1 and not one_program:
        shape = (row_tiles * tiles, launch.splits, launch.rows, launch.x_rows)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
        assert row_tiles * tiles <= MAX_TILES
    tensors = x.contiguous(), data, scales, bias, out, partials, arrived
    sizes = num_rows, out_features, in_features, launch.splits, *((0, 0) if scales is None else scales.stride())
    product[row_tiles, tiles, launch.splits if is_split else 1](  # neighbouring programs share a tile of W
        *tensors,
        *sizes,
        GROUP=0 if scales is None or scales.shape[1] == 1 else in_features // scales.shape[1] // launch.depth,
        LOOPS=launch.splits > 1 and one_program,
        BLOCK_M=launch.x_rows,
        BLOCK_N=launch.rows,
        BLOCK_K=launch.depth,
        num_warps=launch.warps,
        num_stages=4,
    )
    return out


def dense(weight: Weight) -> Tensor:
    """Return a weight [out, in], or experts [E, out, in], dequantised by one launch."""
    if isinstance(weight, Tensor):
        return weight
    data, depth = weight.data, depth_of(weight.group, DEPTHS[0])
    out, scales = torch.empty_like(data, dtype=weight.dtype), weight.scales.mT.contiguous()
    grid = triton.cdiv(data.shape[-2], ROWS), data.shape[-1] // depth, data[..., 0, 0].numel()
    dequantise[grid](data, scales, out, data.shape[-2], weight.group // depth, depth)
    return out


@triton.jit
def dequantise(w_ptr, scales_ptr, out_ptr, rows, group, DEPTH: tl.constexpr):
    """Multiply a tile of W [E, rows, K] by its scales [E, groups, rows]. `group` is the tiles of K in a group."""
    row, tile, expert = tl.program_id(0) * 64 + tl.arange(0, 64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_tiles, is_row = tl.num_programs(1), (row < rows)[:, None]
    offset = ((expert * rows + row)[:, None] * num_tiles + tile) * DEPTH + tl.arange(0, DEPTH)[None, :]
    scale = (expert * (num_tiles // group) + tile // group) * rows + row
    numbers = widened(tl.load(w_ptr + offset, mask=is_row), out_ptr.dtype.element_ty).to(tl.float32)
    numbers *= tl.load(scales_ptr + scale[:, None], mask=is_row)
    tl.store(out_ptr + offset, numbers.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def product(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    out_features,
    in_features,
    splits,
    scale_stride,
    group_stride,
    GROUP: tl.constexpr,
    LOOPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of the result over one of `splits` shares of K, and finish it if the other programs have.

    With LOOPS a program makes all shares. GROUP tiles of K have one scale a row of W, or 0 if all tiles have.
    """
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = (rows < num_rows)[None, :], (column < out_features)[:, None]
    steps = in_features // (splits * BLOCK_K)  # a share begins at a multiple of BLOCK_K, so that loads are wide
    depth = tl.arange(0, BLOCK_K)
    w = w_ptr + column.to(tl.int64)[:, None] * in_features + depth[None, :]
    x = x_ptr + rows.to(tl.int64)[None, :] * in_features + depth[:, None]
    scales = scales_ptr
    if scales_ptr is not None:
        scales += column[:, None] * scale_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if LOOPS:
        for share in range(splits):
            acc += share_of(x, w, scales, group_stride, is_row, is_column, share, steps, GROUP, BLOCK_K)
    else:
        acc = share_of(x, w, scales, group_stride, is_row, is_column, split, steps, GROUP, BLOCK_K)

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
def share_of(x, w, scales, group_stride, is_row, is_column, share, steps, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the sums over the `steps` tiles of K of a share, in their order."""
    acc = tl.zeros([w.shape[0], x.shape[1]], tl.float32)
    first = share * steps
    w += first * BLOCK_K
    x += first * BLOCK_K
    for tile in range(first, first + steps):
        x_tile = tl.load(x, mask=is_row, other=0.0)
        w_tile = widened(tl.load(w, mask=is_column, other=0.0), x_tile.dtype)
        if GROUP > 0:
            scale = tl.load(scales + tile // GROUP * group_stride, mask=is_column, other=0.0)
            acc += tl.dot(w_tile, operand(x_tile)) * scale
        else:
            acc = tl.dot(w_tile, operand(x_tile), acc, input_precision="tf32x3")
        w += BLOCK_K
        x += BLOCK_K
    if scales is not None and GROUP == 0:
        acc *= tl.load(scales, mask=is_column, other=0.0)
    return acc


@triton.jit
def widened(w, dtype: tl.constexpr):
    """Return int8 or e4m3 in `dtype`, and other numbers unchanged, as an operand."""
    if UPCAST:
        w = operand(w)
    elif dtype != tl.bfloat16:
        w = w.to(dtype)
    elif w.dtype == tl.int8:
        w = tl.inline_asm_elementwise(INT8, "=r,h", [w], tl.bfloat16, is_pure=True, pack=2)
    elif w.dtype == tl.float8e4nv:
        w = tl.inline_asm_elementwise(E4M3, "=r,h", [w], tl.bfloat16, is_pure=True, pack=2)
    return w
