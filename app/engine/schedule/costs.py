"""Milliseconds of a decode step by its shape, timed at startup and corrected while serving. No torch, no clock."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.schedule.graph_sizes import GraphSizes

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]
"""Counts, ascending, and the milliseconds of each."""

_SPEED_GAIN, _DRAFTING_GAIN = 0.1, 0.05
"""Shares of an error that correct the speed of steps, which drifts with the machine, and the cost of drafting."""
_MAX_ERROR = 0.7
"""Errors are clipped at a factor of two, because something else held a longer step up."""


class Shape(NamedTuple):
    """A step to time: `seqs` decode, `drafting` of them draft blocks of `block` rows and verify `rows` rows each."""

    seqs: int
    drafting: int = 0
    rows: int = 1
    block: int = 0


def shapes(seqs: int, block_size: int, widths: Sequence[int] = ()) -> list[Shape]:
    """Return the shapes to time for a number of sequences.

    These are a plain step, one sequence that drafts among plain ones, and all draft blocks of `widths`, of which two
    rows or all are verified. Without `widths` blocks are a quarter, a half and all of the block size.
    """
    blocks = sorted({max(2, width) for width in widths or [-(-block_size // parts) for parts in (1, 2, 4)]})
    all_draft = [Shape(seqs, seqs, rows, block) for block in blocks for rows in (2, block)]
    return list(dict.fromkeys((Shape(seqs), Shape(seqs, 1, block_size, block_size), *all_draft)))


def expected_ms(shape: Shape, times: Mapping[Shape, float]) -> float:
    """Return the quickest time of a shape, or else scale those of others by their rows: rows of the target and rows of
    the draft each have one cost, fitted to all shapes and the first plain step."""
    if shape in times:
        return times[shape]
    first = times[Shape(1)]
    rows, rest = np.array([_rows(timed) for timed in times], dtype=float), np.array([*times.values()]) - first
    return first + float(_rows(shape) @ np.linalg.lstsq(rows, rest)[0].clip(min=0))


def _rows(shape: Shape) -> NDArray[np.int64]:
    """Return the rows `[2]` of the target and of the draft, without the row of one plain sequence."""
    return np.array((shape.seqs - 1 + shape.drafting * (shape.rows - 1), shape.drafting * shape.block))


class CostTable:
    """Milliseconds of a decode step: a target pass by sequences and drafts, and a draft pass by blocks and rows.

    Costs are linear between timed sizes and proportional beyond them, and a block costs what the next wider timed one
    does. With graphs a step costs what the one of `sizes` does that it is padded to, so costs are a staircase.
    """

    def __init__(self, ms: Mapping[Shape, float], sizes: GraphSizes | None = None) -> None:
        """Split `ms` of all `shapes` of some numbers of sequences into target and draft.

        A few drafts cost the target a slope each, the least over all widths, because noise only adds. The draft pass
        costs the rest of a step whose blocks verify two rows, and the other rows of whole blocks cost what was timed.
        One sequence that drafts among plain ones shows what ragged rows cost, which the first draft is charged with.
        """
        self.widths = sorted({shape.block for shape in ms if shape.block})
        self._sizes = sizes
        self.seqs = sorted({shape.seqs for shape in ms})
        self._verify: list[Curve] = []
        self._draft_ms, self._target_ms = cache(self._draft_pass), cache(self._target_pass)
        self._logs = dict.fromkeys(self.seqs, (0.0, 0.0))  # corrections of all costs, and of drafting besides
        widest = self.widths[-1]
        plain = {n: ms[Shape(n)] for n in self.seqs}
        passes: dict[int, dict[int, float]] = {width: {0: 0.0} for width in self.widths}
        for n, base in plain.items():
            two, whole = ({w: ms[Shape(n, n, rows or w, w)] - base for w in self.widths} for rows in (2, 0))
            slope = max(0.0, min(((whole[w] - two[w]) / (n * (w - 2)) for w in self.widths if w > 2), default=0.0))
            pass_ms = {w: max(two[w] - slope * n, 0.05 * base) for w in self.widths}
            first = 0.0
            if n > 1:
                among_plain = ms[Shape(n, 1, widest, widest)] - base - slope * (widest - 1)
                first = max(0.0, min(among_plain, pass_ms[widest]) - passes[widest][self.seqs[0]])
            verify = {0: 0.0, 1: slope + first, n: slope * n + first}
            for w in self.widths:
                passes[w][n] = max(pass_ms[w] - first, *passes[w].values())
                verify[n * (w - 1)] = max(0.0, whole[w] - passes[w][n])
            self._verify.append(_curve(verify))
        self._plain = _curve(plain)
        self._draft = {width: _curve(points) for width, points in passes.items()}

    def step_ms(self, seqs: int, blocks: Any, rows: int, drafts: Any) -> Floats:
        """Return ms of a step of `seqs` sequences with `blocks` draft blocks of `rows` rows and `drafts` verified.

        `blocks` and `drafts` are numbers or integer arrays that broadcast.
        """
        draft_ms, target_ms = (
            table(size, 2 << _greatest(counts).bit_length())  # few sizes, so that few tables are computed
            for table, size, counts in ((self._draft_ms, rows, blocks), (self._target_ms, seqs, drafts))
        )
        speed, drafting = map(exp, self._logs[self._nearest(seqs)])
        return np.asarray(speed * (target_ms[0] + drafting * (draft_ms[blocks] + target_ms[drafts] - target_ms[0])))

    def refine(self, seqs: int, blocks: int, rows: int, drafts: int, ms: float) -> None:
        """Move the costs of this number of sequences towards a step that took `ms`.

        Both plain decoding and drafting follow the speed. The error of a step that drafts is also one of drafting.
        """
        error = min(max(log(ms / float(self.step_ms(seqs, blocks, rows, drafts))), -_MAX_ERROR), _MAX_ERROR)
        nearest = self._nearest(seqs)
        speed, drafting = self._logs[nearest]
        self._logs[nearest] = speed + _SPEED_GAIN * error, drafting + _DRAFTING_GAIN * error * (blocks > 0)

    def _nearest(self, seqs: int) -> int:
        return min(self.seqs, key=lambda n: abs(log(n / max(seqs, 1))))

    def _draft_pass(self, rows: int, size: int) -> Floats:
        """Return ms of a draft pass of 0, 1, ... `size` - 1 blocks."""
        passes = self._sizes.draft_passes(rows) if self._sizes else ()
        if not passes:
            return self._draft_at(np.arange(size), rows)
        return _stairs({0: 0.0} | {count: float(self._draft_at(count, width)) for count, width in passes}, size)

    def _target_pass(self, seqs: int, size: int) -> Floats:
        """Return ms of a target pass of 0, 1, ... `size` - 1 drafts."""
        if not self._sizes:
            return self._target_at(seqs, np.arange(size))
        passes = self._sizes.target_passes(seqs)
        return _stairs({drafts: float(self._target_at(n, drafts)) for n, drafts in passes}, size)

    def _draft_at(self, blocks: Any, rows: int) -> Floats:
        width = next((width for width in self.widths if width >= rows), self.widths[-1])
        return _interpolate(self._draft[width], blocks)

    def _target_at(self, seqs: int, drafts: Any) -> Floats:
        """Interpolate between the next smaller and the next larger timed number of sequences."""
        place = float(np.interp(seqs, self.seqs, np.arange(len(self.seqs))))
        below, share = int(place), place % 1
        verify = (1 - share) * _interpolate(self._verify[below], drafts)
        if share:
            verify = verify + share * _interpolate(self._verify[below + 1], drafts)
        return _interpolate(self._plain, seqs) + verify


def _greatest(counts: Any) -> int:
    return int(counts.max()) if isinstance(counts, np.ndarray) else counts


def _curve(points: Mapping[int, float]) -> Curve:
    """Return points with no cost below that of a smaller count: a smaller count that took longer was held up."""
    counts = sorted(points)
    return np.array(counts, dtype=float), np.maximum.accumulate([points[count] for count in counts])


def _stairs(points: Mapping[int, float], size: int) -> Floats:
    """Return for each of `size` counts the ms of the first point that is no smaller, else of the last."""
    counts, ms = _curve(points)
    return np.asarray(ms[np.searchsorted(counts[:-1], np.arange(size))])


def _interpolate(curve: Curve, counts: Any) -> Floats:
    """Return ms that are proportional beyond the last count."""
    return np.asarray(np.interp(counts, *curve) * np.maximum(1.0, np.asarray(counts) / max(curve[0][-1], 1.0)))
