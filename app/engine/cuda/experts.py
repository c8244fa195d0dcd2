"""A mixture of experts in Triton: the choice of experts, and both products of their MLPs.

Pairs of a row and an expert are sorted by expert. A tile has up to 16 pairs of one expert, or more if experts have
many, so a weight is read once for all of them. The number of tiles follows from tensor shapes, so a graph can hold a
launch. A spare tile ends at once.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda import eight_bits
from app.engine.cuda.eight_bits import GROUP, share_of, store_in_8_bits
from app.engine.cuda.launch import INTERPRETED, MAX_TILES, counters, dot_size, items_per_program, operand
from app.engine.device.base import ExpertWeights
from app.engine.device.moe import SWIGLU_ALPHA, MoeConfig, Routing
from app.engine.quantised import ExpertWeight, QuantisedRows, QuantisedWeight, Rows, Weight, plain

FEW_PAIRS = 32
"""Average rows of an expert up to which tiles have 16 pairs. Larger ones took half as long again at 8 on an H200."""
ROUTER_ROWS, ROUTER_EXPERTS, ROUTER_DEPTH = 16, 64, 64
"""Rows, experts and numbers of K of a tile of the router's product."""
ROUTER_SPLITS = 8
MANY_TILES = 128
"""Tiles of the router's product, without splits of K, that occupy a GPU."""


def mixture(x: Rows, weights: ExpertWeights, config: MoeConfig, product: Callable[..., Rows] | None = None) -> Tensor:
    """Return `Backend.moe`, by `multiply` or a `product` like it."""
    of_pairs: Callable[..., Rows] = product or multiply
    rows = plain(x)
    routing = routed(rows, weights, config)
    gated = of_pairs(x, weights.gate_up, weights.gate_up_bias, routing, None, config, weights.down)
    out = of_pairs(gated, weights.down, weights.down_bias, routing, routing.shares, config)
    return plain(out).view(-1, config.num_experts_per_tok, rows.shape[1]).sum(dim=1)


def routed(x: Tensor, weights: ExpertWeights, config: MoeConfig) -> Routing:
    """Return `device.moe.routed` by two launches. The first of equal experts is taken.

    The router's product is in fp32. K has one split for any number of rows, and its parts are added in one order, so a
    row's experts do not depend on the batch. With many rows a program makes all parts.
    """
    (num_rows, size), num_experts, k = x.shape, config.num_experts, config.num_experts_per_tok
    block_e = min(ROUTER_EXPERTS, dot_size(num_experts))
    splits = min(ROUTER_SPLITS, triton.cdiv(size, ROUTER_DEPTH))
    row_tiles, tiles = triton.cdiv(num_rows, ROUTER_ROWS), triton.cdiv(num_experts, block_e)
    loops = row_tiles * tiles >= MANY_TILES
    assert row_tiles <= MAX_TILES
    parts = torch.empty(1 if loops else splits, num_rows, num_experts, dtype=torch.float32, device=x.device)
    shares = torch.empty(num_rows, k, dtype=torch.float32, device=x.device)
    chosen = torch.empty(num_rows, k, dtype=torch.int32, device=x.device)
    route[row_tiles, tiles, len(parts)](
        x.contiguous(),
        weights.router,
        weights.router_bias,
        parts,
        counters(x.device),
        shares,
        chosen,
        num_rows,
        IN=size,
        EXPERTS=num_experts,
        TOP_K=k,
        NORMED=config.norm_topk_prob,
        SPLITS=splits,
        LOOPS=loops,
        ROWS=ROUTER_ROWS,
        BLOCK_E=block_e,
        BLOCK_K=ROUTER_DEPTH,
        num_warps=8,
    )
    order = torch.empty(num_rows * k, dtype=torch.int64, device=x.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    sort_pairs[num_experts,](chosen, order, ends, num_rows * k, BLOCK=2048, num_warps=8)
    return Routing(shares, chosen, order, ends)


def multiply(
    x: Rows,
    w: Weight,
    bias: Tensor | None,
    routing: Routing,
    shares: Tensor | None,
    config: MoeConfig,
    reader: ExpertWeight | None = None,
) -> Rows:
    """Return the SwiGLU of all pairs in sorted order, or with `shares` the weighted outputs in the order of pairs.

    The result is in 8 bits if `w` and the `reader` that multiplies it are.
    """
    if isinstance(w, QuantisedWeight):
        return _multiply8(x, w, bias, routing, shares, config, reader)
    num_pairs, columns = len(routing.order), w.shape[1] // (2 if shares is None else 1)
    out = w.new_empty(num_pairs, columns)
    block_n = triton.next_power_of_2(columns) if INTERPRETED else 32 if shares is None else 64
    expert_rows[max_tiles(num_pairs, config, 16), triton.cdiv(columns, block_n)](
        plain(x),
        w,
        bias,
        out,
        routing.order,
        routing.ends,
        shares,
        IN=w.shape[2],
        OUT=columns,
        TOP_K=config.num_experts_per_tok,
        EXPERTS=config.num_experts,
        LIMIT=config.swiglu_limit or 0.0,
        ALPHA=SWIGLU_ALPHA,
        BLOCK_M=16,
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(w.shape[2]) if INTERPRETED else 64,
        num_stages=4,
    )
    return out


def _multiply8(
    x: Rows,
    w: QuantisedWeight,
    bias: Tensor | None,
    routing: Routing,
    shares: Tensor | None,
    config: MoeConfig,
    reader: ExpertWeight | None,
) -> Rows:
    if isinstance(x, Tensor) or x.data.dtype != w.data.dtype:
        x = eight_bits.quantised(plain(x), w.data.dtype)
    num_pairs, columns = len(routing.order), w.data.shape[1] // (2 if shares is None else 1)
    kind = reader.data.dtype if isinstance(reader, QuantisedWeight) else w.dtype
    out = torch.empty(num_pairs, columns, dtype=kind, device=w.data.device)
    scales = None
    if isinstance(reader, QuantisedWeight):
        scales = torch.empty(columns // GROUP.value, num_pairs, dtype=torch.float32, device=w.data.device)
    block_m = 16 if num_pairs <= FEW_PAIRS * config.num_experts else 32 if shares is None else 64
    expert_rows8[max_tiles(num_pairs, config, block_m), triton.cdiv(columns, GROUP.value)](
        x.data,
        x.scales,
        x.scales.stride(0),
        w.data,
        w.scales,
        bias,
        out,
        scales,
        num_pairs,
        routing.order,
        routing.ends,
        shares,
        IN=w.data.shape[2],
        OUT=columns,
        TOP_K=config.num_experts_per_tok,
        EXPERTS=config.num_experts,
        LIMIT=config.swiglu_limit or 0.0,
        ALPHA=SWIGLU_ALPHA,
        BLOCK_M=block_m,
        num_warps=8,
        num_stages=3,
    )
    return out if scales is None else QuantisedRows(out, scales)


def add_shared_expert(out: Tensor, shared: Tensor, x: Rows, gate: Tensor) -> Tensor:
    """Return `Backend.add_shared_expert`. Its sums are in fp32."""
    (num_rows, size), result = out.shape, torch.empty_like(out)
    rows = items_per_program(num_rows, on_gpu=1)
    add_shared[triton.cdiv(num_rows, rows),](
        out, shared, plain(x).contiguous(), gate, result, num_rows, SIZE=size, ROWS=rows
    )
    return result


def max_tiles(num_pairs: int, config: MoeConfig, size: int) -> int:
    """Return the most tiles of `size` pairs: each expert that has pairs may have one that is not full."""
    return min(num_pairs, min(num_pairs, config.num_experts) + num_pairs // size)


@triton.jit(do_not_specialize=["num_rows"])
def route(
    x_ptr,
    router_ptr,
    bias_ptr,
    part_ptr,
    arrived_ptr,
    share_ptr,
    chosen_ptr,
    num_rows,
    IN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMED: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute logits of BLOCK_E experts over one of SPLITS shares of IN, or over all with LOOPS. The last program of
    ROWS rows finds their TOP_K largest logits and the softmax of these."""
    PARTS: tl.constexpr = 1 if LOOPS else SPLITS
    row_tile, split = tl.program_id(0), tl.program_id(2)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    x = x_ptr + row.to(tl.int64)[None, :] * IN
    router = router_ptr + expert[:, None] * IN
    if LOOPS:
        acc = tl.zeros([BLOCK_E, ROWS], tl.float32)
        for share in range(SPLITS):
            acc += logits_of(x, router, is_row, expert, share, IN, EXPERTS, SPLITS, BLOCK_K)
    else:
        acc = logits_of(x, router, is_row, expert, split, IN, EXPERTS, SPLITS, BLOCK_K)
    own = part_ptr + (split * num_rows + row).to(tl.int64)[None, :] * EXPERTS + expert[:, None]
    tl.store(own, acc, mask=is_row[None, :] & (expert < EXPERTS)[:, None])
    tl.debug_barrier()  # all warps have stored before one of them counts
    if tl.atomic_add(arrived_ptr + row_tile, 1, sem="acq_rel") == tl.num_programs(1) * PARTS - 1:
        tl.store(arrived_ptr + row_tile, 0)
        BLOCK: tl.constexpr = triton.next_power_of_2(EXPERTS)
        experts = tl.arange(0, BLOCK)[None, :]
        inside = is_row[:, None] & (experts < EXPERTS)
        logits = tl.zeros([ROWS, BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            offset = (part * num_rows + row).to(tl.int64)[:, None] * EXPERTS + experts
            # Reads bypass the multiprocessor's L1 cache, which may still hold an earlier launch's.
            logits += tl.load(part_ptr + offset, mask=inside, other=0.0, cache_modifier=".cg")
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + experts, mask=experts < EXPERTS, other=0.0)
        logits = tl.where(inside, logits, float("-inf"))
        choose(logits, share_ptr, chosen_ptr, row, is_row, EXPERTS, TOP_K, NORMED)


@triton.jit
def logits_of(
    x,
    router,
    is_row,
    expert,
    share,
    IN: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums over a share of IN."""
    STEPS: tl.constexpr = triton.cdiv(IN, SPLITS * BLOCK_K)
    acc = tl.zeros([router.shape[0], x.shape[1]], tl.float32)
    for step in range(STEPS):
        dims = (share * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = dims < IN
        w = tl.load(router + dims[None, :], mask=(expert < EXPERTS)[:, None] & inside[None, :], other=0.0)
        rows = tl.load(x + dims[:, None], mask=is_row[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, rows.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def choose(left, share_ptr, chosen_ptr, row, is_row, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMED: tl.constexpr):
    """Find the TOP_K largest of logits `left` [rows, experts], and their softmax. Those outside are -inf."""
    ROWS: tl.constexpr = left.shape[0]
    BLOCK_E: tl.constexpr = left.shape[1]
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOP_K)
    experts, slots = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    is_lost = tl.sum((left != left).to(tl.int32), 1) > 0
    highest = tl.where(is_row & (is_lost == 0), tl.max(left, 1), 0.0)
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
    total = tl.where(is_row, tl.where(is_lost, float("nan"), total), 1.0)
    offset, inside = row.to(tl.int64)[:, None] * TOP_K + slots, is_row[:, None] & (slots < TOP_K)
    tl.store(share_ptr + offset, shares / total[:, None], mask=inside)
    tl.store(chosen_ptr + offset, chosen, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs(chosen_ptr, order_ptr, ends_ptr, num_pairs, BLOCK: tl.constexpr):
    """Write the pairs of one expert, in their order, behind those of all lower experts, and where they end."""
    expert = tl.program_id(0)
    place, count = 0, 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=tl.num_programs(0))
        place += tl.sum((chosen < expert).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(ends_ptr + expert, place + count)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        is_own = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=tl.num_programs(0)) == expert
        own = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order_ptr + place + own - 1, pair.to(tl.int64), mask=is_own)
        place += tl.max(own, 0)


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of a tile of pairs.

    Without shares a pair reads its row of x, and the SwiGLU goes to the pair's index in sorted order. With shares a
    pair reads that index, and its output times its share goes to the pair's row of [T, TOP_K].
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
        weight = tl.load(weight_ptr + offset, mask=is_weight, other=0.0)
        acc = tl.dot(operand(x), operand(weight), acc, input_precision="tf32x3")
        if GATE:
            weight = tl.load(weight_ptr + offset + OUT * IN, mask=is_weight, other=0.0)
            up = tl.dot(operand(x), operand(weight), up, input_precision="tf32x3")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if GATE:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + rows + OUT, mask=is_column, other=0.0).to(tl.float32)[None, :]
        acc = swiglu(acc, up, LIMIT, ALPHA)
        target = index.to(tl.int64)
    else:
        acc *= tl.load(share_ptr + pair, mask=is_row, other=0.0)[:, None]
        target = pair
    inside = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr + target[:, None] * OUT + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_stride", "out_stride"])
def expert_rows8(
    x_ptr,
    x_scales_ptr,
    x_stride,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    out_scales_ptr,
    out_stride,
    order_ptr,
    ends_ptr,
    share_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute 128 columns of a tile of pairs, like `expert_rows`, of numbers in 8 bits.

    Scales are [IN / 128, x_stride] of X, [EXPERTS, IN / 128, their rows] of weights, and [OUT / 128, out_stride] of a
    result in 8 bits. Rows of weights are the wide side of the tile. A tile has those of the gate and, below, of up.
    """
    GATE: tl.constexpr = share_ptr is None
    WIDTH: tl.constexpr = 2 * OUT if GATE else OUT
    expert, index, is_row, pair = expert_of(tl.program_id(0), order_ptr, ends_ptr, EXPERTS, BLOCK_M)
    if expert >= EXPERTS:
        return
    source = pair // TOP_K if GATE else index.to(tl.int64)
    first = tl.program_id(1) * GROUP
    of_tile = tl.arange(0, 2 * GROUP if GATE else GROUP)
    column = first + of_tile % GROUP
    is_column = column < OUT
    row = column + of_tile // GROUP * OUT
    depth = tl.arange(0, GROUP)
    x = x_ptr + source[None, :] * IN + depth[:, None]
    w = weight_ptr + (expert.to(tl.int64) * WIDTH + row)[:, None] * IN + depth[None, :]
    w_scales = weight_scales_ptr + expert.to(tl.int64) * (IN // GROUP * WIDTH) + row
    acc = share_of(x, x_scales_ptr + source, w, w_scales, x_stride, WIDTH, is_row, is_column, 0, IN // GROUP)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * WIDTH + row, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if GATE:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, GROUP, BLOCK_M]), (1, 2, 0)))
        out, target = tl.trans(swiglu(gate, up, LIMIT, ALPHA)), index.to(tl.int64)
    else:
        out, target = tl.trans(acc * tl.load(share_ptr + pair, mask=is_row, other=0.0)[None, :]), pair
    if out_scales_ptr is not None:
        last = tl.max(tl.where(is_row, index, 0), 0)
        store_in_8_bits(out, index, first, out_ptr, out_scales_ptr, last + 1, out_stride, OUT)
    else:
        columns = first + depth
        inside = is_row[:, None] & (columns < OUT)[None, :]
        tl.store(out_ptr + target[:, None] * OUT + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return `device.moe.gated` of tiles in fp32. LIMIT 0 clips nothing."""
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        out = gate / (1.0 + tl.exp(-ALPHA * gate)) * up
    else:
        out = gate / (1.0 + tl.exp(-gate)) * up
    return out


@triton.jit(do_not_specialize=["num_rows"])
def add_shared(out_ptr, shared_ptr, x_ptr, gate_ptr, result_ptr, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Add the outputs of the expert of all rows to those of ROWS rows' own experts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    inside = (row < num_rows)[:, None] & (columns < SIZE)
    offset = row.to(tl.int64)[:, None] * SIZE + columns
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sum(x * tl.load(gate_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32), 1)
    shared = tl.load(shared_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offset, mask=inside, other=0.0).to(tl.float32) + shared / (1.0 + tl.exp(-gate))[:, None]
    tl.store(result_ptr + offset, out.to(result_ptr.dtype.element_ty), mask=inside)
