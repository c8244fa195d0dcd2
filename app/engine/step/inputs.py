"""A step as one record of arrays: token ids, lengths, page tables, and which rows are sampled. No torch.

The same records hold NumPy arrays on the host and tensors on the device (`A`). `app.engine.arrays` goes over their
fields, so neither the copy between the two nor the message to other ranks knows a field.
"""

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic

import numpy as np

from app.engine.arrays import A, Array, Ints
from app.engine.models.recurrent_rows import RecurrentRows, sequence_rows
from app.engine.sampling.metadata import SamplingMetadata
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.graph_sizes import GraphSizes, Size
from app.engine.step.sampling_rows import sampled_rows


@dataclass(slots=True)
class RowGroup(Generic[A]):
    """R rows of S sequences that go through attention in one call, back to back. All arrays are int32.

    Row r is of sequence `seq_ids[r]` [R]. `position_offsets` [S] is a sequence's first position less the number of its
    first row, so a row's position is its number plus that. `query_start_loc` [S + 1] are the numbers of first rows, and
    `seq_lens` [S] include the rows themselves. `page_table` is [S, P], padded with the scratch page 0. `query_lens` and
    `host_seq_lens` are lengths on the host. `positions` and `slot_mapping` [R] are there if the device wants them.
    Separate pages of the draft are in `draft_table`, each in its number's column modulo the width, or as `draft_slots`
    [R] of a target's rows. A draft's `page_table` then begins with the first page held, and its `seq_lens` with it.
    """

    seq_ids: A
    position_offsets: A
    query_start_loc: A
    seq_lens: A
    page_table: A
    query_lens: list[int]
    host_seq_lens: list[int]
    positions: A | None = None
    slot_mapping: A | None = None
    draft_table: A | None = None
    draft_slots: A | None = None


@dataclass(slots=True)
class DraftInputs(Generic[A]):
    """D blocks to draft, each from its anchor on. `prev_rows` [D] are as in TargetInputs. Requests have no padding."""

    request_ids: list[str]
    anchors: A
    prev_rows: A
    groups: list[RowGroup[A]]


@dataclass(slots=True)
class TargetInputs(Generic[A]):
    """The target's T rows. `token_ids` [T] has 0 where a draft belongs. `token_source` [T] is where a row's token is:
    among `token_ids` at its own number, or at T + its place in the flattened drafts.

    `logits_indices` [R] are the rows whose next token is wanted. Sampled sequence i of S has the logit rows
    `logits_start[i] ...`, one and then one per draft. `draft_index[i]` is its row in the drafts, 0 if it has none.
    `prev_rows[i]` is its row in the result of the step in flight, which moves its anchor and its start, or -1. Without
    padding there are `num_seqs`. The last sequence of a padded step is padding, and has no entry in `prev_rows`.
    `recurrent` is there if the target is a hybrid.
    """

    token_ids: A
    token_source: A
    logits_indices: A
    logits_start: A
    num_drafts: A
    draft_index: A
    prev_rows: A
    groups: list[RowGroup[A]]
    num_seqs: int
    recurrent: RecurrentRows[A] | None = None


@dataclass(slots=True)
class StepInputs:
    """One step as arrays. A runner gets nothing else, so it can be sent to another process.

    `sampling` is empty if argmax is enough for all rows. Its token lists are those of the sequences themselves, so a
    step is launched before the next commit. `plain_sequences` are the keys of the sequences of a step without drafts
    and prefill, whose context KV may be pending, or None for another step. With `in_graph` the target is padded to one.
    """

    target: TargetInputs[Ints]
    draft: DraftInputs[Ints] | None
    sampling: list[SamplingMetadata[Array]]
    plain_sequences: list[tuple[str, int, int]] | None
    in_graph: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrangement of arrays that a runner reads.

    Prefill chunks are a group of their own if `separate_prefill`. A draft's block has a row for each draft, and with a
    `first_draft_row` of 1 the anchor's. `hybrid` targets get the slots of their recurrent state. Some devices get
    `host_positions`, which are positions and slots. Decode steps, and short chunks that are no group of their own, are
    padded to sizes of `graphs`, which may hold draws. Drafts are in the columns of a whole block. Padding rows lie on
    the first pages, each in its own slot. A decoding sequence has `window_pages` separate pages of the draft, or none.
    """

    page_size: int
    separate_prefill: bool = True
    first_draft_row: int = 1
    hybrid: bool = False
    host_positions: bool = False
    graphs: GraphSizes | None = None
    draws_in_graphs: bool = False
    window_pages: int = 0

    def build(self, batch: Batch) -> StepInputs:
        """Return the arrays of a batch that is not empty."""
        blocks, width, size, graphs = batch.num_drafting, batch.block_rows, None, self.graphs
        if graphs and graphs.drafts and blocks:
            blocks, width = graphs.draft(blocks, width)
        if graphs and not batch.prefills:
            size = graphs.target(len(batch.decodes), len(batch.decodes) + batch.num_drafts)
        elif graphs and not self.separate_prefill:
            size = graphs.with_chunks(len(batch.shares), sum(share.count for share in batch.shares))
        target = self.target(batch, size, graphs.block_size - 1 if graphs else width - 1)
        draft = self.draft(batch, blocks, width) if blocks else None
        rows = target.logits_start, target.draft_index, size is not None and self.draws_in_graphs
        is_argmax = all(share.seq.request.sampling.is_argmax for share in batch.sampling)
        sampling = [] if is_argmax else sampled_rows(batch.sampling, *rows)
        plain = None if batch.prefills or draft else [share.seq.key for share in batch.decodes]
        return StepInputs(target, draft, sampling, plain, size is not None)

    def draft(self, batch: Batch, blocks: int, width: int, pages: int = 0) -> DraftInputs[Ints]:
        """Return `blocks` blocks of `width` - 1 drafts, however few are verified. Missing ones are padding."""
        rows = width - 1 + self.first_draft_row
        drafting = [share for share in batch.decodes if share.num_drafts]
        padding = [rows] * (blocks - len(drafting))
        return DraftInputs(
            request_ids=[share.seq.request.request_id for share in drafting],
            anchors=_filled([share.seq.token_ids[-1] for share in drafting], blocks),
            prev_rows=_filled([share.prev_row for share in drafting], blocks, -1),
            groups=[self._group(drafting, [rows] * len(drafting), padding, pages, of_draft=True)],
        )

    def target(self, batch: Batch, size: Size | None, draft_columns: int, pages: int = 0) -> TargetInputs[Ints]:
        """Return the target's rows, padded to (sequences, rows) of `size` if it is given.

        A missing sequence gets as many rows as the size says, and one more sequence all others, which may be none.
        Tables of a graph to be captured are `pages` wide.
        """
        shares, sampling = batch.shares, batch.sampling
        counts, tokens = [share.count for share in shares], list[int]()
        for share in shares:
            tokens += (share.seq.token_ids[share.start : share.end] + [0] * share.count)[: share.count]
        num_drafts = [share.num_drafts for share in sampling]
        ends = zip(shares, accumulate(counts), strict=True)
        logits_start = [end - share.num_drafts - 1 for share, end in ends if share.needs_logits]
        drafting_so_far = accumulate(count > 0 for count in num_drafts)
        draft_index = [so_far - 1 if count else 0 for so_far, count in zip(drafting_so_far, num_drafts, strict=True)]
        num_rows, padding, entries = len(tokens), list[int](), len(sampling)
        if size:
            assert self.graphs
            missing, each = size[0] - len(shares), self.graphs.padding_rows(*size)
            padding = [each] * missing + [size[1] - num_rows - each * missing]
            num_rows, entries = size[1], size[0]
        token_source = logits_indices = np.arange(num_rows, dtype=np.int32)
        if any(num_drafts):
            token_source = token_source.copy()
            places_of_drafts = _ranges([index * draft_columns for index in draft_index], num_drafts)
            token_source[_ranges([first + 1 for first in logits_start], num_drafts)] = num_rows + places_of_drafts
        if batch.prefills and not size:  # a graph chooses after every row
            logits_indices = _ranges(logits_start, [count + 1 for count in num_drafts])
            logits_start = [0, *accumulate(count + 1 for count in num_drafts)][:-1]
        parts = (batch.decodes, batch.prefills) if self.separate_prefill and not size else (shares,)
        places = entries + bool(size)
        groups = [
            self._group(part, [share.count for share in part], padding, pages) for part in parts if part or padding
        ]
        return TargetInputs(
            token_ids=_filled(tokens, num_rows),
            token_source=token_source,
            logits_indices=logits_indices,
            logits_start=_filled(logits_start, places),
            num_drafts=_filled(num_drafts, places),
            draft_index=_filled(draft_index, places),
            prev_rows=_filled([share.prev_row for share in sampling], entries, -1),
            groups=groups,
            num_seqs=len(sampling),
            recurrent=self._recurrent(batch, groups[0], size) if self.hybrid else None,
        )

    def _group(
        self, shares: list[ScheduledSequence], counts: list[int], padding: list[int], pages: int, of_draft: bool = False
    ) -> RowGroup[Ints]:
        """Return `counts[i]` rows from the start of `shares[i]` on, with pages for the greatest start they may have.

        Sequences of `padding[i]` rows follow. Their rows lie one after another on the scratch pages, and each attends
        to as many tokens as it has rows, from the first scratch page on.
        """
        starts = [share.start for share in shares]
        seq_lens = [start + count for start, count in zip(starts, counts, strict=True)]
        ends = [length + share.max_accepted for length, share in zip(seq_lens, shares, strict=True)]
        scratch = -(-self.graphs.max_rows // self.page_size) if self.graphs else 0
        width = max(pages, scratch, -(-max(ends, default=0) // self.page_size))
        draft_table = None
        if self.window_pages:
            firsts = [share.seq.first_draft_page for share in shares]
            held = [share.seq.draft_pages[first:] for first, share in zip(firsts, shares, strict=True)]
            table = _table(held, len(padding), scratch, max(self.window_pages, scratch, *map(len, held)))
            draft_table = table.copy()
            for row, first in zip(draft_table, firsts, strict=False):
                row[:] = np.roll(row, first)
        if of_draft and draft_table is not None:
            page_table, slot_table = table, draft_table
            seq_lens = [n - first * self.page_size for n, first in zip(seq_lens, firsts, strict=True)]
        else:
            page_table = slot_table = _table([share.seq.pages for share in shares], len(padding), scratch, width)
        if padding:
            starts += [0, *accumulate(padding[:-1])]
            counts, seq_lens = counts + padding, seq_lens + padding
        query_start_loc = np.array([0, *accumulate(counts)], dtype=np.int32)
        offsets = np.array(starts, dtype=np.int32) - query_start_loc[:-1]
        seq_ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        lens = np.array(seq_lens, dtype=np.int32)
        group: RowGroup[Ints] = RowGroup(seq_ids, offsets, query_start_loc, lens, page_table, counts, seq_lens)
        if self.host_positions:
            group.positions = np.arange(len(seq_ids), dtype=np.int32) + offsets[seq_ids]
            size = np.int32(self.page_size)
            page, in_page = np.divmod(group.positions, size)
            group.slot_mapping = slot_table[seq_ids, page % slot_table.shape[1]] * size + in_page
            if draft_table is not None and not of_draft:
                group.draft_slots = draft_table[seq_ids, page % draft_table.shape[1]] * size + in_page
        else:
            group.draft_table = draft_table
        return group

    def _recurrent(self, batch: Batch, group: RowGroup[Ints], size: Size | None) -> RecurrentRows[Ints]:
        """Return the rows of decoding sequences, which are the first `group`, and those of each chunk."""
        found = RecurrentRows[Ints](None, [])
        if batch.decodes or size:
            moves = [(share.seq.state_slot, share.next_slot or share.seq.state_slot) for share in batch.decodes]
            moves += [(0, 0)] * (len(group.query_lens) - len(moves))  # padding sequences share the scratch slot
            width = max((share.count for share in batch.decodes), default=0)
            if size:
                assert self.graphs
                width = min(self.graphs.block_size, size[1] - self.graphs.padding_rows(*size) * (size[0] - 1))
            starts = [share.start for share in batch.decodes] + [0] * (len(moves) - len(batch.decodes))
            found.decodes = sequence_rows(moves, starts, group.query_lens, width, static=size is not None)
        for share in batch.prefills:
            slot, first = share.seq.state_slot, share.start
            cuts = [(share.split, share.seq.split_slot)] if share.split else []
            for end, next_slot in (*cuts, (share.end, share.next_slot or slot)):
                found.chunks.append(sequence_rows([(slot, next_slot)], [first], [end - first], end - first))
                slot, first = next_slot, end
        return found


def _filled(values: list[int], size: int, padding: int = 0) -> Ints:
    filled: Ints = np.full(size, padding, dtype=np.int32)
    filled[: len(values)] = values
    return filled


def _table(sequences: "list[array[int]]", num_padding: int, scratch: int, width: int) -> Ints:
    """Return the page table of `sequences`, and of padding on the scratch pages."""
    table: Ints = np.zeros((len(sequences) + num_padding, width), dtype=np.int32)
    for row, pages in zip(table, sequences, strict=False):
        own = np.frombuffer(pages, dtype=np.int32)[:width]
        row[: len(own)] = own
    table[len(sequences) :, :scratch] = np.arange(scratch)
    return table


def _ranges(starts: list[int], counts: list[int]) -> Ints:
    """Return the concatenation of arange(start, start + count)."""
    lengths: Ints = np.array(counts, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    shifts = np.array(starts, dtype=np.int32) - ends + lengths
    ranges: Ints = np.arange(sum(counts), dtype=np.int32) + np.repeat(shifts, counts)
    return ranges
