"""The rows of a step for recurrent layers: arrays on the host, and tensors on the device. No torch."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Generic

import numpy as np

from app.engine.arrays import A, Ints


@dataclass(slots=True)
class SequenceRows(Generic[A]):
    """Rows of S sequences in a step, at most W of each, for a recurrent layer.

    A slot that is read does not change if the next slot is another one.
    """

    slots: A  # [S] int64: where each state is read
    next_slots: A  # [S] int64: where it is written
    starts: A  # [S] int32: position of the first row
    counts: A  # [S] int32: number of rows
    rows: A  # [S, W] int32: indices of the rows in the step, padded
    places: A  # [R] int32: index of each row of the step in the S * W padded ones
    static: bool = False  # shapes are a graph's


@dataclass(slots=True)
class PromptRows(Generic[A]):
    """R rows of P chunks of prompts, back to back.

    A chunk past position 0 writes another slot than it reads. The state in its middle may go to one more.
    """

    slots: A  # [P] int64: where each state is read
    next_slots: A  # [P] int64: where it is written after the last row
    split_slots: A  # [P] int64: and after `splits` rows, if these are not 0
    starts: A  # [P] int32: position of the first row
    splits: A  # [P] int32
    query_start_loc: A  # [P + 1] int32: numbers of first rows
    parts: list[list[int]]  # on the host: rows of each chunk, those up to a split and those after it
    are_new: list[bool]  # on the host: chunks from position 0 on, so without a state


@dataclass(slots=True)
class RecurrentRows(Generic[A]):
    """Rows of a step: of decoding sequences, then of prompts."""

    decodes: SequenceRows[A] | None
    prompts: PromptRows[A] | None


def sequence_rows(
    moves: list[tuple[int, int]], starts: list[int], counts: list[int], width: int, *, static: bool = False
) -> SequenceRows[Ints]:
    """Return sequences back to back, with the (slot, next slot) of each, and `counts[i]` rows from `starts[i]` on.

    An index without a row repeats its neighbour's, and so does a row of padding past the width.
    """
    slots, next_slots = np.array([*zip(*moves, strict=True)], dtype=np.int64)
    lens = np.array(counts, dtype=np.int32)
    columns = np.arange(width, dtype=np.int32)
    firsts = np.cumsum(lens, dtype=np.int32) - lens
    numbers = np.arange(lens.sum(), dtype=np.int32)
    seq_ids = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    rows = np.minimum(firsts[:, None] + columns, len(numbers) - 1, dtype=np.int32)
    in_sequence = np.minimum(numbers - firsts[seq_ids], width - 1, dtype=np.int32)
    return SequenceRows(
        slots,
        next_slots,
        np.array(starts, dtype=np.int32),
        np.minimum(lens, width, dtype=np.int32),
        rows,
        seq_ids * np.int32(width) + in_sequence,
        static,
    )


def prompt_rows(moves: list[tuple[int, int, int]], starts: list[int], parts: list[list[int]]) -> PromptRows[Ints]:
    """Return chunks with the (slot, next slot, split slot) of each, and one part or two."""
    slots, next_slots, split_slots = np.array([*zip(*moves, strict=True)], dtype=np.int64)
    return PromptRows(
        slots,
        next_slots,
        split_slots,
        np.array(starts, dtype=np.int32),
        np.array([sum(rows[:-1]) for rows in parts], dtype=np.int32),
        np.array([0, *accumulate(map(sum, parts))], dtype=np.int32),
        parts,
        [start == 0 for start in starts],
    )
