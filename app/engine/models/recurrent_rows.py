"""The rows of a step for recurrent layers: arrays on the host, and tensors on the device. No torch."""

from dataclasses import dataclass
from typing import Generic

import numpy as np

from app.engine.arrays import A, Ints


@dataclass(slots=True)
class SequenceRows(Generic[A]):
    """Rows of S sequences in a step, for a recurrent layer.

    Sequence i has `counts[i]` rows from position `starts[i]` on. Its state is read from `slots[i]` and written to
    `next_slots[i]`, both [S] int64. If these differ, the slot that is read stays as it is. A step's own rows are `rows`
    [S, W], padded, and row r of the step lies at `places[r]` of S * W. In a graph shapes are `static`.
    """

    slots: A
    next_slots: A
    starts: A
    counts: A
    rows: A
    places: A
    static: bool = False


@dataclass(slots=True)
class RecurrentRows(Generic[A]):
    """Rows of a step: those of decoding sequences, then chunks of prompts, which may begin in a previous one's slot."""

    decodes: SequenceRows[A] | None
    chunks: list[SequenceRows[A]]


def sequence_rows(
    moves: list[tuple[int, int]], starts: list[int], counts: list[int], width: int, *, static: bool = False
) -> SequenceRows[Ints]:
    """Return sequences back to back, with the (slot, next slot) of each, and `counts[i]` rows from `starts[i]` on.

    A place without a row has that of a neighbour, and so does a row of padding past the width.
    """
    slots, next_slots = np.array([*zip(*moves, strict=True)], dtype=np.int64)
    lens, places = np.array(counts, dtype=np.int32), np.arange(width, dtype=np.int32)
    firsts = np.cumsum(lens, dtype=np.int32) - lens
    numbers, seq_ids = np.arange(lens.sum(), dtype=np.int32), np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    rows = np.minimum(firsts[:, None] + places, len(numbers) - 1, dtype=np.int32)
    in_sequence = np.minimum(numbers - firsts[seq_ids], width - 1, dtype=np.int32)
    own = np.array(starts, dtype=np.int32), np.minimum(lens, width, dtype=np.int32)
    return SequenceRows(slots, next_slots, *own, rows, seq_ids * np.int32(width) + in_sequence, static)
