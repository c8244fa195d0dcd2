"""A mixture of experts in Triton, for few rows an expert: the choice of experts, and both products of their MLPs.

Pairs of a row and an expert are sorted by expert. A tile has up to BLOCK_M pairs of one expert, so a weight is read
once for all of them. The number of tiles follows from tensor shapes, so a graph can hold a launch. A spare tile ends
at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import INTERPRETED, items_per_program, operand
from app.engine.cuda.products import depth_of, widened
from app.engine.device.base import ExpertWeights
from app.engine.device.moe import SWIGLU_ALPHA, MoeConfig, by_expert, router_logits
from app.engine.quantised import Weight

BLOCK_M = tl.constexpr(16)
"""Pairs of a tile: the least number of rows of Triton's matrix product."""


def mixture(x: Tensor, weights: ExpertWeights, config: MoeConfig) -> Tensor:
    """Return `Backend.moe`."""
    shares, chosen = routed(router_logits(x, weights), config)
    order, _, ends = by_expert(chosen, config.num_experts)
    gated = _multiply(x, weights.gate_up, weights.gate_up_bias, order, ends, None, config)
    out = _multiply(gated, weights.down, weights.down_bias, order, ends, shares, config)
    return out.view(-1, config.num_experts_per_tok, x.shape[1]).sum(dim=1)


def routed(logits: Tensor, config: MoeConfig) -> tuple[Tensor, Tensor]:
    """Return (weights fp32, experts int32), each [T, k], like `device.moe.route`. The first of equal ones is taken."""
    num_rows, num_experts = logits.shape
    k = config.num_experts_per_tok
    shares = torch.empty(num_rows, k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_rows, k, dtype=torch.int32, device=logits.device)
    rows = items_per_program(num_rows, on_gpu=4)
    route[triton.cdiv(num_rows, rows),](
        logits, shares, chosen, num_rows, EXPERTS=num_experts, TOP_K=k, NORMED=config.norm_topk_prob, ROWS=rows
    )
    return shares, chosen


def _multiply(
    x: Tensor, w: Weight, bias: Tensor | None, order: Tensor, ends: Tensor, shares: Tensor | None, config: MoeConfig
) -> Tensor:
    """Return the SwiGLU of all pairs in sorted order, or with `shares` the weighted outputs in the order of pairs."""
    data, scales = (w, None) if isinstance(w, Tensor) else (w.data, w.scales)
    num_pairs, columns = len(order), data.shape[1] // (2 if shares is None else 1)
    out = x.new_empty(num_pairs, columns)
    # Each expert that has pairs may have one tile that is not full.
    tiles = min(num_pairs, min(num_pairs, config.num_experts) + num_pairs // BLOCK_M.value)
    block_n = triton.next_power_of_2(columns) if INTERPRETED else 32 if shares is None else 64
    depth = triton.next_power_of_2(x.shape[1]) if INTERPRETED else 64
    tensors = x, data, scales, bias, out, order, ends, shares
    expert_rows[tiles, triton.cdiv(columns, block_n)](
        *tensors,
        IN=x.shape[1],
        OUT=columns,
        TOP_K=config.num_experts_per_tok,
        EXPERTS=config.num_experts,
        LIMIT=config.swiglu_limit or 0.0,
        ALPHA=SWIGLU_ALPHA,
        GROUPS=1 if scales is None else scales.shape[2],
        BLOCK_N=block_n,
        BLOCK_K=depth if isinstance(w, Tensor) else depth_of(w.group, 128),
        num_stages=4,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def route(
    logits_ptr,
    share_ptr,
    chosen_ptr,
    num_rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the TOP_K largest of EXPERTS logits, and their softmax, for ROWS rows."""
    BLOCK_E: tl.constexpr = triton.next_power_of_2(EXPERTS)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOP_K)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts, slots = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside = (row < num_rows)[:, None] & (experts < EXPERTS)
    left = tl.load(logits_ptr + row.to(tl.int64)[:, None] * EXPERTS + experts, mask=inside, other=float("-inf"))
    is_lost = tl.sum((left != left).to(tl.int32), 1) > 0
    highest = tl.where((row < num_rows) & (is_lost == 0), tl.max(left, 1), 0.0)
    total = tl.sum(tl.exp(left - highest[:, None]), 1)
    shares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    chosen = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        first = tl.min(tl.where(left == best[:, None], experts, BLOCK_E), 1)
        first = tl.minimum(first, EXPERTS - 1)  # NaN equals nothing, and experts must exist
        shares = tl.where(slots == i, tl.exp(best - highest)[:, None], shares)
        chosen = tl.where(slots == i, first[:, None], chosen)
        left = tl.where(experts == first[:, None], float("-inf"), left)
    if NORMED:
        total = tl.sum(shares, 1)
    total = tl.where(row < num_rows, tl.where(is_lost, float("nan"), total), 1.0)
    offset, inside = row.to(tl.int64)[:, None] * TOP_K + slots, (row < num_rows)[:, None] & (slots < TOP_K)
    tl.store(share_ptr + offset, shares / total[:, None], mask=inside)
    tl.store(chosen_ptr + offset, chosen, mask=inside)


@triton.jit
def expert_of(tile, order_ptr, ends_ptr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return (the expert of a tile of ROWS pairs, their indices in sorted order, True where there is one, the pairs).

    `ends_ptr` [EXPERTS] are where each expert's pairs end in `order_ptr`. Tiles of an expert follow one another, and a
    spare tile has the expert EXPERTS.
    """
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    ends = tl.load(ends_ptr + experts, mask=experts < EXPERTS, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0)
    tiles = tl.where(experts < EXPERTS, tl.cdiv(ends - starts, ROWS), 0)
    last_tiles = tl.cumsum(tiles, 0)
    expert = tl.sum(((last_tiles <= tile) & (experts < EXPERTS)).to(tl.int32), 0)
    is_own = experts == expert
    start, end = tl.sum(tl.where(is_own, starts, 0), 0), tl.sum(tl.where(is_own, ends, 0), 0)
    first = start + (tile - tl.sum(tl.where(is_own, last_tiles - tiles, 0), 0)) * ROWS
    index = first + tl.arange(0, ROWS)
    is_row = index < end
    return expert, index, is_row, tl.load(order_ptr + index, mask=is_row, other=0)


@triton.jit
def expert_rows(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    ends_ptr,
    share_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of a tile of pairs.

    Without shares a pair reads its row of x, and the SwiGLU goes to the pair's index in sorted order. With shares a
    pair reads that index, and its output times its share goes to the pair's row of [T, TOP_K]. A weight in
    8 bits has scales [EXPERTS, GROUPS, its rows], one for IN / GROUPS numbers of a row.
    """
    GATE: tl.constexpr = share_ptr is None
    WIDTH: tl.constexpr = 2 * OUT if GATE else OUT
    expert, index, is_row, pair = expert_of(tl.program_id(0), order_ptr, ends_ptr, EXPERTS, BLOCK_M)
    if expert >= EXPERTS:
        return
    source = pair // TOP_K if GATE else index.to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < OUT
    rows = expert.to(tl.int64) * WIDTH + columns
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, IN, BLOCK_K):
        dims = block + tl.arange(0, BLOCK_K)
        inside = dims < IN
        x = tl.load(x_ptr + source[:, None] * IN + dims[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        offset, is_weight = rows[None, :] * IN + dims[:, None], is_column[None, :] & inside[:, None]
        scale = (expert * GROUPS + block * GROUPS // IN) * WIDTH + columns
        weight = tl.load(weight_ptr + offset, mask=is_weight, other=0.0)
        acc += product(x, weight, scales_ptr, scale, is_column)
        if GATE:
            weight = tl.load(weight_ptr + offset + OUT * IN, mask=is_weight, other=0.0)
            up += product(x, weight, scales_ptr, scale + OUT, is_column)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if GATE:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + rows + OUT, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if LIMIT > 0.0:
            acc = tl.minimum(acc, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            acc = acc / (1.0 + tl.exp(-ALPHA * acc)) * up
        else:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        target = index.to(tl.int64)
    else:
        acc *= tl.load(share_ptr + pair, mask=is_row, other=0.0)[:, None]
        target = pair
    inside = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr + target[:, None] * OUT + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def product(x, weight, scales_ptr, scale, is_column):
    """Return the product of two tiles in fp32, whose columns are multiplied by their `scale` if there are some."""
    sums = tl.dot(operand(x), widened(weight, x.dtype), input_precision="tf32x3")
    if scales_ptr is not None:
        sums *= tl.load(scales_ptr + scale, mask=is_column, other=0.0)[None, :]
    return sums
