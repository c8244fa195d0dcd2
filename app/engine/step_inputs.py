"""A batch as arrays: token ids, positions, slots, page tables, and which rows are sampled. Pure NumPy, no loop over
tokens; `model_runner` moves them to the device in a few packed copies before anything is launched."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import Batch, Rows
from app.engine.noise import noise_state

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class RowGroup:
    """Rows of S sequences that go through attention in one call, back to back.

    `positions` and `slots` are [R]; `page_table` is [S, P], padded with the scratch page 0. `q_lens` and `kv_lens`
    (the rows themselves included) are host lists of S.
    """

    positions: Ints
    slots: Ints
    page_table: Ints
    q_lens: list[int]
    kv_lens: list[int]


@dataclass(slots=True)
class DraftInputs:
    """The D blocks to draft. `target_rows` [N] are the target rows that drafts go into, and `draft_index` [N] where
    in the flattened [D, b - 1] drafts each is found."""

    request_ids: list[str]
    anchors: Ints
    group: RowGroup
    target_rows: Ints
    draft_index: Ints


@dataclass(slots=True)
class StepInputs:
    """One step. `token_ids` [T] has the target's rows, with 0 where a draft will be put.

    `logit_rows` [R] are the target rows whose next token is wanted. Sampled sequence i has the logit rows
    `first_logit[i] ...`, one and then one per draft; `draft_of[i]` is its row in the drafts or -1.
    `drawn_rows` [N], ascending, are the logit rows that are not greedy, with their `temperature` [N] and the
    `noise_state` [N] of the token that each draws.
    """

    token_ids: Ints
    groups: list[RowGroup]
    draft: DraftInputs | None
    logit_rows: Ints
    first_logit: Ints
    num_drafts: Ints
    draft_of: Ints
    drawn_rows: Ints
    temperature: Floats
    noise_state: Ints


def build(batch: Batch, page_size: int, block_size: int) -> StepInputs:
    """Arrays of a non-empty batch. Slot arithmetic is by the page size that attention reads with."""
    ids = [_own_tokens(rows) for rows in batch.rows]
    counts = _counts(batch.rows)
    ends = _int32(np.cumsum(counts))
    sampling = batch.sampling
    logit_counts = np.array([rows.num_drafts + 1 for rows in sampling], dtype=np.int32)
    last_row = ends[np.array([rows.samples for rows in batch.rows], dtype=bool)]
    drafting = np.array([rows.num_drafts > 0 for rows in sampling], dtype=bool)
    first_logit = _int32(np.cumsum(logit_counts)) - logit_counts
    drawn = [(first, rows) for first, rows in zip(first_logit, sampling, strict=True) if not rows.seq.request.is_greedy]
    return StepInputs(
        token_ids=np.concatenate(ids),
        groups=[_group(part, _counts(part), page_size) for part in (batch.decodes, batch.prefills) if part],
        draft=_draft_inputs(batch, ends - counts, page_size, block_size) if drafting.any() else None,
        logit_rows=_ranges(last_row - logit_counts, logit_counts),
        first_logit=first_logit,
        num_drafts=logit_counts - 1,
        draft_of=_int32(np.where(drafting, np.cumsum(drafting) - 1, -1)),
        drawn_rows=_ranges(*_columns([(first, rows.num_drafts + 1) for first, rows in drawn])),
        temperature=np.array(
            [rows.seq.request.temperature for _, rows in drawn for _ in range(rows.num_drafts + 1)], dtype=np.float32
        ),
        noise_state=np.array([state for _, rows in drawn for state in _noise_states(rows)], dtype=np.int32),
    )


def _own_tokens(rows: Rows) -> Ints:
    own = rows.seq.token_ids[rows.start : rows.end]
    return np.array(own + [0] * (rows.count - len(own)), dtype=np.int32)


def _noise_states(rows: Rows) -> list[int]:
    """The noise state of the token that each logit row draws: the anchor's row draws the sequence's next token."""
    first = rows.end - rows.num_drafts
    return [noise_state(rows.seq.request.seed, first + row) for row in range(rows.num_drafts + 1)]


def _group(rows: list[Rows], counts: Ints, page_size: int) -> RowGroup:
    """`counts[i]` rows from the start of `rows[i]` on."""
    starts = np.array([r.start for r in rows], dtype=np.int32)
    width = -(-int((starts + counts).max()) // page_size)
    page_table: Ints = np.zeros((len(rows), width), dtype=np.int32)
    for line, r in zip(page_table, rows, strict=True):
        pages = np.frombuffer(r.seq.pages, dtype=np.int32)[:width]
        line[: len(pages)] = pages
    positions = _ranges(starts, counts)
    owner = np.repeat(np.arange(len(rows)), counts)
    slots = page_table[owner, positions // page_size] * page_size + positions % page_size
    return RowGroup(positions, slots, page_table, counts.tolist(), (starts + counts).tolist())


def _draft_inputs(batch: Batch, first_rows: Ints, page_size: int, block_size: int) -> DraftInputs:
    """Whole blocks from each anchor on, whatever part of them is verified."""
    drafting = [(rows, first) for rows, first in zip(batch.decodes, first_rows, strict=False) if rows.num_drafts]
    num_drafts = np.array([rows.num_drafts for rows, _ in drafting], dtype=np.int32)
    blocks: Ints = np.full(len(drafting), block_size, dtype=np.int32)
    return DraftInputs(
        request_ids=[rows.seq.request.request_id for rows, _ in drafting],
        anchors=np.array([rows.seq.token_ids[-1] for rows, _ in drafting], dtype=np.int32),
        group=_group([rows for rows, _ in drafting], blocks, page_size),
        target_rows=_ranges(np.array([first + 1 for _, first in drafting], dtype=np.int32), num_drafts),
        draft_index=_ranges(_int32(np.arange(len(drafting)) * (block_size - 1)), num_drafts),
    )


def _counts(rows: list[Rows]) -> Ints:
    return np.array([r.count for r in rows], dtype=np.int32)


def _columns(pairs: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    both: Ints = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The concatenation of arange(start, start + count)."""
    firsts = np.cumsum(counts) - counts
    return _int32(np.arange(counts.sum()) + np.repeat(starts - firsts, counts))


def _int32(x: NDArray[np.integer[Any]]) -> Ints:
    return x.astype(np.int32, copy=False)
