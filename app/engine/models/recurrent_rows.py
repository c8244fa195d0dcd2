"""The rows of a step for recurrent layers: arrays on the host, and tensors on the device. No torch."""

from dataclasses import dataclass
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
class RecurrentRows(Generic[A]):
    """Rows of a step: decoding sequences, then chunks of prompts, which may continue from a previous chunk's slot."""

    decodes: SequenceRows[A] | None
    chunks: list[SequenceRows[A]]


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
