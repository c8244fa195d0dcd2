"""Experts in mxfp4 (`PackedFp4`), which become bfloat16 in registers, exactly.

W has the tensor core's wide side, like in `products`, because it can read that from registers. The pairs of an expert
are the narrow one: 16 of them, or 64 where an expert has more than that on average, as in prompts, so that numbers are
converted once for all of them and no weight is ever dequantised in memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda import experts
from app.engine.cuda.experts import expert_of, swiglu
from app.engine.cuda.launch import INTERPRETED, UPCAST, operand
from app.engine.device.moe import SWIGLU_ALPHA, MoeConfig, Routing
from app.engine.quantised import ExpertWeight, PackedFp4, Rows, plain

LARGEST_SCALE = 128
"""e8m0 up to which a scale times 2^126 is a number of bfloat16: 2^1. A weight with a larger one is widened at load."""
E2M1 = tl.constexpr(
    """{ .reg .b32 u, v;
    shl.b32 u, $4, 12;
    shl.b32 v, $4, 6;
    and.b32 u, u, 0x80008000;
    lop3.b32 $0, v, 0x01c001c0, u, 0xea;
    shl.b32 u, $4, 8;
    shl.b32 v, $4, 2;
    and.b32 u, u, 0x80008000;
    lop3.b32 $1, v, 0x01c001c0, u, 0xea;
    shl.b32 u, $4, 4;
    shr.b32 v, $4, 2;
    and.b32 u, u, 0x80008000;
    lop3.b32 $2, v, 0x01c001c0, u, 0xea;
    shr.b32 v, $4, 6;
    and.b32 u, $4, 0x80008000;
    lop3.b32 $3, v, 0x01c001c0, u, 0xea; }"""
)
"""Two words of four numbers to bfloat16, the first numbers of both, the second ones, and so on. The sign at bit 15 and
the other bits of e2m1 at 8 to 6 are 2^-126 of the number there, also if it is subnormal."""


def multiplies(weight: PackedFp4) -> bool:
    """Return True if `multiply` is exact for this weight in its dtype."""
    return weight.dtype == torch.bfloat16 and (weight.data.is_meta or int(weight.scales.max()) <= LARGEST_SCALE)


class Tiles(NamedTuple):
    """Pairs, rows of W and columns of a tile, and Triton's warps and stages."""

    pairs: int
    rows: int
    depth: int
    warps: int
    stages: int


FEW, MANY = Tiles(16, 64, 128, 4, 4), Tiles(64, 128, 128, 8, 3)
"""The fastest of a prototype on an H200, for up to 16 pairs an expert on average and for more."""


def multiply(
    x: Rows,
    w: ExpertWeight,
    bias: Tensor | None,
    routing: Routing,
    shares: Tensor | None,
    config: MoeConfig,
    reader: ExpertWeight | None = None,
) -> Rows:
    """Return `experts.multiply`, also of a packed weight, whose result is plain."""
    if not isinstance(w, PackedFp4):
        return experts.multiply(x, w, bias, routing, shares, config, reader)
    x = plain(x)
    num_pairs, columns = len(routing.order), w.data.shape[1] // (2 if shares is None else 1)
    out = x.new_empty(num_pairs, columns)
    tile = FEW if num_pairs <= FEW.pairs * config.num_experts else MANY
    rows = triton.next_power_of_2(columns) if INTERPRETED else tile.rows
    expert_rows4[experts.max_tiles(num_pairs, config, tile.pairs), triton.cdiv(columns, rows)](
        *(x, w.data.view(torch.int16), w.scales, bias, out, routing.order, routing.ends, shares),
        IN=x.shape[1],
        SKIPPED=w.skipped,
        OUT=columns,
        TOP_K=config.num_experts_per_tok,
        EXPERTS=config.num_experts,
        LIMIT=config.swiglu_limit or 0.0,
        ALPHA=SWIGLU_ALPHA,
        BLOCK_M=tile.pairs,
        BLOCK_N=rows,
        BLOCK_K=triton.next_power_of_2(x.shape[1] + w.skipped) if INTERPRETED else tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def expert_rows4(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    ends_ptr,
    share_ptr,
    IN: tl.constexpr,
    SKIPPED: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of a tile of pairs, like `experts.expert_rows`. SKIPPED numbers of W's first block are
    before the first column of x."""
    GATE: tl.constexpr = share_ptr is None
    WIDTH: tl.constexpr = 2 * OUT if GATE else OUT
    BLOCKS: tl.constexpr = (SKIPPED + IN + 31) // 32
    expert, index, is_row, pair = expert_of(tl.program_id(0), order_ptr, ends_ptr, EXPERTS, BLOCK_M)
    if expert >= EXPERTS:
        return
    source = pair // TOP_K if GATE else index.to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column, is_row = (columns < OUT)[:, None], is_row[None, :]
    word, group = tl.arange(0, BLOCK_K // 4)[None, :], tl.arange(0, BLOCK_K // 32)[None, :]
    first = expert.to(tl.int64) * WIDTH
    w = w_ptr + first * (BLOCKS * 8) + columns[:, None] * (BLOCKS * 8) + word
    scales = scales_ptr + first * BLOCKS + columns[:, None] + group * WIDTH
    column = (word // 8 * 32 + word % 8 - SKIPPED).trans(1, 0)  # of the first number of a word; others are 8 apart
    x = x_ptr + source[None, :] * IN
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Scales are loaded one tile ahead, because Triton pipelines only what a product reads.
    next_scale = tl.load(scales, mask=is_column & (group < BLOCKS), other=0)
    if GATE:
        next_up = tl.load(scales + OUT, mask=is_column & (group < BLOCKS), other=0)
    for block in range(0, BLOCKS, BLOCK_K // 32):
        scale = next_scale
        scales += BLOCK_K // 32 * WIDTH
        is_scale = is_column & (block + BLOCK_K // 32 + group < BLOCKS)
        next_scale = tl.load(scales, mask=is_scale, other=0)
        x0 = columns_of(x, column + block * 32, is_row, IN)
        x1 = columns_of(x, column + block * 32 + 8, is_row, IN)
        x2 = columns_of(x, column + block * 32 + 16, is_row, IN)
        x3 = columns_of(x, column + block * 32 + 24, is_row, IN)
        is_weight = is_column & (block * 8 + word < BLOCKS * 8)
        acc = times(tl.load(w, mask=is_weight, other=0), scale, x0, x1, x2, x3, acc)
        if GATE:
            up_scale = next_up
            next_up = tl.load(scales + OUT, mask=is_scale, other=0)
            up = times(tl.load(w + OUT * BLOCKS * 8, mask=is_weight, other=0), up_scale, x0, x1, x2, x3, up)
        w += BLOCK_K // 4
    if bias_ptr is not None:
        bias_ptr += first + columns[:, None]
        acc += tl.load(bias_ptr, mask=is_column, other=0.0).to(tl.float32)
    if GATE:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + OUT, mask=is_column, other=0.0).to(tl.float32)
        acc = swiglu(acc, up, LIMIT, ALPHA)
        target = index.to(tl.int64)[None, :]
    else:
        target = pair.to(tl.int64)[None, :]
        acc *= tl.load(share_ptr + target, mask=is_row, other=0.0)
    tl.store(out_ptr + target * OUT + columns[:, None], acc.to(out_ptr.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def columns_of(x, column, is_row, IN: tl.constexpr):
    """Return the columns of rows, [K, M], and zeros where there are none."""
    return operand(tl.load(x + column, mask=is_row & (column >= 0) & (column < IN), other=0.0))


@triton.jit
def times(w, scale, x0, x1, x2, x3, acc):
    """Return acc + W x for words of W [N, 8 B], scales [N, B], and the columns of x [8 B, M] of their four numbers."""
    w0, w1, w2, w3 = numbers(w, scale)
    acc = tl.dot(w0, x0, acc)
    acc = tl.dot(w1, x1, acc)
    acc = tl.dot(w2, x2, acc)
    return tl.dot(w3, x3, acc)


@triton.jit
def numbers(w, scale):
    """Return the four numbers of words [N, 8 B], lowest bits first, times their scales e8m0 [N, B].

    They are 2^-126 of themselves until the scale, times 2^126, multiplies them: its exponent is e + 126.
    """
    if UPCAST:  # the same bits, in the upper half of fp32
        wide = w.to(tl.int32)
        w0 = (((wide << 28) & -0x80000000) | ((wide << 22) & 0x01C00000)).to(tl.float32, bitcast=True)
        w1 = (((wide << 24) & -0x80000000) | ((wide << 18) & 0x01C00000)).to(tl.float32, bitcast=True)
        w2 = (((wide << 20) & -0x80000000) | ((wide << 14) & 0x01C00000)).to(tl.float32, bitcast=True)
        w3 = (((wide << 16) & -0x80000000) | ((wide << 10) & 0x01C00000)).to(tl.float32, bitcast=True)
        factor = ((scale.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
    else:
        kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(E2M1, "=r,=r,=r,=r,r", [w], kinds, is_pure=True, pack=2)
        factor = ((scale.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    factor = tl.broadcast_to(factor[:, :, None], [scale.shape[0], scale.shape[1], 8]).reshape(w.shape)
    return w0 * factor, w1 * factor, w2 * factor, w3 * factor
