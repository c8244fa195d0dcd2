"""How many rows of prompts a step may have on a slow device, where streams would stand still behind a long prompt."""

from app.engine.schedule.batch import Batch

BESIDE_STREAMS_SECONDS = 0.5
"""Aim of a step in which sequences decode, because each of their streams waits for it."""
ALONE_SECONDS = 2.0
"""Aim of other steps, for which only aborts and new requests wait."""
FEWEST_ROWS = 32
"""Of a chunk: with fewer, most of the time would go into reading weights."""


class Pace:
    """Bound of a step's prompt rows, by the time of the last one. It is a multiple of `unit`, with which it begins.

    Attention to a longer context makes rows slower, and the bound follows.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._rows_per_second = 0.0
        self.bound = 0  # of the last step

    def most_rows(self, *, beside_streams: bool) -> int:
        """Return the most prompt rows of the next step."""
        seconds = BESIDE_STREAMS_SECONDS if beside_streams else ALONE_SECONDS
        self.bound = max(1, int(self._rows_per_second * seconds / self._unit)) * self._unit
        return self.bound

    def record(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a step with prompt rows. One with fewer than the bound tells of more only if it took
        too long."""
        rows = sum(entry.count for entry in batch.prefills)
        aim = BESIDE_STREAMS_SECONDS if batch.decodes else ALONE_SECONDS
        if rows >= self.bound or seconds > aim:
            self._rows_per_second = rows / seconds
