"""A step as one record of arrays: token ids, lengths, page tables, and which rows are sampled. No torch.

The same records hold NumPy arrays on the host and tensors on the device (`A`). `app.engine.arrays` goes over their
fields, so neither the copy between the two nor the message to other ranks knows a field.
"""

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple

import numpy as np

from app.engine.arrays import A, Array, Ints
from app.engine.models.recurrent_rows import RecurrentRows, prompt_rows, sequence_rows
from app.engine.sampling.metadata import SamplingMetadata
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.graph_sizes import GraphSizes, Size
from app.engine.step.sampling_rows import sampled_rows


@dataclass(slots=True)
class RowGroup(Generic[A]):
    """R rows of S sequences that go through attention in one call, back to back. All arrays are int32."""

    seq_ids: A
    """[R], each row's sequence."""
    position_offsets: A
    """[S], a sequence's first position less the number of its first row. A row's position is its number plus that."""
    query_start_loc: A
    """[S + 1], numbers of first rows."""
    seq_lens: A
    """[S], tokens that a sequence's last row sees, itself included."""
    page_table: A
    """[S, P], padded with the scratch page 0."""
    query_lens: list[int]
    """Rows of each sequence, on the host."""
    host_seq_lens: list[int]
    """`seq_lens` on the host. With a step in flight they are the least that may be."""
    positions: A | None = None
    """[R], if the device wants them from the host."""
    slot_mapping: A | None = None
    """[R], likewise."""
    draft_table: A | None = None
    """[S, P], separate pages of the draft, each in the column of its number modulo P."""
    draft_slots: A | None = None
    """[R], slots on separate pages of the draft, for a target's rows, instead of that table."""


@dataclass(slots=True)
class DraftInputs(Generic[A]):
    """D blocks to draft, each from its anchor on."""

    request_ids: list[str]
    """Of the blocks without padding."""
    anchors: A
    """[D], token ids."""
    prev_rows: A
    """[D], as in TargetInputs."""
    groups: list[RowGroup[A]]
    """The blocks' rows. With separate pages its table and lengths begin at the first page that a block may see."""


@dataclass(slots=True)
class TargetInputs(Generic[A]):
    """The target's T rows, of which S sequences get tokens from R logit rows."""

    token_ids: A
    """[T], 0 where a draft belongs."""
    token_source: A
    """[T], where a row's token is: at its own number in `token_ids`, or at T + its index in the flattened drafts."""
    logits_indices: A
    """[R], rows whose next token is wanted."""
    logits_start: A
    """[S], a sequence's first logit row, which is followed by one for each of its drafts."""
    num_drafts: A
    """[S]"""
    draft_index: A
    """[S], a sequence's row in the drafts, 0 if it has none."""
    prev_rows: A
    """[S], a sequence's row in the result of the step in flight, which moves its anchor and start, or -1. A padded step
    ends with a sequence of padding, which has no entry here."""
    groups: list[RowGroup[A]]
    num_seqs: int
    """S without padding."""
    recurrent: RecurrentRows[A] | None = None
    """The rows again, if the target is a hybrid."""


@dataclass(slots=True)
class StepInputs:
    """One step as arrays. A runner gets nothing else, so it can be sent to another process."""

    target: TargetInputs[Ints]
    draft: DraftInputs[Ints] | None
    sampling: list[SamplingMetadata[Array]]
    """Rows that need more than argmax. Token lists are not copied from the sequences, so a step is launched before the
    next commit."""
    plain_sequences: list[tuple[str, int, int]] | None
    """Keys of the sequences of a step without drafts and prefill, whose context KV may be pending; else None."""
    in_graph: bool
    """True if the target is padded to a graph."""


class _DraftPages(NamedTuple):
    """Separate pages of the draft that the rows of S sequences read and write."""

    firsts: list[int]
    """Number of the first page of each sequence."""
    held: Ints
    """[S, P], its pages from that one on."""
    by_number: Ints
    """[S, P], the same pages, each in the column of its number modulo P."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrangement of arrays that a runner reads. Drafts are in the columns of a whole block. Padding rows lie on the
    scratch pages, each in its own slot."""

    page_size: int
    separate_prefill: bool = True
    """Prefill chunks are a separate group."""
    first_draft_row: int = 1
    """1 if a draft's block has the anchor's row too, 0 if it has one for each draft only."""
    hybrid: bool = False
    """The target gets the slots of its recurrent state."""
    host_positions: bool = False
    """The device wants positions and slots from the host."""
    graphs: GraphSizes | None = None
    """Sizes that decode steps, and short chunks that are not a separate group, are padded to."""
    draws_in_graphs: bool = False
    """Graphs draw tokens too."""
    window_pages: int = 0
    """Separate pages of the draft for a decoding sequence, or 0 if it shares the target's."""

    def build(self, batch: Batch) -> StepInputs:
        """Return the arrays of a batch that is not empty."""
        blocks, width = batch.num_drafting, batch.block_rows
        size, graphs = None, self.graphs
        if graphs and graphs.drafts and blocks:
            blocks, width = graphs.draft(blocks, width)
        if graphs and not batch.prefills:
            size = graphs.target(len(batch.decodes), len(batch.decodes) + batch.num_drafts)
        elif graphs and not self.separate_prefill:
            size = graphs.with_chunks(len(batch.entries), sum(entry.count for entry in batch.entries))
        target = self.target(batch, size, graphs.block_size - 1 if graphs else width - 1)
        draft = self.draft(batch, blocks, width) if blocks else None
        rows = target.logits_start, target.draft_index, size is not None and self.draws_in_graphs
        is_argmax = all(entry.seq.request.sampling.is_argmax for entry in batch.sampling)
        sampling = [] if is_argmax else sampled_rows(batch.sampling, *rows)
        plain = None if batch.prefills or draft else [entry.seq.key for entry in batch.decodes]
        return StepInputs(target, draft, sampling, plain, size is not None)

    def draft(self, batch: Batch, blocks: int, width: int, pages: int = 0) -> DraftInputs[Ints]:
        """Return `blocks` blocks of `width` - 1 drafts, however few are verified. Missing ones are padding."""
        rows = width - 1 + self.first_draft_row
        drafting = [entry for entry in batch.decodes if entry.num_drafts]
        padding = [rows] * (blocks - len(drafting))
        draft_pages = self._draft_pages(drafting, len(padding)) if self.window_pages else None
        return DraftInputs(
            request_ids=[entry.seq.request.request_id for entry in drafting],
            anchors=_filled([entry.seq.token_ids[-1] for entry in drafting], blocks),
            prev_rows=_filled([entry.prev_row for entry in drafting], blocks, -1),
            groups=[self._group(drafting, [rows] * len(drafting), padding, pages, draft_pages)],
        )

    def target(self, batch: Batch, size: Size | None, draft_columns: int, pages: int = 0) -> TargetInputs[Ints]:
        """Return the target's rows, padded to (sequences, rows) of `size` if it is given.

        A missing sequence gets as many rows as the size says, and one more sequence all others, which may be none.
        Tables of a graph to be captured are `pages` wide.
        """
        entries, sampling = batch.entries, batch.sampling
        counts = [entry.count for entry in entries]
        tokens: list[int] = []
        for entry in entries:
            tokens += (entry.seq.token_ids[entry.start : entry.end] + [0] * entry.count)[: entry.count]
        num_drafts = [entry.num_drafts for entry in sampling]
        ends = zip(entries, accumulate(counts), strict=True)
        logits_start = [end - entry.num_drafts - 1 for entry, end in ends if entry.needs_logits]
        drafting_so_far = accumulate(count > 0 for count in num_drafts)
        draft_index = [so_far - 1 if count else 0 for so_far, count in zip(drafting_so_far, num_drafts, strict=True)]
        num_rows, num_results = len(tokens), len(sampling)
        padding: list[int] = []
        if size:
            assert self.graphs
            missing, each = size[0] - len(entries), self.graphs.padding_rows(*size)
            padding = [each] * missing + [size[1] - num_rows - each * missing]
            num_rows, num_results = size[1], size[0]
        token_source = logits_indices = np.arange(num_rows, dtype=np.int32)
        if any(num_drafts):
            token_source = token_source.copy()
            draft_indices = _ranges([index * draft_columns for index in draft_index], num_drafts)
            token_source[_ranges([first + 1 for first in logits_start], num_drafts)] = num_rows + draft_indices
        if batch.prefills and not size:  # a graph chooses after every row
            logits_indices = _ranges(logits_start, [count + 1 for count in num_drafts])
            logits_start = [0, *accumulate(count + 1 for count in num_drafts)][:-1]
        parts = [batch.decodes, batch.prefills] if self.separate_prefill and not size else [entries]
        parts = [part for part in parts if part or padding]
        num_verified = num_results + bool(size)  # with the last sequence of padding
        groups = [self._group(part, [entry.count for entry in part], padding, pages) for part in parts]
        if self.window_pages:
            for group, part in zip(groups, parts, strict=True):
                self._add_draft_slots(group, self._draft_pages(part, len(padding)))
        return TargetInputs(
            token_ids=_filled(tokens, num_rows),
            token_source=token_source,
            logits_indices=logits_indices,
            logits_start=_filled(logits_start, num_verified),
            num_drafts=_filled(num_drafts, num_verified),
            draft_index=_filled(draft_index, num_verified),
            prev_rows=_filled([entry.prev_row for entry in sampling], num_results, -1),
            groups=groups,
            num_seqs=len(sampling),
            recurrent=self._recurrent(batch, groups[0], size) if self.hybrid else None,
        )

    def _group(
        self,
        entries: list[ScheduledSequence],
        counts: list[int],
        padding: list[int],
        pages: int,
        draft_pages: _DraftPages | None = None,
    ) -> RowGroup[Ints]:
        """Return `counts[i]` rows from the start of `entries[i]` on, with pages for the greatest start they may have:
        the target's, or separate `draft_pages`, before the first of which nothing is seen.

        Sequences of `padding[i]` rows follow. Their rows lie one after another on the scratch pages, and each attends
        to as many tokens as it has rows, from the first scratch page on.
        """
        starts = [entry.start for entry in entries]
        seq_lens = [start + count for start, count in zip(starts, counts, strict=True)]
        if draft_pages:
            page_table, slot_table = draft_pages.held, draft_pages.by_number
            seq_lens = [n - first * self.page_size for n, first in zip(seq_lens, draft_pages.firsts, strict=True)]
        else:
            ends = [length + entry.max_accepted for length, entry in zip(seq_lens, entries, strict=True)]
            width = max(pages, -(-max(ends, default=0) // self.page_size))
            page_table = slot_table = self._table([entry.seq.pages for entry in entries], len(padding), width)
        if padding:
            starts += [0, *accumulate(padding[:-1])]
            counts, seq_lens = counts + padding, seq_lens + padding
        query_start_loc = np.array([0, *accumulate(counts)], dtype=np.int32)
        offsets = np.array(starts, dtype=np.int32) - query_start_loc[:-1]
        seq_ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        lens = np.array(seq_lens, dtype=np.int32)
        group: RowGroup[Ints] = RowGroup(seq_ids, offsets, query_start_loc, lens, page_table, counts, seq_lens)
        if self.host_positions:
            group.positions = positions = np.arange(len(seq_ids), dtype=np.int32) + offsets[seq_ids]
            group.slot_mapping = self._slots(seq_ids, positions, slot_table)
        elif draft_pages:
            group.draft_table = slot_table
        return group

    def _add_draft_slots(self, group: RowGroup[Ints], draft_pages: _DraftPages) -> None:
        """Direct the context KV of a target's rows to separate pages of the draft."""
        if group.positions is not None:
            group.draft_slots = self._slots(group.seq_ids, group.positions, draft_pages.by_number)
        else:
            group.draft_table = draft_pages.by_number

    def _draft_pages(self, entries: list[ScheduledSequence], num_padding: int) -> _DraftPages:
        """Return the draft's pages: at most `window_pages` of a decoding sequence, and all of a prefilling one.

        After the last chunk of a prompt a sequence has the pages of the chunk too, until that step is committed. The
        next one may be launched before. It has no use for them, and a graph's table has no room.
        """
        firsts = [
            max(entry.seq.first_draft_page, 0 if entry.is_prefill else len(entry.seq.draft_pages) - self.window_pages)
            for entry in entries
        ]
        held = [entry.seq.draft_pages[first:] for first, entry in zip(firsts, entries, strict=True)]
        table = self._table(held, num_padding, max([self.window_pages, *map(len, held)]))
        by_number = table.copy()
        for row, first in zip(by_number, firsts, strict=False):
            row[:] = np.roll(row, first)
        return _DraftPages(firsts, table, by_number)

    def _table(self, sequences: "list[array[int]]", num_padding: int, width: int) -> Ints:
        """Return the page table of `sequences` and padding, at least as wide as the scratch pages need."""
        scratch = -(-self.graphs.max_rows // self.page_size) if self.graphs else 0
        table: Ints = np.zeros((len(sequences) + num_padding, max(width, scratch)), dtype=np.int32)
        for row, pages in zip(table, sequences, strict=False):
            numbers = np.frombuffer(pages, dtype=np.int32)[: len(row)]
            row[: len(numbers)] = numbers
        table[len(sequences) :, :scratch] = np.arange(scratch)
        return table

    def _slots(self, seq_ids: Ints, positions: Ints, table: Ints) -> Ints:
        """Return the slots [R] of rows. Page p of a sequence is in column p % P of its `table` [S, P]."""
        size = np.int32(self.page_size)
        page, in_page = np.divmod(positions, size)
        slots: Ints = table[seq_ids, page % table.shape[1]] * size + in_page
        return slots

    def _recurrent(self, batch: Batch, group: RowGroup[Ints], size: Size | None) -> RecurrentRows[Ints]:
        """Return the rows of decoding sequences, which are the first of `group`, and of chunks."""
        recurrent = RecurrentRows[Ints](None, None)
        if batch.decodes or size:
            moves = [(entry.seq.state_slot, entry.next_slot or entry.seq.state_slot) for entry in batch.decodes]
            moves += [(0, 0)] * (len(group.query_lens) - len(moves))  # padding sequences share the scratch slot
            width = max((entry.count for entry in batch.decodes), default=0)
            if size:
                assert self.graphs
                width = min(self.graphs.block_size, size[1] - self.graphs.padding_rows(*size) * (size[0] - 1))
            starts = [entry.start for entry in batch.decodes] + [0] * (len(moves) - len(batch.decodes))
            recurrent.decodes = sequence_rows(moves, starts, group.query_lens, width, static=size is not None)
        if chunks := batch.prefills:
            moves = [(entry.seq.state_slot, entry.next_slot or entry.seq.state_slot) for entry in chunks]
            cuts = [(*move, entry.seq.split_slot) for move, entry in zip(moves, chunks, strict=True)]
            parts = [
                [entry.split - entry.start, entry.end - entry.split] if entry.split else [entry.count]
                for entry in chunks
            ]
            recurrent.prompts = prompt_rows(cuts, [entry.start for entry in chunks], parts)
        return recurrent


def _filled(values: list[int], size: int, padding: int = 0) -> Ints:
    filled: Ints = np.full(size, padding, dtype=np.int32)
    filled[: len(values)] = values
    return filled


def _ranges(starts: list[int], counts: list[int]) -> Ints:
    """Return the concatenation of arange(start, start + count)."""
    lengths: Ints = np.array(counts, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    shifts = np.array(starts, dtype=np.int32) - ends + lengths
    ranges: Ints = np.arange(sum(counts), dtype=np.int32) + np.repeat(shifts, counts)
    return ranges
