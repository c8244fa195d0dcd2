"""A batch as arrays: token ids, positions, slots, page tables, and which rows are sampled. Pure NumPy, no loop over
tokens; `model_runner` moves the whole of it to the device in one copy."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import Batch, Rows

Ints = NDArray[np.int64]


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
    `sampled` lists (logit row, temperature, seed, index of the token drawn) for rows at temperature > 0.
    """

    token_ids: Ints
    groups: list[RowGroup]
    draft: DraftInputs | None
    logit_rows: Ints
    first_logit: Ints
    num_drafts: Ints
    draft_of: Ints
    sampled: list[tuple[int, float, int, int]]


def build(batch: Batch, page_size: int, block_size: int) -> StepInputs:
    """Arrays of a non-empty batch. Slot arithmetic is by the page size that attention reads with."""
    ids = [_own_tokens(rows) for rows in batch.rows]
    counts = np.array([rows.count for rows in batch.rows], dtype=np.int64)
    ends = np.cumsum(counts)
    sampling = batch.sampling
    logit_counts = np.array([rows.num_drafts + 1 for rows in sampling], dtype=np.int64)
    last_logit = np.cumsum(logit_counts)
    last_row = ends[np.array([rows.samples for rows in batch.rows], dtype=bool)]
    drafting = np.array([rows.num_drafts > 0 for rows in sampling], dtype=bool)
    return StepInputs(
        token_ids=np.concatenate(ids),
        groups=[_group(part, page_size) for part in (batch.decodes, batch.prefills) if part],
        draft=_draft_inputs(batch, ends - counts, page_size, block_size) if drafting.any() else None,
        logit_rows=_ranges(last_row - logit_counts, logit_counts),
        first_logit=last_logit - logit_counts,
        num_drafts=logit_counts - 1,
        draft_of=np.where(drafting, np.cumsum(drafting) - 1, -1),
        sampled=[
            (int(last - count + row), request.temperature, request.seed, rows.end - rows.num_drafts + row)
            for rows, last, count in zip(sampling, last_logit, logit_counts, strict=True)
            if (request := rows.seq.request).temperature > 0
            for row in range(count)
        ],
    )


def _own_tokens(rows: Rows) -> Ints:
    own = rows.seq.token_ids[rows.start : rows.end]
    return np.array(own + [0] * (rows.count - len(own)), dtype=np.int64)


def _group(rows: Seq[Rows], page_size: int, block_size: int | None = None) -> RowGroup:
    """Rows as they are, or whole draft blocks from each anchor on when `block_size` is given."""
    starts = np.array([r.start for r in rows], dtype=np.int64)
    counts = np.array([block_size or r.count for r in rows], dtype=np.int64)
    width = -(-int((starts + counts).max()) // page_size)
    page_table = np.array([(r.seq.pages[:width] + [0] * width)[:width] for r in rows], dtype=np.int64)
    positions = _ranges(starts, counts)
    owner = np.repeat(np.arange(len(rows)), counts)
    slots = page_table[owner, positions // page_size] * page_size + positions % page_size
    return RowGroup(positions, slots, page_table, counts.tolist(), (starts + counts).tolist())


def _draft_inputs(batch: Batch, first_rows: Ints, page_size: int, block_size: int) -> DraftInputs:
    drafting = [(rows, first) for rows, first in zip(batch.decodes, first_rows, strict=False) if rows.num_drafts]
    num_drafts = np.array([rows.num_drafts for rows, _ in drafting], dtype=np.int64)
    first_drafts = np.arange(len(drafting)) * (block_size - 1)
    return DraftInputs(
        request_ids=[rows.seq.request.request_id for rows, _ in drafting],
        anchors=np.array([rows.seq.token_ids[-1] for rows, _ in drafting], dtype=np.int64),
        group=_group([rows for rows, _ in drafting], page_size, block_size),
        target_rows=_ranges(np.array([first + 1 for _, first in drafting], dtype=np.int64), num_drafts),
        draft_index=_ranges(first_drafts, num_drafts),
    )


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The concatenation of arange(start, start + count)."""
    firsts = np.cumsum(counts) - counts
    offsets: Ints = np.arange(counts.sum()) + np.repeat(starts - firsts, counts)
    return offsets
