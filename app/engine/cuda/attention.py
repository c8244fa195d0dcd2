"""Paged attention in Triton, for a few query rows a sequence, under any mask. Tokens behind a window are not read.

The query heads of a KV head share one tile, so K and V are read once for all of them. The kernel reads all lengths on
the device. The host decides only the shape of the launch, which follows from tensor shapes.

Checked in Triton's interpreter and compiled for sm_90; not run on a GPU.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import e, log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import INTERPRETED, MAX_TILES, chain, counters, lines_of_a_program, wait_if_chained
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv

LOG2_E = tl.constexpr(log2(e))
TILE_ROWS = 16
"""Query rows that share a tile, so one pass over K and V. Each of them adds `group` lines to the tile."""
MIN_DOT = 16
"""Least number of rows of Triton's matrix product."""
SEARCHED_SEQS = 128
"""Sequences that a tile searches at a time for its own."""
OF_A_TILE = 8
"""Numbers of a tile in the map, which are 32 bytes: five are used."""
MAX_SPLITS = 16
COMBINED_PARTS = 32
"""Parts that a program of `combine` reads, of as many lines as have so many."""
PART = 512
"""Tokens of a part of one size, 2 MB of Qwen3-8B's K and V. At 60 GB/s a program reads its KV head's share in 4 us."""
PARTS_MEMORY = 128 << 20
"""Bytes up to which parts of one size are kept. A tile with more of them is one program's."""
PARTS_IN_FLIGHT = 8
"""Parts that a program of `combine_in_order` loads before it adds the first of them."""
NUMBERS_IN_FLIGHT = 1 << 14
"""Numbers of parts that the last program of a tile loads before it adds the first of them: 128 registers a thread."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a launch.

    `rows` are the query rows of a tile. `tiles` are over all sequences, and a tile without rows ends at once. K and V
    of each tile are split over `splits` programs, which read `tokens` at a time. `warps` and `stages` are Triton's.
    Each program has one part, or takes turns at parts of `part` tokens, if that is not 0. A `chained` launch may begin
    before the last kernel ends. If it is `mapped`, tiles read their sequence from a map, which a forward makes once.
    If it is `joined`, the last program of a tile of one row adds its parts, and no other kernel does.
    """

    rows: int
    tiles: int
    splits: int
    tokens: int
    warps: int
    stages: int
    part: int = 0
    chained: bool = False
    mapped: bool = False
    joined: bool = False


class Tile(NamedTuple):
    """A way to launch tiles of one kind. `waves` tiles a multiprocessor are what splitting K and V aims at.

    `chained` is 1 for programmatic dependent launch, and `mapped` for a map of tiles where these have several rows.
    """

    tokens: int
    warps: int
    stages: int
    waves: int
    chained: int = 0
    mapped: int = 0


def own_tile(group: int, dtype: torch.dtype, head_dim: int, *, plain: bool) -> Tile:
    """Return the way that is taken where none was measured.

    Triton keeps as many tiles of K and V in flight as `stages` less two. With three it waits for each tile as soon as
    it has asked for it. Parts of a tile of many rows are dear, because `combine` reads them in fp32.
    """
    narrow, wide = dtype.itemsize <= 2, head_dim > 128
    if plain:
        return Tile((64 if narrow else 32) // (2 if wide else 1), 4 if narrow or not wide else 8, stages=5, waves=2)
    if narrow and not wide:
        return Tile(32, 4 if TILE_ROWS * group <= 64 else 8, stages=5, waves=1)
    return Tile(16 if wide and not narrow else 32, 8, stages=3, waves=1)


def geometry(
    query_lens: Sequence[int],
    group: int,
    kv_heads: int,
    dtype: torch.dtype,
    multiprocessors: int,
    head_dim: int = 128,
    tile: Tile | None = None,
    *,
    fixed: bool = False,
    joined: Collection[int] = (),
) -> Geometry:
    """Return the shape of a launch for sequences of `query_lens` rows, with `group` query heads a KV head.

    In a graph these are the rows of its capture. If one has more than one row there, a replay may spread all rows over
    the sequences in any way. A `fixed` launch has the same tiles and parts of PART tokens for any rows. The last
    program of a tile of one row adds its parts, if their number is in `joined`.
    """
    num_seqs, num_rows, plain = len(query_lens), sum(query_lens), max(query_lens) <= 1 and not fixed
    narrow, wide = dtype.itemsize <= 2, head_dim > 128
    # A head of more than 128 dims takes as many registers as the tile of a narrower one, and fp32 those of q thrice.
    # Parts of one size take those of a sum beside the part's.
    rows = 1 if plain else TILE_ROWS if narrow else TILE_ROWS // (8 if wide else 4 if fixed else 2)
    tile = tile or own_tile(group, dtype, head_dim, plain=plain)
    # Least number of tiles with work, but for padding.
    busy = max(1, sum(count > 0 for count in query_lens), num_rows // rows)
    most = -(-tile.waves * multiprocessors // (busy * kv_heads))
    splits = most if fixed else 1 << (min(MAX_SPLITS, most).bit_length() - 1)
    return Geometry(
        rows,
        tiles=num_seqs if plain else num_seqs + num_rows // rows,
        splits=splits,
        tokens=tile.tokens,
        warps=tile.warps,
        stages=tile.stages,
        part=PART if fixed else 0,
        chained=bool(tile.chained),
        mapped=rows > 1 and bool(tile.mapped),
        joined=plain and splits in joined,
    )


def programs_and_parts(at: Geometry, numbers: int, tokens: int) -> tuple[int, int]:
    """Return the programs of a tile, and the parts of `numbers` of o that are kept, for sequences of up to `tokens`."""
    kept = -(-tokens // at.part)
    return (min(at.splits, kept) if 4 * numbers * kept <= PARTS_MEMORY else 1), kept


def paged_attention(
    q_thd: Tensor,
    kv: LayerKv,
    meta: AttentionMetadata,
    mask: AttentionMask,
    at: Geometry,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `Backend.attention`. The kernel reads the lengths of `meta` on the device when it runs."""
    num_rows, heads, dim = q_thd.shape
    page_size, kv_heads = kv.k.shape[1:3]
    num_seqs, table_width = meta.page_table.shape
    group = heads // kv_heads
    q, o = q_thd.contiguous(), torch.empty(num_rows, heads, dim, dtype=q_thd.dtype, device=q_thd.device)
    parts, sums, counts, splits, kept = o, o, o, at.splits, at.splits
    if at.part:
        splits, kept = programs_and_parts(at, q.numel(), table_width * page_size)
        counts = torch.empty(num_rows, heads, dtype=torch.int32, device=o.device) if splits > 1 else o
    joined = at.joined and splits > 1
    if joined:
        assert not at.part and at.tiles * kv_heads <= MAX_TILES
        counts = counters(o.device)
    if splits > 1:
        parts = torch.empty(num_rows, heads, kept, dim, dtype=torch.float32, device=o.device)
        sums = torch.empty(num_rows, heads, kept, 2 if at.part else 1, dtype=torch.float32, device=o.device)
    tiles = o
    if at.mapped:
        if at.rows not in meta.of_forward:
            meta.of_forward[at.rows] = tile_map(meta, at)
        tiles = meta.of_forward[at.rows]
    block_m = max(MIN_DOT, triton.next_power_of_2(at.rows * group))
    attend[at.tiles, kv_heads, splits](
        q,
        kv.k,
        kv.v,
        o,
        parts,
        sums,
        counts,
        meta.query_start_loc,
        meta.seq_lens,
        meta.page_table,
        sinks,
        tiles,
        num_seqs,
        table_width,
        kept,
        dim**-0.5 * LOG2_E.value,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page_size,
        ROWS=at.rows,
        SPLITS=0 if at.part else at.splits,
        PART=at.part,
        ALONE=splits == 1,
        JOINED=max(1, NUMBERS_IN_FLIGHT // (block_m * dim)) if joined else 0,
        CAUSAL=mask.causal,
        WINDOW=mask.window or 0,
        SINKS=sinks is not None,
        MAP_SIZE=OF_A_TILE if at.mapped else 0,
        UPCAST=INTERPRETED,
        BLOCK_M=block_m,
        BLOCK_N=at.tokens,
        BLOCK_S=SEARCHED_SEQS,
        num_warps=at.warps,
        num_stages=at.stages,
        **chain(on=at.chained),
    )
    if splits > 1 and not joined:
        num_lines = num_rows * heads
        lines = lines_of_a_program(num_lines, on_gpu=1 if at.part else COMBINED_PARTS // splits)
        grid = (triton.cdiv(num_lines, lines),)
        if at.part:
            sizes = {"HEADS": heads, "DIM": dim, "SINKS": sinks is not None, "LINES": lines, "AHEAD": PARTS_IN_FLIGHT}
            combine_in_order[grid](
                parts, sums, counts, sinks, o, num_lines, kept, **sizes, num_warps=4, **chain(on=at.chained)
            )
        else:
            combine[grid](
                parts, sums, o, num_lines, DIM=dim, SPLITS=splits, LINES=lines, num_warps=4, **chain(on=at.chained)
            )
    return o


def tile_map(meta: AttentionMetadata, at: Geometry) -> Tensor:
    """Return [tiles, OF_A_TILE] int32: a tile's sequence and the row of it where the tile begins, then the sequence's
    first row of all, its rows and its tokens."""
    out = torch.empty(at.tiles, OF_A_TILE, dtype=torch.int32, device=meta.seq_lens.device)
    starts, lens = meta.query_start_loc, meta.seq_lens
    sizes = {"ROWS": at.rows, "SIZE": OF_A_TILE, "BLOCK_S": SEARCHED_SEQS}
    map_tiles[at.tiles,](starts, lens, out, len(lens), **sizes, num_warps=1)
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def map_tiles(cu_q_ptr, kv_len_ptr, map_ptr, num_seqs, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Write where a tile lies, like `attend` finds it."""
    seq, first, first_q, q_len, kv_len = place_of_tile(cu_q_ptr, kv_len_ptr, tl.program_id(0), num_seqs, ROWS, BLOCK_S)
    to = map_ptr + tl.program_id(0) * SIZE
    tl.store(to, seq)
    tl.store(to + 1, first)
    tl.store(to + 2, first_q)
    tl.store(to + 3, q_len)
    tl.store(to + 4, kv_len)


@triton.jit
def place_of_tile(cu_q_ptr, kv_len_ptr, tile, num_seqs, ROWS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return a tile's sequence, its first row there, and the sequence's first row of all, rows and tokens."""
    if ROWS == 1:
        seq = tile
        first = 0
    else:
        # The tiles of sequence i begin at query_start_loc[i] // ROWS + i. These are at least as many as it needs, and
        # the spare tiles have no rows.
        seq = -1
        for some in range(0, num_seqs, BLOCK_S):
            seqs = some + tl.arange(0, BLOCK_S)
            first_tiles = tl.load(cu_q_ptr + seqs, mask=seqs < num_seqs, other=0) // ROWS + seqs
            seq += tl.sum(((first_tiles <= tile) & (seqs < num_seqs)).to(tl.int32))
        first = (tile - seq - tl.load(cu_q_ptr + seq) // ROWS) * ROWS
    first_q = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - first_q
    return seq, first, first_q, q_len, tl.load(kv_len_ptr + seq)


@triton.jit(do_not_specialize=["num_seqs", "table_width", "kept"])
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    part_ptr,
    sum_ptr,
    count_ptr,
    cu_q_ptr,
    kv_len_ptr,
    table_ptr,
    sink_ptr,
    map_ptr,
    num_seqs,
    table_width,
    kept,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    ALONE: tl.constexpr,
    JOINED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    MAP_SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute a tile over parts of its sequence's tokens.

    A tile has ROWS query rows of one sequence by the GROUP query heads of a KV head. Line m is query row m // GROUP,
    head m % GROUP. WINDOW is 0 without a window. With SINKS each line's sum begins with a weight that has no value.

    With PART 0 a program has one of SPLITS parts. If there are several, it writes o of its part in fp32 and the base-2
    logarithm of the part's sum of weights. That is -inf if a row sees no token of the part.

    Otherwise a part is PART tokens, and begins at a multiple of PART. With ALONE a program folds all parts of its
    tile. Else each takes some, and leaves highest scores, sums and unscaled o, which `combine_in_order` folds.

    With JOINED the last program of a tile folds its shares in their order, so many at a time, whichever it is.
    """
    wait_if_chained(CHAINED)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if MAP_SIZE == 0:
        seq, first, first_q, q_len, kv_len = place_of_tile(cu_q_ptr, kv_len_ptr, tile, num_seqs, ROWS, BLOCK_S)
    else:
        of_tile = map_ptr + tile * MAP_SIZE
        seq, first, first_q = tl.load(of_tile), tl.load(of_tile + 1), tl.load(of_tile + 2)
        q_len, kv_len = tl.load(of_tile + 3), tl.load(of_tile + 4)
    if first >= q_len:
        return

    lines = tl.arange(0, BLOCK_M)
    row = first + lines // GROUP
    is_row = (lines < ROWS * GROUP) & (row < q_len)
    heads = (first_q + row).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + lines % GROUP
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + heads[:, None] * DIM + dims[None, :], mask=is_row[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    position = kv_len - q_len + row
    past_rows = kv_len - q_len + tl.minimum(first + ROWS, q_len)
    if CAUSAL:
        sees = position + 1
        end = past_rows
    else:
        sees = kv_len + 0 * row
        end = kv_len
    begin = 0
    if WINDOW:
        begin = tl.maximum(kv_len - q_len + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        if not CAUSAL:
            sees = tl.minimum(sees, position + WINDOW)
            end = tl.minimum(end, past_rows - 1 + WINDOW)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and (PART > 0 or split == 0):
        highest = tl.load(sink_ptr + kv_head * GROUP + lines % GROUP) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_width
    if PART == 0:
        part = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), SPLITS) * BLOCK_N
        start = begin + split * part
        stop = tl.minimum(start + part, end)
        highest, total, acc = over_tokens(
            highest, total, acc, start, stop,
            q, k_ptr, v_ptr, table, kv_head, position, sees, scale,
            KV_HEADS, DIM, PAGE, WINDOW, UPCAST, BLOCK_N,
        )  # fmt: skip
    else:
        first_part = begin // PART
        parts = tl.cdiv(end, PART) - first_part
        if not ALONE and split == 0:
            tl.store(count_ptr + heads, parts + 0 * row, mask=is_row)
        for part in range(split, parts, tl.num_programs(2)):
            start = tl.maximum((first_part + part) * PART, begin)
            stop = tl.minimum((first_part + part + 1) * PART, end)
            its_highest, its_total, its_acc = over_tokens(
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, DIM], tl.float32),
                start, stop,
                q, k_ptr, v_ptr, table, kv_head, position, sees, scale,
                KV_HEADS, DIM, PAGE, WINDOW, UPCAST, BLOCK_N,
            )  # fmt: skip
            if ALONE:
                highest, total, acc = fold(highest, total, acc, its_highest, its_total, its_acc)
            else:
                place = heads * kept + part
                tl.store(sum_ptr + 2 * place, its_highest, mask=is_row)
                tl.store(sum_ptr + 2 * place + 1, its_total, mask=is_row)
                tl.store(part_ptr + place[:, None] * DIM + dims[None, :], its_acc, mask=is_row[:, None])

    to = o_ptr + heads[:, None] * DIM + dims[None, :]
    if PART == 0 and not ALONE:
        some = tl.where(total == 0.0, 1.0, total)
        place = heads * SPLITS + split
        lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(some))  # NaN stays, and ends the sequence
        tl.store(sum_ptr + place, lse, mask=is_row)
        its_own = part_ptr + place[:, None] * DIM + dims[None, :]
        tl.store(its_own, acc / some[:, None], mask=is_row[:, None] & (start < stop))
    if JOINED > 0:
        tl.debug_barrier()  # all warps have stored before one of them counts
        arrived = count_ptr + tile * KV_HEADS + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(2) - 1:
            tl.store(arrived, 0)
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM], tl.float32)
            for folded in range(0, SPLITS, JOINED):
                for i in tl.static_range(JOINED):
                    place = heads * SPLITS + folded + i
                    has = is_row & (folded + i < SPLITS)
                    # Past the multiprocessor's own cache, which may still have the parts of an earlier launch.
                    its_highest = tl.load(sum_ptr + place, mask=has, other=float("-inf"), cache_modifier=".cg")
                    has = has & (its_highest != float("-inf"))
                    at = part_ptr + place[:, None] * DIM + dims[None, :]
                    its_acc = tl.load(at, mask=has[:, None], other=0.0, cache_modifier=".cg")
                    highest, total, acc = fold(highest, total, acc, its_highest, tl.where(has, 1.0, 0.0), its_acc)
            tl.store(to, scaled(acc, total, o_ptr), mask=is_row[:, None])
    elif ALONE:
        tl.store(to, scaled(acc, total, o_ptr), mask=is_row[:, None])


@triton.jit
def scaled(acc, total, o_ptr):
    """Return o of lines, in its own type. A line that sees nothing has zeros."""
    return (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(o_ptr.dtype.element_ty)


@triton.jit
def over_tokens(
    highest,
    total,
    acc,
    start,
    stop,
    q,
    k_ptr,
    v_ptr,
    table,
    kv_head,
    position,
    sees,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return each line's highest score, sum of weights and unscaled o with the tokens [start, stop) of its sequence."""
    dims, columns = tl.arange(0, DIM), tl.arange(0, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        token = block + columns
        inside = token < stop
        page = tl.load(table + token // PAGE, mask=inside, other=0)
        at = ((page.to(tl.int64) * PAGE + token % PAGE) * KV_HEADS + kv_head) * DIM
        k = tl.load(k_ptr + at[None, :] + dims[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_ptr + at[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, k, input_precision="tf32x3") * scale
        visible = inside[None, :] & (token[None, :] < sees[:, None])
        if WINDOW:
            visible = visible & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of this part
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        highest = higher
    return highest, total, acc


@triton.jit
def fold(highest, total, acc, its_highest, its_total, its_acc):
    """Return the highest score, sum and o of lines [L] with one more part. A part that a line does not see adds 0.

    `tl.fma` says which product is rounded, because a compiler could choose another one in each kernel.
    """
    higher = tl.maximum(highest, its_highest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, its_shrink = tl.exp2(highest - base), tl.exp2(its_highest - base)
    total = tl.fma(total, shrink, its_total * its_shrink)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), its_acc * its_shrink[:, None])
    return higher, total, acc


@triton.jit(do_not_specialize=["num_lines", "kept"])
def combine_in_order(
    part_ptr,
    sum_ptr,
    count_ptr,
    sink_ptr,
    o_ptr,
    num_lines,
    kept,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    LINES: tl.constexpr,
    AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Fold the parts of one size that `attend` left, from the first one on, for LINES heads."""
    wait_if_chained(CHAINED)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    dims = tl.arange(0, DIM)[None, :]
    inside = line < num_lines
    count = tl.minimum(tl.load(count_ptr + line, mask=inside, other=0), kept)
    highest = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    if SINKS:
        highest = tl.load(sink_ptr + line % HEADS) * LOG2_E
        total += 1.0
    acc = tl.zeros([LINES, DIM], tl.float32)
    for some in range(0, tl.max(count), AHEAD):
        for i in tl.static_range(AHEAD):
            place = line.to(tl.int64) * kept + some + i
            has = some + i < count
            its_highest = tl.load(sum_ptr + 2 * place, mask=has, other=float("-inf"))
            its_total = tl.load(sum_ptr + 2 * place + 1, mask=has, other=0.0)
            its_acc = tl.load(part_ptr + place[:, None] * DIM + dims, mask=has[:, None], other=0.0)
            highest, total, acc = fold(highest, total, acc, its_highest, its_total, its_acc)
    o = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = o_ptr + line.to(tl.int64)[:, None] * DIM + dims
    tl.store(to, o.to(o_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_lines"])
def combine(
    part_ptr,
    lse_ptr,
    o_ptr,
    num_lines,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Sum the parts of `attend`, each by its share of the weights, for LINES heads."""
    wait_if_chained(CHAINED)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = line < num_lines
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    at = line.to(tl.int64)[:, None] * SPLITS + splits[None, :]
    lse = tl.load(lse_ptr + at, mask=inside[:, None], other=0.0)
    weights = tl.exp2(lse - tl.max(lse, 1)[:, None])
    seen = inside[:, None] & (lse > float("-inf"))
    places = at[:, :, None] * DIM + dims[None, None, :]
    parts = tl.load(part_ptr + places, mask=seen[:, :, None], other=0.0)
    o = tl.sum(parts * weights[:, :, None], 1) / tl.sum(weights, 1)[:, None]
    to = o_ptr + line.to(tl.int64)[:, None] * DIM + dims[None, :]
    tl.store(to, o.to(o_ptr.dtype.element_ty), mask=inside[:, None])
