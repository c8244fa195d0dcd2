"""Paged attention in Triton, of blocks and of prompts, under any mask. Only tokens inside the window are read.

The query heads of a KV head share one tile, so K and V are read once for all of them. The kernel reads all lengths on
the device. The host decides only the shape of the launch, which follows from tensor shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import MAX_TILES, counters, dot_size, items_per_program, operand
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv

LOG2_E = tl.constexpr(log2(e))
TILE_ROWS = 16
"""Query rows that share a tile, so one pass over K and V. Each row takes `group` rows of the tile's matrix."""
SEARCHED_SEQS = tl.constexpr(128)
"""Sequences that a tile searches at a time to find the one that it belongs to."""
MAX_SPLITS = 32
LEAST_OF_A_ROW, LEAST_OF_ROWS = 64, 128
"""Tokens of a split of a tile with one row, and with more. On an H200 a block over 1,024 tokens took 12 % longer in 16
splits than in 8."""
COMBINED_PARTIALS = 32
"""Partial results that a program of `combine` reads, of that many heads divided by the splits."""
CHUNK = 512
"""Tokens of a fixed chunk, 2 MB of Qwen3-8B's K and V. At 60 GB/s a program reads its KV head's share in 4 us."""
PARTIALS_MEMORY = 128 << 20
"""Bytes up to which partial results of fixed chunks are stored. A tile with more of them is one program's."""
PARTIALS_IN_FLIGHT = 8
"""Partial results of a head that `combine` loads before it adds the first of them."""
NUMBERS_IN_FLIGHT = 1 << 14
"""Numbers of partial results that the last program of a tile loads at a time: 128 registers a thread."""


class Heads(NamedTuple):
    """Heads of a decoder's attention, and their size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a launch."""

    rows: int  # query rows of a tile
    tiles: int  # over all sequences; a tile without rows ends at once
    splits: int  # programs of a tile, among which its K and V are split
    tokens: int  # that a program reads at a time
    warps: int
    stages: int
    least: int  # tokens of a split, but for the last one; programs that get none end at once
    chunk: int = 0  # tokens of a fixed chunk; 0 gives each program of a tile one contiguous range


def tile_of(heads: Heads, dtype: torch.dtype, *, plain: bool, fixed: bool) -> tuple[int, int, int]:
    """Return the tokens that a program reads at a time, and Triton's warps and stages.

    Triton keeps `stages` less two tiles of K and V in flight; with three it waits for each tile at once. For 16
    bits and heads of 128 they are the fastest of those measured on an H200 (docs/results), but for `geometry`'s single
    sequence.
    """
    narrow, wide = dtype.itemsize <= 2, heads.head_dim > 128
    if plain:
        return (64 if narrow else 32) // (2 if wide else 1), 4 if narrow or not wide else 8, 5
    if narrow and not wide:
        many = heads.num_heads > 4 * heads.num_kv_heads
        return 32 if many or fixed else 64, 8 if many else 4, 5
    return 16 if wide and not narrow else 32, 8, 3


def geometry(
    query_lens: Sequence[int], heads: Heads, dtype: torch.dtype, multiprocessors: int, *, fixed: bool = False
) -> Geometry:
    """Return the shape of a launch for sequences of `query_lens` rows.

    In a graph these are the rows of its capture. If one has more than one row there, a replay may spread all rows over
    the sequences in any way. A `fixed` launch has the same tiles and chunks for any rows.
    """
    num_seqs, num_rows, plain = len(query_lens), sum(query_lens), max(query_lens) <= 1 and not fixed
    narrow, wide = dtype.itemsize <= 2, heads.head_dim > 128
    # A head of more than 128 dims takes as many registers as the tile of a narrower one, and q in fp32 three times as
    # many. Fixed chunks take registers for a second sum.
    rows = 1 if plain else TILE_ROWS if narrow else TILE_ROWS // (8 if wide else 4 if fixed else 2)
    # Least number of tiles with work, but for padding. A multiprocessor gets at most two programs of one row, or one of
    # more rows. With twice as many, attention took up to half as long again on an H200.
    busy = max(1, sum(count > 0 for count in query_lens), num_rows // rows)
    most = max(1, (2 if plain else 1) * multiprocessors // (busy * heads.num_kv_heads))
    tiles = num_seqs if plain else num_seqs + num_rows // rows
    splits = most if fixed else 1 << (min(MAX_SPLITS, most).bit_length() - 1)
    tokens, warps, stages = tile_of(heads, dtype, plain=plain, fixed=fixed)
    if plain and busy == 1 and narrow and not wide and splits * heads.num_kv_heads > multiprocessors:
        stages = 2  # a split is short, and the other program of the multiprocessor fills its waits
    least = LEAST_OF_A_ROW if plain else LEAST_OF_ROWS
    return Geometry(rows, tiles, splits, tokens, warps, stages, least, CHUNK if fixed else 0)


def splits_of_chunks(launch: Geometry, numbers: int, tokens: int) -> tuple[int, int]:
    """Return (programs of a tile, chunks that sequences of up to `tokens` have) for `numbers` of o."""
    chunks = -(-tokens // launch.chunk)
    return (min(launch.splits, chunks) if 4 * numbers * chunks <= PARTIALS_MEMORY else 1), chunks


def paged_attention(
    q_thd: Tensor,
    kv: LayerKv,
    meta: AttentionMetadata,
    mask: AttentionMask,
    launch: Geometry,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `Backend.attention`. The kernel reads the lengths of `meta` on the device when it runs.

    Partial results of a tile are added by its last program if it has one row, else by `combine`, because one program
    would read half a megabyte of them.
    """
    num_rows, heads, dim = q_thd.shape
    page_size, kv_heads = kv.k.shape[1:3]
    num_seqs, table_width = meta.page_table.shape
    group = heads // kv_heads
    block_m = dot_size(launch.rows * group)
    q, o = q_thd.contiguous(), torch.empty_like(q_thd, memory_format=torch.contiguous_format)
    splits = num_partials = launch.splits
    if launch.chunk:
        splits, num_partials = splits_of_chunks(launch, q.numel(), table_width * page_size)
    partials, sums, counts, in_flight = o, o, o, 0
    if splits > 1:
        partials = torch.empty(num_rows, heads, num_partials, dim, dtype=torch.float32, device=o.device)
        sums = torch.empty(num_rows, heads, num_partials, 2, dtype=torch.float32, device=o.device)
        if launch.rows == 1 and not launch.chunk:
            assert launch.tiles * kv_heads <= MAX_TILES
            counts, in_flight = counters(o.device), max(1, NUMBERS_IN_FLIGHT // (block_m * dim))
        else:
            counts = torch.empty(num_rows, heads, dtype=torch.int32, device=o.device)
    attend[splits, kv_heads, launch.tiles](  # idle tiles come last
        q,
        kv.k,
        kv.v,
        o,
        partials,
        sums,
        counts,
        meta.query_start_loc,
        meta.seq_lens,
        meta.page_table,
        sinks,
        num_seqs,
        table_width,
        num_partials,
        dim**-0.5 * LOG2_E.value,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page_size,
        ROWS=launch.rows,
        LEAST=launch.least,
        CHUNK=launch.chunk,
        IS_SPLIT=splits > 1,
        IN_FLIGHT=in_flight,
        CAUSAL=mask.causal,
        WINDOW=mask.window or 0,
        BLOCK_M=block_m,
        BLOCK_N=launch.tokens,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if splits > 1 and not in_flight:
        num_heads = num_rows * heads
        block = items_per_program(num_heads, on_gpu=1 if launch.chunk else COMBINED_PARTIALS // splits)
        combine[triton.cdiv(num_heads, block),](
            partials,
            sums,
            counts,
            sinks,
            o,
            num_heads,
            num_partials,
            HEADS=heads,
            DIM=dim,
            BLOCK=block,
            IN_FLIGHT=PARTIALS_IN_FLIGHT if launch.chunk else min(PARTIALS_IN_FLIGHT, splits),
        )
    return o


@triton.jit
def locate_tile(cu_q_ptr, kv_len_ptr, tile, num_seqs, ROWS: tl.constexpr):
    """Return a tile's sequence, its first row there, and the sequence's first row of all, rows and tokens."""
    if ROWS == 1:
        seq = tile
        first = 0
    else:
        # The tiles of sequence i begin at query_start_loc[i] // ROWS + i. These are at least as many as it needs, and
        # the spare tiles have no rows.
        seq = -1
        for block in range(0, num_seqs, SEARCHED_SEQS):
            seqs = block + tl.arange(0, SEARCHED_SEQS)
            first_tiles = tl.load(cu_q_ptr + seqs, mask=seqs < num_seqs, other=0) // ROWS + seqs
            seq += tl.sum(((first_tiles <= tile) & (seqs < num_seqs)).to(tl.int32))
        first = (tile - seq - tl.load(cu_q_ptr + seq) // ROWS) * ROWS
    first_q = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - first_q
    return seq, first, first_q, q_len, tl.load(kv_len_ptr + seq)


@triton.jit(do_not_specialize=["num_seqs", "table_width", "num_partials"])
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    partial_ptr,
    sum_ptr,
    count_ptr,
    cu_q_ptr,
    kv_len_ptr,
    table_ptr,
    sink_ptr,
    num_seqs,
    table_width,
    num_partials,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    LEAST: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a tile over one split of its sequence's tokens.

    A tile has ROWS query rows of one sequence by the GROUP query heads of a KV head. Row m of its matrix is query row
    m // GROUP, head m % GROUP. WINDOW is 0 without a window.

    With CHUNK 0 a split is one share of the tokens, LEAST of them or more. Otherwise it is every n-th chunk of CHUNK
    tokens, counted from the sequence's first one. With IS_SPLIT programs store partial results (highest base-2 score,
    sum of weights, unscaled o) for `combine`, or for the last program of the tile if IN_FLIGHT is not 0. That one adds
    them in the order of the splits, IN_FLIGHT at a time, so no bit depends on which program is last.
    """
    split, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(0)
    seq, first, first_q, q_len, kv_len = locate_tile(cu_q_ptr, kv_len_ptr, tile, num_seqs, ROWS)
    if first >= q_len:
        return

    m = tl.arange(0, BLOCK_M)
    row = first + m // GROUP
    is_row = (m < ROWS * GROUP) & (row < q_len)
    heads = (first_q + row).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    dims = tl.arange(0, DIM)
    q = operand(tl.load(q_ptr + heads[:, None] * DIM + dims[None, :], mask=is_row[:, None], other=0.0))
    sinks = None if sink_ptr is None else sink_ptr + kv_head * GROUP + m % GROUP
    position = kv_len - q_len + row
    past_rows = kv_len - q_len + tl.minimum(first + ROWS, q_len)
    if CAUSAL:
        sees = position + 1
        end = past_rows
    else:
        sees = kv_len + 0 * row
        end = kv_len
    start = 0
    if WINDOW:
        start = tl.maximum(kv_len - q_len + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        if not CAUSAL:
            sees = tl.minimum(sees, position + WINDOW)
            end = tl.minimum(end, past_rows - 1 + WINDOW)
    highest, total, acc = no_tokens(None if IS_SPLIT else sinks, BLOCK_M, DIM)
    table = table_ptr + seq.to(tl.int64) * table_width
    k, v = k_ptr + kv_head * DIM, v_ptr + kv_head * DIM
    STRIDE: tl.constexpr = KV_HEADS * DIM
    if CHUNK == 0:
        share = tl.cdiv(tl.cdiv(end - start, BLOCK_N), num_splits) * BLOCK_N
        share = tl.maximum(share, LEAST)
        begin = start + split * share
        if IS_SPLIT and begin >= end:
            return
        stop = tl.minimum(begin + share, end)
        highest, total, acc = over_tokens(
            highest, total, acc, begin, stop, q, k, v, table, position, sees, scale, STRIDE, DIM, PAGE, WINDOW, BLOCK_N
        )
        if IS_SPLIT:
            store_partial(sum_ptr, partial_ptr, heads * num_partials + split, highest, total, acc, is_row, DIM)
            if IN_FLIGHT == 0 and stop == end:
                tl.store(count_ptr + heads, split + 1 + 0 * row, mask=is_row)
    else:
        first_chunk = start // CHUNK
        chunks = tl.cdiv(end, CHUNK) - first_chunk
        if IS_SPLIT and split == 0:
            tl.store(count_ptr + heads, chunks + 0 * row, mask=is_row)
        for chunk in range(split, chunks, num_splits):
            begin = tl.maximum((first_chunk + chunk) * CHUNK, start)
            stop = tl.minimum((first_chunk + chunk + 1) * CHUNK, end)
            h, t, a = no_tokens(None, BLOCK_M, DIM)
            its_highest, its_total, its_acc = over_tokens(
                h, t, a, begin, stop, q, k, v, table, position, sees, scale, STRIDE, DIM, PAGE, WINDOW, BLOCK_N
            )
            if IS_SPLIT:
                partial = heads * num_partials + chunk
                store_partial(sum_ptr, partial_ptr, partial, its_highest, its_total, its_acc, is_row, DIM)
            else:
                highest, total, acc = fold(highest, total, acc, its_highest, its_total, its_acc)

    out = o_ptr + heads[:, None] * DIM + dims[None, :]
    if not IS_SPLIT:
        tl.store(out, scaled(acc, total, o_ptr), mask=is_row[:, None])
    if IN_FLIGHT > 0:
        tl.debug_barrier()  # all warps have stored before one of them counts
        arrived = count_ptr + tile * KV_HEADS + kv_head
        num_splits = tl.cdiv(end - start, share)  # with tokens
        if tl.atomic_add(arrived, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrived, 0)
            highest, total, acc = no_tokens(sinks, BLOCK_M, DIM)
            partial, count = heads * num_partials, tl.where(is_row, num_splits, 0)
            total, acc = add_partials(
                highest, total, acc, sum_ptr, partial_ptr, partial, count, num_splits, DIM, IN_FLIGHT
            )
            tl.store(out, scaled(acc, total, o_ptr), mask=is_row[:, None])


@triton.jit
def no_tokens(sinks, M: tl.constexpr, DIM: tl.constexpr):
    """Return (highest score, sum of weights, o) of heads [M] before any token. A sink is a weight without a value."""
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if sinks is not None:
        highest = tl.load(sinks) * LOG2_E
        total += 1.0
    return highest, total, tl.zeros([M, DIM], tl.float32)


@triton.jit
def store_partial(sum_ptr, partial_ptr, partial, highest, total, acc, is_row, DIM: tl.constexpr):
    """Store what one split leaves of heads [M], in fp32."""
    tl.store(sum_ptr + 2 * partial, highest, mask=is_row)
    tl.store(sum_ptr + 2 * partial + 1, total, mask=is_row)
    tl.store(partial_ptr + partial[:, None] * DIM + tl.arange(0, DIM)[None, :], acc, mask=is_row[:, None])


@triton.jit
def add_partials(highest, total, acc, sum_ptr, partial_ptr, first, count, most, DIM, IN_FLIGHT):
    """Return (sum of weights, o) of heads [M] with the `count` [M] partial results from `first` [M] on, in order.

    Reads bypass the multiprocessor's L1 cache, which may still have the partial results of an earlier launch.
    """
    for block in range(0, most, IN_FLIGHT):
        for i in tl.static_range(IN_FLIGHT):
            partial, inside = first + block + i, block + i < count
            its_highest = tl.load(sum_ptr + 2 * partial, mask=inside, other=float("-inf"), cache_modifier=".cg")
            its_total = tl.load(sum_ptr + 2 * partial + 1, mask=inside, other=0.0, cache_modifier=".cg")
            o = partial_ptr + partial[:, None] * DIM + tl.arange(0, DIM)[None, :]
            its_acc = tl.load(o, mask=inside[:, None], other=0.0, cache_modifier=".cg")
            highest, total, acc = fold(highest, total, acc, its_highest, its_total, its_acc)
    return total, acc


@triton.jit
def scaled(acc, total, o_ptr):
    """Return o in the dtype of `o_ptr`. A row that sees nothing has zeros."""
    return (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(o_ptr.dtype.element_ty)


@triton.jit
def over_tokens(
    highest, total, acc, start, stop, q, k_ptr, v_ptr, table, position, sees, scale, STRIDE, DIM, PAGE, WINDOW, BLOCK_N
):
    """Return each row's highest score, sum of weights and unscaled o with the tokens [start, stop) of its sequence."""
    dims, columns = tl.arange(0, DIM), tl.arange(0, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        token = block + columns
        inside = token < stop
        page = tl.load(table + token // PAGE, mask=inside, other=0)
        slot = (page.to(tl.int64) * PAGE + token % PAGE) * STRIDE
        k = operand(tl.load(k_ptr + slot[None, :] + dims[:, None], mask=inside[None, :], other=0.0))
        v = operand(tl.load(v_ptr + slot[:, None] + dims[None, :], mask=inside[:, None], other=0.0))
        scores = tl.dot(q, k, input_precision="tf32x3") * scale
        visible = inside[None, :] & (token[None, :] < sees[:, None])
        if WINDOW:
            visible = visible & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of this split
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        highest = higher
    return highest, total, acc


@triton.jit
def fold(highest, total, acc, its_highest, its_total, its_acc):
    """Return the highest scores, sums [M] and o with one more partial result. One that a row does not see adds 0.

    `tl.fma` says which product is rounded, because a compiler could choose another one in each kernel.
    """
    higher = tl.maximum(highest, its_highest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, its_shrink = tl.exp2(highest - base), tl.exp2(its_highest - base)
    total = tl.fma(total, shrink, its_total * its_shrink)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), its_acc * its_shrink[:, None])
    return higher, total, acc


@triton.jit(do_not_specialize=["num_heads", "num_partials"])
def combine(
    partial_ptr,
    sum_ptr,
    count_ptr,
    sink_ptr,
    o_ptr,
    num_heads,
    num_partials,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
):
    """Add the partial results of BLOCK heads, each head's count of them, in their order."""
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = head < num_heads
    count = tl.minimum(tl.load(count_ptr + head, mask=inside, other=0), num_partials)
    highest, total, acc = no_tokens(None if sink_ptr is None else sink_ptr + head % HEADS, BLOCK, DIM)
    head = head.to(tl.int64)
    partial, most = head * num_partials, tl.max(count)
    total, acc = add_partials(highest, total, acc, sum_ptr, partial_ptr, partial, count, most, DIM, IN_FLIGHT)
    out = o_ptr + head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out, scaled(acc, total, o_ptr), mask=inside[:, None])
