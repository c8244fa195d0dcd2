"""A batch as arrays: token ids, lengths, page tables, and which rows are sampled. Pure NumPy, no loop over tokens.

`forward` computes positions and slots from them on the device, after one packed copy.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from app.engine.arrays import Ints
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.step.graph_sizes import GraphSizes
from app.engine.step.sampling_rows import SampledSequence, SamplingRows, sampling_rows


@dataclass(slots=True)
class RowGroup:
    """Rows of S sequences that go through attention in one call, back to back.

    Sequence i has query_lens[i] rows, from position starts[i] on. `page_table` is [S, P], padded with the scratch page
    0. `query_lens` and `host_seq_lens` (the rows themselves included) are host lists of S.
    """

    starts: Ints
    page_table: Ints
    query_lens: list[int]
    host_seq_lens: list[int]

    @property
    def arrays(self) -> list[Ints]:
        """Return the arrays of `AttentionInputs` and its metadata: a sequence [R] of each row, position offsets [S],
        query_start_loc [S + 1], sequence lengths [S], and the page table, flat."""
        query_start_loc = np.array([0, *accumulate(self.query_lens)], dtype=np.int32)
        seq_lens = np.array(self.host_seq_lens, dtype=np.int32)
        seq_ids = np.repeat(np.arange(len(self.query_lens), dtype=np.int32), self.query_lens)
        return [seq_ids, self.starts - query_start_loc[:-1], query_start_loc, seq_lens, self.page_table.ravel()]

    def positions_and_slots(self, page_size: int) -> list[Ints]:
        """Return the position [R] of each row, and its slot [R]."""
        seq_ids, offsets = self.arrays[:2]
        positions = np.arange(len(seq_ids), dtype=np.int32) + offsets[seq_ids]
        pages, in_page = np.divmod(positions, np.int32(page_size))
        return [positions, self.page_table[seq_ids, pages] * np.int32(page_size) + in_page]


@dataclass(slots=True)
class DraftInputs:
    """D blocks to draft, each from its anchor on. `prev_rows` [D] are as in TargetInputs."""

    request_ids: list[str]
    anchors: Ints
    prev_rows: Ints
    group: RowGroup

    @property
    def arrays(self) -> list[Ints]:
        return [self.anchors, self.prev_rows, *self.group.arrays]


@dataclass(slots=True)
class RecurrentInputs:
    """Slots [S + C] of a step's recurrent states, which are read from `slots` and written to `next_slots`.

    The first S sequences decode, with at most `width` rows each. Then come C chunks of prompts with `chunk_lens` [C]
    rows from positions `chunk_starts` [C] on. In a graph shapes are `static`.
    """

    slots: Ints
    next_slots: Ints
    chunk_starts: Ints
    chunk_lens: Ints
    width: int
    static: bool = False

    @property
    def arrays(self) -> list[Ints]:
        return [self.slots, self.next_slots, self.chunk_starts, self.chunk_lens]


@dataclass(slots=True)
class TargetInputs:
    """The target's T rows. `token_ids` [T] has 0 where a draft belongs. `token_source` [T] is where a row's token is:
    among `token_ids` at its own number, or at T + its place in the flattened drafts.

    `logits_indices` [R] are the rows whose next token is wanted. Sampled sequence i of S has the logit rows
    `logits_start[i] ...`, one and then one per draft. `draft_index[i]` is its row in the drafts, 0 if it has none.
    `prev_rows[i]` is its row in the result of the step in flight, which moves its anchor and its start, or -1. The last
    sequence of a padded step is padding, and has no entry there. `recurrent` is there if the target is a hybrid.
    """

    token_ids: Ints
    token_source: Ints
    logits_indices: Ints
    logits_start: Ints
    num_drafts: Ints
    draft_index: Ints
    prev_rows: Ints
    groups: list[RowGroup]
    recurrent: RecurrentInputs | None = None

    @property
    def arrays(self) -> list[Ints]:
        logits = [self.logits_indices, self.logits_start, self.num_drafts, self.draft_index]
        own = [self.token_ids, self.token_source, *logits, self.prev_rows]
        states = self.recurrent.arrays if self.recurrent else []
        return own + [array for group in self.groups for array in group.arrays] + states


@dataclass(slots=True)
class StepInputs:
    """One step as arrays. A runner gets nothing else, so it can be pickled and sent to another process.

    `sampling` is empty if argmax is enough for all rows. `sequence_keys` are those of the decoding sequences. The token
    lists in `sampling` are those of the sequences themselves, so a step is launched before the next commit.
    """

    target: TargetInputs
    draft: DraftInputs | None
    sampling: list[SamplingRows]
    sequence_keys: list[tuple[str, int]]
    has_prefill: bool

    @property
    def plain_sequences(self) -> list[tuple[str, int]] | None:
        """Return the keys of the sequences of a step without drafts and prefill, whose context KV may be pending."""
        return None if self.has_prefill or self.draft else self.sequence_keys


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrangement of arrays that a runner reads.

    Prefill chunks are a group of their own if `separate_prefill`. With graphs drafts lie in `draft_columns`, and blocks
    are widened to a captured width of `graph_sizes`. A draft's block has a row for each draft, and with a
    `first_draft_row` of 1 the anchor's. `hybrid` targets get the slots of their recurrent state.
    """

    page_size: int
    separate_prefill: bool = True
    draft_columns: int | None = None
    graph_sizes: GraphSizes | None = None
    first_draft_row: int = 1
    hybrid: bool = False

    def build(self, batch: Batch) -> StepInputs:
        """Return the arrays of a batch that is not empty."""
        rows, num_blocks = batch.block_rows, sum(share.num_drafts > 0 for share in batch.decodes)
        if self.graph_sizes and self.graph_sizes.drafts and num_blocks:
            _, rows = self.graph_sizes.draft(num_blocks, rows)
        inputs = build(
            batch,
            self.page_size,
            rows,
            draft_columns=self.draft_columns,
            separate_prefill=self.separate_prefill,
            first_draft_row=self.first_draft_row,
        )
        if self.hybrid:
            inputs.target.recurrent = _recurrent_inputs(batch)
        return inputs


def build(
    batch: Batch,
    page_size: int,
    block_rows: int,
    *,
    draft_columns: int | None = None,
    separate_prefill: bool = True,
    first_draft_row: int = 1,
) -> StepInputs:
    """Return the arrays of a batch that is not empty, with draft blocks for `block_rows` - 1 drafts.

    Drafts lie in `draft_columns`, or without gaps if it is None. See `Layout` for the others.
    """
    rows, sampling = batch.rows, batch.sampling
    token_ids = _token_ids(rows)
    num_drafts = [share.num_drafts for share in sampling]
    logits_start = [0, *accumulate(count + 1 for count in num_drafts)][:-1]
    drafting_so_far = accumulate(count > 0 for count in num_drafts)
    draft_index = [so_far - 1 if count else 0 for so_far, count in zip(drafting_so_far, num_drafts, strict=True)]
    every_row = np.arange(len(token_ids), dtype=np.int32)
    token_source = logits_indices = every_row
    if batch.prefills:
        ends = accumulate(share.count for share in rows)
        firsts = [end - share.num_drafts - 1 for share, end in zip(rows, ends, strict=True) if share.needs_logits]
        logits_indices = _ranges(firsts, [count + 1 for count in num_drafts])
    if any(num_drafts):
        drafts = _ranges([first + 1 for first in logits_start], num_drafts)
        token_source = every_row.copy()
        columns = block_rows - 1 if draft_columns is None else draft_columns
        token_source[logits_indices[drafts]] = len(every_row) + _ranges([n * columns for n in draft_index], num_drafts)
    parts = (batch.decodes, batch.prefills) if separate_prefill else (rows,)
    target = TargetInputs(
        token_ids=token_ids,
        token_source=token_source,
        logits_indices=logits_indices,
        logits_start=np.array(logits_start, dtype=np.int32),
        num_drafts=np.array(num_drafts, dtype=np.int32),
        draft_index=np.array(draft_index, dtype=np.int32),
        prev_rows=_prev_rows(sampling),
        groups=[_group(part, [share.count for share in part], page_size) for part in parts if part],
    )
    draft = _draft_inputs(batch, page_size, block_rows - 1 + first_draft_row) if any(num_drafts) else None
    sampled = [
        SampledSequence(*each)
        for each in zip(sampling, logits_start, draft_index, strict=True)
        if not each[0].seq.request.sampling.is_argmax
    ]
    keys = [share.seq.key for share in batch.decodes]
    return StepInputs(target, draft, sampling_rows(sampled) if sampled else [], keys, bool(batch.prefills))


def _recurrent_inputs(batch: Batch) -> RecurrentInputs:
    moves = [(share.seq.state_slot, share.next_slot or share.seq.state_slot) for share in batch.decodes]
    chunks = []
    for share in batch.prefills:
        slot, next_slot = share.seq.state_slot, share.next_slot or share.seq.state_slot
        if share.split:
            moves.append((slot, share.seq.split_slot))
            chunks.append((share.start, share.split - share.start))
            slot = share.seq.split_slot
        first = share.split or share.start
        moves.append((slot, next_slot))
        chunks.append((first, share.end - first))
    slots, next_slots = _columns(moves)
    starts, lens = _columns(chunks)
    return RecurrentInputs(slots, next_slots, starts, lens, max((share.count for share in batch.decodes), default=0))


def _columns(pairs: list[tuple[int, int]]) -> Ints:
    """Return n pairs as an array [2, n]."""
    return np.array(pairs, dtype=np.int32).reshape(-1, 2).T


def _token_ids(shares: list[ScheduledSequence]) -> Ints:
    """Return the tokens of all rows, 0 where a draft belongs."""
    token_ids: list[int] = []
    for rows in shares:
        own = rows.seq.token_ids[rows.start : rows.end]
        token_ids += own
        token_ids += [0] * (rows.count - len(own))
    return np.array(token_ids, dtype=np.int32)


def _group(shares: list[ScheduledSequence], counts: list[int], page_size: int) -> RowGroup:
    """Return `counts[i]` rows from the start of `shares[i]` on, with pages for the greatest start they may have."""
    starts = [rows.start for rows in shares]
    seq_lens = [start + count for start, count in zip(starts, counts, strict=True)]
    width = -(-max(length + rows.max_accepted for length, rows in zip(seq_lens, shares, strict=True)) // page_size)
    page_table: Ints = np.zeros((len(shares), width), dtype=np.int32)
    for row, rows in zip(page_table, shares, strict=True):
        pages = np.frombuffer(rows.seq.pages, dtype=np.int32)[:width]
        row[: len(pages)] = pages
    return RowGroup(np.array(starts, dtype=np.int32), page_table, counts, seq_lens)


def _draft_inputs(batch: Batch, page_size: int, block_rows: int) -> DraftInputs:
    """Return blocks of one width from each anchor on, also if fewer of their rows are verified."""
    drafting = [rows for rows in batch.decodes if rows.num_drafts]
    return DraftInputs(
        request_ids=[rows.seq.request.request_id for rows in drafting],
        anchors=np.array([rows.seq.token_ids[-1] for rows in drafting], dtype=np.int32),
        prev_rows=_prev_rows(drafting),
        group=_group(drafting, [block_rows] * len(drafting), page_size),
    )


def _prev_rows(shares: list[ScheduledSequence]) -> Ints:
    return np.array([rows.prev_row for rows in shares], dtype=np.int32)


def _ranges(starts: list[int], counts: list[int]) -> Ints:
    """Return the concatenation of arange(start, start + count)."""
    lengths: Ints = np.array(counts, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    shifts = np.array(starts, dtype=np.int32) - ends + lengths
    ranges: Ints = np.arange(sum(counts), dtype=np.int32) + np.repeat(shifts, counts)
    return ranges
