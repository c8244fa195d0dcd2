"""A batch as arrays: token ids, lengths, page tables, and which rows are sampled. Pure NumPy, no loop over tokens.
`forward` makes positions and slots of them on the device, after one packed copy.

`pad_target` and `pad_draft` bring a step to the size that a graph was captured with, with requests of nobody.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from app.engine.arrays import Floats, Ints
from app.engine.sampling.noise import noise_states
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence


@dataclass(slots=True)
class RowGroup:
    """Rows of S sequences that go through attention in one call, back to back.

    Sequence i has query_lens[i] rows, from position starts[i] on. `page_table` is [S, P], padded with the scratch
    page 0.
    `query_lens` and `host_seq_lens` (the rows themselves included) are host lists of S.
    """

    starts: Ints
    page_table: Ints
    query_lens: list[int]
    host_seq_lens: list[int]

    @property
    def arrays(self) -> list[Ints]:
        """For the device: owners [R], each row's sequence; offsets [S], a row's position less its number in the group;
        query_start_loc [S + 1]; kv_len [S]; and the page table, flat."""
        query_start_loc = np.array([0, *accumulate(self.query_lens)], dtype=np.int32)
        kv_len = np.array(self.host_seq_lens, dtype=np.int32)
        seq_ids = np.repeat(np.arange(len(self.query_lens), dtype=np.int32), self.query_lens)
        return [seq_ids, self.starts - query_start_loc[:-1], query_start_loc, kv_len, self.page_table.ravel()]


@dataclass(slots=True)
class DraftInputs:
    """The D blocks to draft, each from its anchor on. `lines` [D] are as in TargetInputs."""

    request_ids: list[str]
    anchors: Ints
    lines: Ints
    group: RowGroup

    @property
    def arrays(self) -> list[Ints]:
        return [self.anchors, self.lines, *self.group.arrays]


@dataclass(slots=True)
class TargetInputs:
    """The target's T rows. `token_ids` [T] has 0 where a draft belongs, and `token_source` [T] says where each row's
    token
    is found: among these at its own number, or at T + its place in the flattened drafts.

    `logits_indices` [R] are the rows whose next token is wanted. Sampled sequence i of S has the logit rows
    `logits_start[i] ...`, one and then one per draft; `draft_index[i]` is its row in the drafts, 0 if it has none. Its
    anchor and its start come of the line `lines[i]` of the step before, which is on the device alone, or are known: -1;
    a padded step's last sequence, which is nobody's, has none.
    """

    token_ids: Ints
    token_source: Ints
    logits_indices: Ints
    logits_start: Ints
    num_drafts: Ints
    draft_index: Ints
    lines: Ints
    groups: list[RowGroup]

    @property
    def arrays(self) -> list[Ints]:
        logits = [self.logits_indices, self.logits_start, self.num_drafts, self.draft_index]
        own = [self.token_ids, self.token_source, *logits, self.lines]
        return own + [array for group in self.groups for array in group.arrays]


@dataclass(slots=True)
class SamplingRows:
    """N logit rows, ascending, of requests that are more than argmax and want the same; see `sampler.SamplingMetadata`.

    `drawn` [N] is 0 for greedy rows. `batch_slots`, `places` and `draft_rows` [N] say which sequence a row is of,
    how many
    drafts it stands on, and in which row of the drafts these are. `added` [M, 2] are (row of N, token) pairs,
    whose logits get `added_values` [M] on top. `penalised` sequences are those with penalties among them.
    """

    rows: Ints
    state: Ints
    temperature: Floats
    drawn: Ints
    top_k: Floats
    top_p: Floats
    min_p: Floats
    presence: Floats
    frequency: Floats
    repetition: Floats
    batch_slots: Ints
    places: Ints
    draft_rows: Ints
    added: Ints
    added_values: Floats
    penalised: list[Sequence]
    is_filtered: bool

    @property
    def arrays(self) -> list[Ints]:
        """All of them for the device, in order, floats as int32 of the same bits; `added` as rows and as tokens."""
        floats = (self.temperature, self.top_k, self.top_p, self.min_p)
        penalties = (self.presence, self.frequency, self.repetition)
        as_ints = [x.view(np.int32) for x in (*floats, *penalties, self.added_values)]
        return [
            self.rows,
            self.state,
            self.drawn,
            self.batch_slots,
            self.places,
            self.draft_rows,
            *self.added.T,
            *as_ints,
        ]


@dataclass(slots=True)
class StepInputs:
    """One step. `draws` is empty where argmax is all; rows with filters and rows with penalties cost more than others,
    so they are kept apart."""

    target: TargetInputs
    draft: DraftInputs | None
    draws: list[SamplingRows]


def build(
    batch: Batch, page_size: int, block_rows: int, *, draft_columns: int | None = None, separate_prefill: bool = True
) -> StepInputs:
    """Arrays of a non-empty batch. Its draft blocks have `block_rows` rows, and its drafts lie in `draft_columns`, if
    these are not one fewer. With `separate_prefill` its prefills are a group of their own."""
    rows, sampling = batch.rows, batch.sampling
    token_ids = _token_ids(rows)
    num_drafts = [share.num_drafts for share in sampling]
    logits_start = [
        end - count - 1 for end, count in zip(accumulate(n + 1 for n in num_drafts), num_drafts, strict=True)
    ]
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
        lines=_lines(sampling),
        groups=[_group(part, [share.count for share in part], page_size) for part in parts if part],
    )
    draft = _draft_inputs(batch, page_size, block_rows) if any(num_drafts) else None
    return StepInputs(target, draft, _draws(sampling, logits_start, draft_index))


def empty_target() -> TargetInputs:
    """No rows of no sequences, to be padded."""
    none = np.zeros(0, dtype=np.int32)
    return TargetInputs(none, none, none, none, none, none, none, [_no_rows()])


def empty_draft() -> DraftInputs:
    none = np.zeros(0, dtype=np.int32)
    return DraftInputs([], none, none, _no_rows())


def pad_target(inputs: TargetInputs, seqs: int, rows: int, pages: int, scratch_pages: int) -> TargetInputs:
    """Verify rows of at most `seqs` sequences as `rows` rows of `seqs` + 1, with page tables `pages` wide.

    Each sequence that is missing becomes one row, and the last one, which is nobody's always, has all other rows, if
    any. They write to the scratch pages, each row to a slot of its own. A decode step has one group, and all its rows
    decide.
    """
    (group,) = inputs.groups
    num_rows, num_seqs = len(inputs.token_ids), len(group.query_lens)
    singles = seqs - num_seqs
    padding = [1] * singles + [rows - num_rows - singles]
    batch_slots = seqs + 1
    return TargetInputs(
        token_ids=_grown(inputs.token_ids, rows),
        token_source=np.concatenate(
            (
                inputs.token_source + (inputs.token_source >= num_rows) * np.int32(rows - num_rows),
                np.arange(num_rows, rows),
            )
        ).astype(np.int32),
        logits_indices=np.arange(rows, dtype=np.int32),
        logits_start=_grown(inputs.logits_start, batch_slots),
        num_drafts=_grown(inputs.num_drafts, batch_slots),
        draft_index=_grown(inputs.draft_index, batch_slots),
        lines=_grown(inputs.lines, seqs, -1),
        groups=[_pad_group(group, padding, pages, scratch_pages)],
    )


def pad_draft(inputs: DraftInputs, blocks: int, rows: int, pages: int, scratch_pages: int) -> DraftInputs:
    """`blocks` blocks of `rows` rows, as all of these have, those that are missing over the scratch pages."""
    padding = [rows] * (blocks - len(inputs.anchors))
    group = _pad_group(inputs.group, padding, pages, scratch_pages)
    return replace(inputs, anchors=_grown(inputs.anchors, blocks), lines=_grown(inputs.lines, blocks, -1), group=group)


def _pad_group(group: RowGroup, padding: list[int], pages: int, scratch_pages: int) -> RowGroup:
    """More sequences with `padding` rows. Their rows lie behind one another on the scratch pages, while each attends to
    as many tokens as it has rows, from the first scratch page on: N30 of docs/npu-contract.md."""
    num_seqs = len(group.query_lens)
    page_table: Ints = np.zeros((num_seqs + len(padding), pages), dtype=np.int32)
    page_table[:num_seqs, : group.page_table.shape[1]] = group.page_table
    page_table[num_seqs:, :scratch_pages] = np.arange(scratch_pages)
    starts = np.array([0, *accumulate(padding[:-1])], dtype=np.int32)[: len(padding)]
    return RowGroup(
        np.concatenate((group.starts, starts)), page_table, group.query_lens + padding, group.host_seq_lens + padding
    )


def _grown(x: Ints, size: int, value: int = 0) -> Ints:
    grown: Ints = np.full(size, value, dtype=np.int32)
    grown[: len(x)] = x
    return grown


def _no_rows() -> RowGroup:
    return RowGroup(np.zeros(0, dtype=np.int32), np.zeros((0, 0), dtype=np.int32), [], [])


def _token_ids(shares: list[ScheduledSequence]) -> Ints:
    """Of all rows, 0 where a draft belongs."""
    token_ids: list[int] = []
    for rows in shares:
        own = rows.seq.token_ids[rows.start : rows.end]
        token_ids += own
        token_ids += [0] * (rows.count - len(own))
    return np.array(token_ids, dtype=np.int32)


def _draws(sampling: list[ScheduledSequence], logits_start: list[int], draft_index: list[int]) -> list[SamplingRows]:
    kinds: dict[tuple[bool, bool], list[tuple[ScheduledSequence, int, int]]] = {}
    for rows, first, draft in zip(sampling, logits_start, draft_index, strict=True):
        asked = rows.seq.request.sampling
        if not asked.is_argmax:
            kinds.setdefault((asked.is_filtered, asked.is_penalised), []).append((rows, first, draft))
    return [_draw_inputs(drawn) for drawn in kinds.values()]


def _draw_inputs(drawn: list[tuple[ScheduledSequence, int, int]]) -> SamplingRows:
    """Of (rows, the first of their logit rows, their row of the drafts)."""
    counts = [rows.num_drafts + 1 for rows, _, _ in drawn]
    params = [rows.seq.request.sampling for rows, _, _ in drawn]

    def floats(values: Iterable[float]) -> Floats:
        return np.repeat(np.array(list(values), dtype=np.float32), counts)

    def ints(values: Iterable[int]) -> Ints:
        return np.repeat(np.array(list(values), dtype=np.int32), counts)

    added = [
        pair
        for (rows, _, _), start in zip(drawn, np.cumsum(counts) - counts, strict=True)
        for pair in _added(rows, int(start))
    ]
    return SamplingRows(
        rows=_ranges([first for _, first, _ in drawn], counts),
        state=np.concatenate([_noise_states(rows) for rows, _, _ in drawn]),
        temperature=floats(1.0 if asked.is_greedy else asked.temperature for asked in params),
        drawn=ints(not asked.is_greedy for asked in params),
        top_k=floats(asked.top_k or np.inf for asked in params),
        top_p=floats(asked.top_p if asked.top_p < 1 else np.inf for asked in params),
        min_p=floats(asked.min_p for asked in params),
        presence=floats(asked.presence_penalty for asked in params),
        frequency=floats(asked.frequency_penalty for asked in params),
        repetition=floats(asked.repetition_penalty for asked in params),
        batch_slots=ints(rows.seq.batch_slot for rows, _, _ in drawn),
        places=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        draft_rows=ints(draft for _, _, draft in drawn),
        added=np.array([place for place, _ in added], dtype=np.int32).reshape(-1, 2),
        added_values=np.array([value for _, value in added], dtype=np.float32),
        penalised=[rows.seq for rows, _, _ in drawn if rows.seq.request.sampling.is_penalised],
        is_filtered=params[0].is_filtered,
    )


def _added(rows: ScheduledSequence, start: int) -> list[tuple[tuple[int, int], float]]:
    """((row, token), value) that are added to the logits of a sequence's rows, the first of which is `start`."""
    request = rows.seq.request
    emitted = rows.end - rows.num_drafts - len(request.token_ids)
    added = []
    for row in range(rows.num_drafts + 1):
        added += [((start + row, token), bias) for token, bias in request.sampling.logit_bias]
        if emitted + row < request.sampling.min_tokens:
            added += [((start + row, token), -np.inf) for token in request.stop_token_ids]
    return added


def _noise_states(rows: ScheduledSequence) -> Ints:
    """The noise state of the token that each logit row draws: the anchor's row draws the sequence's next token."""
    return noise_states(rows.seq.request.sampling.seed, rows.end - rows.num_drafts, rows.num_drafts + 1)


def _group(shares: list[ScheduledSequence], counts: list[int], page_size: int) -> RowGroup:
    """`counts[i]` rows from the start of `shares[i]` on, and pages for where they may begin at most."""
    starts = [rows.start for rows in shares]
    host_seq_lens = [start + count for start, count in zip(starts, counts, strict=True)]
    width = -(-max(kv_len + rows.max_accepted for kv_len, rows in zip(host_seq_lens, shares, strict=True)) // page_size)
    page_table: Ints = np.zeros((len(shares), width), dtype=np.int32)
    for line, rows in zip(page_table, shares, strict=True):
        pages = np.frombuffer(rows.seq.pages, dtype=np.int32)[:width]
        line[: len(pages)] = pages
    return RowGroup(np.array(starts, dtype=np.int32), page_table, counts, host_seq_lens)


def _draft_inputs(batch: Batch, page_size: int, block_rows: int) -> DraftInputs:
    """Blocks from each anchor on, of one width, whatever part of them is verified."""
    drafting = [rows for rows in batch.decodes if rows.num_drafts]
    return DraftInputs(
        request_ids=[rows.seq.request.request_id for rows in drafting],
        anchors=np.array([rows.seq.token_ids[-1] for rows in drafting], dtype=np.int32),
        lines=_lines(drafting),
        group=_group(drafting, [block_rows] * len(drafting), page_size),
    )


def _lines(shares: list[ScheduledSequence]) -> Ints:
    return np.array([rows.line for rows in shares], dtype=np.int32)


def _ranges(starts: list[int], counts: list[int]) -> Ints:
    """The concatenation of arange(start, start + count)."""
    lengths: Ints = np.array(counts, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    shifts = np.array(starts, dtype=np.int32) - ends + lengths
    ranges: Ints = np.arange(sum(counts), dtype=np.int32) + np.repeat(shifts, counts)
    return ranges
