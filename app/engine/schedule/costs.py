"""Milliseconds of a decode step by its shape, timed at startup and corrected while serving. No torch, no clock."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.schedule.graph_sizes import GraphSizes

Floats = NDArray[np.float64]

_SPEED_GAIN = 0.1  # share of an error that corrects the speed of all steps, which drifts with the machine
_DRAFTING_GAIN = 0.05  # share that corrects what drafting costs in addition to a plain step
_MAX_ERROR = 0.7  # of a logarithm: a step of more than twice its cost was held up by something else
_FAR = 1e6  # beyond the largest timed number of sequences costs are proportional, up to this multiple


class Shape(NamedTuple):
    """A step to time: `seqs` decode, `drafting` of them draft blocks of `block` rows and verify `rows` rows each."""

    seqs: int
    drafting: int = 0
    rows: int = 1
    block: int = 0


class Passes(NamedTuple):
    """Milliseconds of the parts of a step, for S numbers of sequences and W widths of blocks."""

    seqs: Floats  # [S] ascending, the last one `_FAR` times the largest that was timed
    drafts: Floats  # [D] verified drafts of each sequence on average, ascending from 0
    target: Floats  # [S, D] the target's pass
    draft: Floats  # [S, W] the draft model's pass, over as many blocks as sequences
    ragged: Floats  # [S] added to any step that drafts, even if a single sequence does


def shapes(seqs: int, block_size: int, widths: Sequence[int] = ()) -> list[Shape]:
    """Return the shapes to time for a number of sequences.

    These are a plain step, one sequence that drafts among plain ones, and all draft blocks of `widths`, of which two
    rows or all are verified. Without `widths` blocks are a quarter, a half and all of the block size.
    """
    blocks = sorted({max(2, width) for width in widths or [-(-block_size // parts) for parts in (1, 2, 4)]})
    all_draft = [Shape(seqs, seqs, rows, block) for block in blocks for rows in (2, block)]
    return list(dict.fromkeys((Shape(seqs), Shape(seqs, 1, block_size, block_size), *all_draft)))


def split(ms: Mapping[Shape, float]) -> Passes:
    """Return the parts of timed steps: `ms` of all `shapes` of some numbers of sequences.

    A step whose blocks verify two rows shows what a draft pass costs, and one that verifies whole blocks the target's
    rows. Times are noisy upwards only, so a draft costs the least slope of any width, and no part costs less than the
    same part of fewer sequences or rows.
    """
    seqs = np.array(sorted({shape.seqs for shape in ms}))
    widths = np.array(sorted({shape.block for shape in ms if shape.block}))
    wide = widths[widths > 2]  # a block of two rows has no others to verify
    plain = np.array([ms[Shape(n)] for n in seqs])
    two, whole = (np.array([[ms[Shape(n, n, rows or w, w)] for w in widths] for n in seqs]) for rows in (2, 0))
    among_plain = np.array([ms[Shape(n, 1, widths[-1], widths[-1])] for n in seqs]) - plain
    two, whole = two - plain[:, None], whole - plain[:, None]

    slopes = (whole - two)[:, widths > 2] / (seqs[:, None] * (wide - 2))
    slope = slopes.min(axis=1).clip(min=0) if len(wide) else np.zeros(len(seqs))  # ms of a draft
    draft = np.maximum(two - (slope * seqs)[:, None], 0.05 * plain[:, None])
    ragged = (np.minimum(among_plain - slope * (widths[-1] - 1), draft[:, -1]) - draft[0, -1]).clip(min=0)
    draft = np.maximum.accumulate(draft - ragged[:, None])
    whole_drafts = (whole - draft - ragged[:, None])[:, widths > 2]
    target = plain[:, None] + np.column_stack((np.zeros(len(seqs)), slope * seqs, whole_drafts))
    target = np.maximum.accumulate(np.maximum.accumulate(target, axis=1))
    seqs, target, draft, ragged = (np.append(part, _FAR * part[-1:], axis=0) for part in (seqs, target, draft, ragged))
    return Passes(seqs, np.array([0, 1, *(wide - 1)]), target, draft, ragged)


class CostTable:
    """Milliseconds of a decode step: its `Passes`, interpolated, and corrected by the steps that are served.

    With graphs a pass costs what the one of `sizes` does that it is padded to, so costs are a staircase.
    """

    def __init__(self, ms: Mapping[Shape, float], sizes: GraphSizes | None = None) -> None:
        self.seqs = sorted({shape.seqs for shape in ms})
        self.widths = sorted({shape.block for shape in ms if shape.block})
        self._passes = split(ms)
        self._sizes = sizes
        self._logs = dict.fromkeys(self.seqs, (0.0, 0.0))  # corrections of speed and of drafting
        self._target, self._draft = cache(self._target_pass), cache(self._draft_pass)

    def step_ms(self, seqs: int, blocks: Any, rows: int, drafts: Any) -> Floats:
        """Return ms of a step of `seqs` sequences with `blocks` draft blocks of `rows` rows and `drafts` verified.

        `blocks` and `drafts` are numbers or integer arrays that broadcast.
        """
        counts, ms, ragged = self._target(seqs)
        added = np.interp(drafts, counts, ms) - ms[0] + np.interp(blocks, *self._draft(rows)) + ragged * np.sign(blocks)
        speed, drafting = map(exp, self._logs[self._nearest(seqs)])
        return np.asarray(speed * (ms[0] + drafting * added))

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

    def _target_pass(self, seqs: int) -> tuple[Floats, Floats, float]:
        """Return ms of a target pass of `seqs` sequences as a curve by drafts, and of ragged rows."""
        passes, ragged = self._passes, float(np.interp(seqs, self._passes.seqs, self._passes.ragged))
        if not self._sizes:
            return seqs * passes.drafts, _at(passes, passes.target, seqs), ragged
        padded = self._sizes.target_passes(seqs)
        ms = [float(np.interp(drafts / n, passes.drafts, _at(passes, passes.target, n))) for n, drafts in padded]
        return *_stairs([drafts for _, drafts in padded], ms), ragged

    def _draft_pass(self, rows: int) -> tuple[Floats, Floats]:
        """Return ms of a draft pass of blocks of `rows` rows as a curve by blocks: they cost what the next wider ones
        do that were timed."""
        padded = self._sizes.draft_passes(rows) if self._sizes else ()
        if not padded:
            return self._timed_draft(rows)
        ms = [float(np.interp(blocks, *self._timed_draft(width))) for blocks, width in padded]
        return _stairs([0, *(blocks for blocks, _ in padded)], [0.0, *ms])

    def _timed_draft(self, rows: int) -> tuple[Floats, Floats]:
        column = min(int(np.searchsorted(self.widths, rows)), len(self.widths) - 1)
        return np.append(0.0, self._passes.seqs), np.append(0.0, self._passes.draft[:, column])


def _at(passes: Passes, table: Floats, seqs: int) -> Floats:
    """Interpolate the rows of a table `[S, ...]` at a number of sequences."""
    return np.array([np.interp(seqs, passes.seqs, column) for column in table.T])


def _stairs(counts: Sequence[int], ms: Sequence[float]) -> tuple[Floats, Floats]:
    """Return the curve on which each count, a whole number, costs what the next larger one of `counts` does."""
    ends = np.array(counts, dtype=float)
    return np.sort(np.append(ends, ends[:-1] + 1)), np.repeat(np.maximum.accumulate(ms), 2)[1:]
