"""Padding of a step to the size that a graph was captured with. Padding sequences lie on the scratch pages."""

from itertools import accumulate

import numpy as np

from app.engine.arrays import Ints
from app.engine.step.inputs import DraftInputs, RecurrentInputs, RowGroup, TargetInputs


def empty_target(*, hybrid: bool) -> TargetInputs:
    """Return inputs without rows, to be padded."""
    none = np.zeros(0, dtype=np.int32)
    recurrent = RecurrentInputs(none, none, none, none, 0) if hybrid else None
    return TargetInputs(none, none, none, none, none, none, none, [_no_rows()], recurrent)


def empty_draft() -> DraftInputs:
    none = np.zeros(0, dtype=np.int32)
    return DraftInputs([], none, none, _no_rows())


def pad_target(
    inputs: TargetInputs, seqs: int, rows: int, pages: int, scratch_pages: int, block_size: int, each: int = 1
) -> TargetInputs:
    """Return the rows of a decode step as `rows` rows of `seqs` + 1 sequences, with page tables `pages` wide.

    Each missing sequence gets `each` padding rows, 0 or 1, and the last sequence all others, if any. They write to the
    scratch pages, each row to a slot of its own. No other sequence has more than `block_size` rows.
    """
    (group,) = inputs.groups
    num_rows, num_seqs = len(inputs.token_ids), len(group.query_lens)
    missing = seqs - num_seqs
    padding = [each] * missing + [rows - num_rows - each * missing]
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
        prev_rows=_grown(inputs.prev_rows, seqs, -1),
        groups=[_pad_group(group, padding, pages, scratch_pages)],
        recurrent=_pad_recurrent(inputs.recurrent, batch_slots, min(block_size, rows - each * (seqs - 1))),
    )


def pad_draft(inputs: DraftInputs, blocks: int, rows: int, pages: int, scratch_pages: int) -> DraftInputs:
    """Return `blocks` blocks of `rows` rows each. Missing blocks lie on the scratch pages."""
    padding = [rows] * (blocks - len(inputs.anchors))
    group = _pad_group(inputs.group, padding, pages, scratch_pages)
    anchors, prev_rows = _grown(inputs.anchors, blocks), _grown(inputs.prev_rows, blocks, -1)
    return DraftInputs(inputs.request_ids, anchors, prev_rows, group)


def _pad_recurrent(inputs: RecurrentInputs | None, seqs: int, width: int) -> RecurrentInputs | None:
    """Return the slots of `seqs` sequences with at most `width` rows each. Padding ones share the scratch slot."""
    if inputs is None:
        return None
    slots, next_slots = _grown(inputs.slots, seqs), _grown(inputs.next_slots, seqs)
    return RecurrentInputs(slots, next_slots, inputs.chunk_starts, inputs.chunk_lens, width, static=True)


def _pad_group(group: RowGroup, padding: list[int], pages: int, scratch_pages: int) -> RowGroup:
    """Return the group with more sequences of `padding` rows each.

    Their rows lie behind one another on the scratch pages. Each sequence attends to as many tokens as it has rows, from
    the first scratch page on (N30 of docs/npu-contract.md).
    """
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
