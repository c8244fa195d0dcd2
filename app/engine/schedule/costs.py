"""The cost of a decode step by its shape, timed at warm-up and refined while serving. No torch, no clock."""

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Point = tuple[int, float]
"""(size, milliseconds)."""

_STEP_NOISE = 0.03
"""Variance of the logarithm of a step's time around its expectation, as the next four are; seen on two shared cores."""
_SPEED_PRIOR, _SPEED_DRIFT = 0.04, 4e-4
"""Prior variance of the speed of steps of a size, and what a step adds to it, because a machine's load changes."""
_DRAFTING_PRIOR, _DRAFTING_DRIFT = 0.02, 1e-6
"""Prior variance of the cost of drafting relative to plain decoding. It hardly drifts: it belongs to the model."""
_MAX_ERROR = 0.7
"""Errors are clipped at a factor of two, because a longer step was held up by something else."""


class StepSizes(Protocol):
    """Sizes that steps are padded to, because they come from graphs."""

    def target_passes(self, num_seqs: int) -> Sequence[tuple[int, int]]:
        """Return (sequences, drafts) that target passes of `num_seqs` are padded to, by drafts, which ascend."""

    def draft_passes(self, width: int) -> Sequence[tuple[int, int]]:
        """Return (blocks, width) that draft passes of blocks of `width` rows are padded to, by blocks, which ascend."""


class Scale:
    """Correction of the costs of steps of one size, as logarithms.

    `speed` scales the whole step and `drafting` scales what drafting adds to it. Only their sum shows in a step that
    drafts, so a Kalman filter of the two tells them apart. A size that drafts no more keeps up with the machine.
    """

    __slots__ = ("_covariance", "drafting", "speed")

    def __init__(self) -> None:
        self.speed = self.drafting = 0.0
        self.doubt()

    def doubt(self) -> None:
        """Keep the scales, and learn as quickly as at the beginning."""
        self._covariance = np.diag([_SPEED_PRIOR, _DRAFTING_PRIOR])

    def learn(self, drafting_share: float, error: float) -> None:
        """Update from one step: the share of its time that is drafting, and log(time / expected time)."""
        self._covariance[0, 0] += _SPEED_DRIFT
        self._covariance[1, 1] += _DRAFTING_DRIFT
        observed = np.array([1.0, drafting_share])
        gain = self._covariance @ observed
        variance = float(observed @ gain) + _STEP_NOISE
        speed, drafting = gain / variance * min(max(error, -_MAX_ERROR), _MAX_ERROR)
        self.speed += float(speed)
        self.drafting += float(drafting)
        self._covariance -= np.outer(gain, gain) / variance


class CostTable:
    """Milliseconds of a decode step: plain steps by sequences, draft passes by blocks and rows, verification by drafts.

    Costs are linear between measured sizes and proportional beyond them. A block costs what the next wider measured
    one does. `plain` and each `draft[width]` are points of the same sizes, ascending. `verify[i]` are points
    (drafts, ms) of `plain[i]` sequences and begin with (0, 0.0). With graphs a step costs what the one of `sizes` does
    that it is padded to, so costs are a staircase.
    """

    def __init__(
        self,
        plain: Sequence[Point],
        draft: Mapping[int, Sequence[Point]],
        verify: Sequence[Sequence[Point]],
        sizes: StepSizes | None = None,
    ) -> None:
        self._sizes = sizes
        self.widths = sorted(draft)
        self._plain = np.array(plain, dtype=np.float64).reshape(-1, 2)
        self._draft = {width: np.array(points, dtype=np.float64).reshape(-1, 2) for width, points in draft.items()}
        self._verify = [np.array(points, dtype=np.float64) for points in verify]
        self._draft_ms: dict[int, Floats] = {}
        self._target_ms: dict[int, Floats] = {}
        self._scales = [Scale() for _ in self._plain]

    def step_ms(self, seqs: int, blocks: Any, rows: int, drafts: Any) -> Floats:
        """Return ms of a step of `seqs` sequences with `blocks` draft blocks of `rows` rows and `drafts` verified.

        `blocks` and `drafts` are numbers or integer arrays that broadcast.
        """
        plain, drafting = self._parts(seqs, blocks, rows, drafts)
        return plain + drafting

    def refine(self, seqs: int, blocks: int, rows: int, drafts: int, ms: float) -> None:
        """Move the costs of this number of sequences towards a step that took `ms`."""
        plain, drafting = self._parts(seqs, blocks, rows, drafts)
        expected = plain + float(drafting)
        self._scales[self._nearest(seqs)].learn(float(drafting) / expected, log(ms / expected))

    def doubt(self) -> None:
        """Learn as quickly as at the beginning, because steps are computed in another way from now on."""
        for scale in self._scales:
            scale.doubt()

    def _parts(self, seqs: int, blocks: Any, rows: int, drafts: Any) -> tuple[float, Floats]:
        """Return ms of a plain step of these sequences, and ms that drafting adds to it."""
        scale = self._scales[self._nearest(seqs)]
        target_ms = self._target(seqs, int(np.max(drafts)))
        drafting = self._draft_pass(int(np.max(blocks)), rows)[blocks] + target_ms[drafts] - target_ms[0]
        return exp(scale.speed) * float(target_ms[0]), exp(scale.speed + scale.drafting) * np.asarray(drafting)

    def _nearest(self, seqs: int) -> int:
        return int(np.abs(np.log(self._plain[:, 0] / seqs)).argmin())

    def _draft_pass(self, max_blocks: int, rows: int) -> Floats:
        """Return ms of a pass over 0, 1, ... max_blocks (or more) blocks, from a cache."""
        known = self._draft_ms.get(rows)
        if known is None or max_blocks >= len(known):
            known = self._draft_ms[rows] = self._padded_draft(np.arange(2 * max_blocks + 2), rows)
            known[0] = 0.0
        return known

    def _padded_draft(self, blocks: NDArray[np.int64], rows: int) -> Floats:
        passes = self._sizes.draft_passes(rows) if self._sizes else ()
        if not passes:
            return self._draft_at(blocks, rows)
        return _staircase([up_to for up_to, _ in passes], [self._draft_at(*size) for size in passes], blocks)

    def _draft_at(self, blocks: Any, rows: int) -> Floats:
        width = next((width for width in self.widths if width >= rows), self.widths[-1])
        return _interpolate(self._draft[width], np.asarray(blocks))

    def _target(self, seqs: int, max_drafts: int) -> Floats:
        """Return ms of a target pass over `seqs` sequences with 0, 1, ... max_drafts (or more) drafts, from a cache."""
        known = self._target_ms.get(seqs)
        if known is None or max_drafts >= len(known):
            known = self._target_ms[seqs] = self._padded_target(seqs, np.arange(2 * max_drafts + 2))
        return known

    def _padded_target(self, seqs: int, drafts: NDArray[np.int64]) -> Floats:
        passes = self._sizes.target_passes(seqs) if self._sizes else ()
        if not passes:
            return self._target_at(seqs, drafts)
        return _staircase([up_to for _, up_to in passes], [self._target_at(*size) for size in passes], drafts)

    def _target_at(self, seqs: int, drafts: Any) -> Floats:
        """Interpolate between the next smaller and the next larger measured number of sequences."""
        above = min(int(np.searchsorted(self._plain[:, 0], seqs)), len(self._plain) - 1)
        below = max(above - 1, 0)
        low, high = self._plain[below, 0], self._plain[above, 0]
        share = min(max((seqs - low) / (high - low), 0.0), 1.0) if high > low else 1.0
        verify = sum(
            part * _interpolate(self._verify[i], drafts) for i, part in ((below, 1 - share), (above, share)) if part
        )
        ms: Floats = _interpolate(self._plain, np.array(seqs)) + verify
        return ms


def _staircase(ends: Sequence[int], ms: Sequence[Floats], counts: NDArray[np.int64]) -> Floats:
    """Return for each count the ms of the first end that is no smaller, else of the last."""
    return np.array(ms)[np.searchsorted(ends[:-1], counts)]


def _interpolate(points: Floats, sizes: Any) -> Floats:
    last_size, last_ms = points[-1]
    beyond = last_ms * sizes / max(last_size, 1)
    return np.where(sizes > last_size, beyond, np.interp(sizes, points[:, 0], points[:, 1]))
