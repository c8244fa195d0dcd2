"""How many drafts of each sequence a step verifies: none where drafting does not pay, else as many as pay.

Verification hands out tokens whatever is decided here, so this is about speed alone. What counts is tokens per second
of the whole batch: a step of S sequences in which D draft blocks of W rows and N drafts are verified gives S +
(accepted drafts) tokens in draft_ms(D, W) + target_ms(S, N). Blocks are no wider than what is verified of them, for a
narrow one is as good as the beginning of a wide one. Which drafts will be accepted is guessed from what has become of a
sequence's last ones; so nothing is read from the device before the target runs. No torch, no clock.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.arrays import Ints

Floats = NDArray[np.float64]

_MEMORY = 0.9
"""What a step's outcome still weighs after the next one of its sequence."""
_LONG_MEMORY = 0.99
"""The same for what sequences do on average, after the next outcome of any of them."""
_WEIGHTS = np.array([1.0, 3.0, 10.0, 30.0, 100.0])
"""How many drafts of its own weigh as much as what other sequences' drafts say of a sequence: few where texts differ,
many where they are alike. Whichever has foretold the last outcomes best is believed; until then the first."""
_PRIOR_WEIGHT = 10.0
"""How many drafts of all sequences weigh as much as what is expected without any."""
_OPTIMISM = 0.9
"""The chance of a draft after an accepted one, before anything is known."""
_RAREST = 1e-3
"""No chance is taken to be nearer to 0 or 1."""
_MOST_WEIGHT = 1e100
"""Outcomes are divided by their weight when it has grown beyond this."""
_NOTHING = (0.0, 0.0, 0.0)
"""Of a sequence: tried, kept, and expected to be kept."""
_SURPRISING = 0.1
"""A probe that is accepted whole says that the text has changed if that was less likely than this."""
_LEFT_BEHIND = 0.3
"""What is known of all sequences still weighs so much once one has been found to have become easy."""
_PROBE_SHARE = 0.012
"""Of the time, spent on finding out whether text that was hopeless has become easy."""
_PROBE_DRAFTS = 5
"""Verified of a plain sequence when it is probed."""
_WORTH_DRAFTING = 1.03
"""What is expected of drafting must be so much more than plain decoding, which is known."""
_FOR_WHOLE_BLOCKS = 1.02
"""Rows of one width a sequence are quicker than as many of several, so whole blocks count for so much more; those of
one sequence if they are as wide as can be, for they tell most."""
_STEP_NOISE = 0.03
"""Variance of the logarithm of what like steps take, as are the following."""
_SPEED, _SPEED_DRIFT = 0.04, 4e-4
"""Of how much faster or slower than in warm-up steps of a size are, and what a step adds to it."""
_DEARNESS, _DEARNESS_DRIFT = 0.02, 1e-6
"""Of how much dearer drafting is against plain decoding than warm-up had it."""
_HELD_UP = 0.7
"""By more than a factor of e to this a step says nothing more: something else held it up."""
_HOLDS_FOR = 16
"""Steps that a decision holds for, if nothing speaks against it."""
_DISAPPOINTING = 4
"""A step that accepts less than one in so many of its drafts speaks against it."""


class Scale:
    """How much of what was timed before the first request steps of a size take now, in logarithms: `speed` of all, and
    `dearness` on top of it of what drafting adds. Both drift, the machine's speed most, and only their sum shows in a
    step that drafts: so a Kalman filter tells them apart, and what is not run keeps up with what is.
    """

    __slots__ = ("_both", "_dearness", "_speed", "dearness", "speed")

    def __init__(self) -> None:
        self.speed = self.dearness = 0.0
        self._speed, self._both, self._dearness = _SPEED, 0.0, _DEARNESS  # covariance

    def learn(self, share: float, error: float) -> None:
        """From a step of whose time drafting was such a share, and which took so much longer than was expected."""
        error = min(max(error, -_HELD_UP), _HELD_UP)
        self._speed += _SPEED_DRIFT
        self._dearness += _DEARNESS_DRIFT
        of_speed, of_dearness = self._speed + share * self._both, self._both + share * self._dearness
        variance = of_speed + share * of_dearness + _STEP_NOISE
        self.speed += of_speed / variance * error
        self.dearness += of_dearness / variance * error
        self._speed -= of_speed * of_speed / variance
        self._both -= of_speed * of_dearness / variance
        self._dearness -= of_dearness * of_dearness / variance


class CostTable:
    """Milliseconds of a decode step: a plain one by sequences, plus a draft pass by blocks and their rows, plus what
    verifying takes, by sequences and drafts. Between the sizes that were measured costs are linear, beyond them
    proportional; blocks cost what the next wider ones do that were measured.

    `plain` and, for each of the `widths` that blocks may have, `draft` are (size, ms) of the same sizes, ascending;
    `verify` has for each of them (drafts, ms), beginning with (0, 0.0).
    """

    def __init__(
        self,
        plain: Sequence[tuple[int, float]],
        draft: Mapping[int, Sequence[tuple[int, float]]],
        verify: Sequence[Sequence[tuple[int, float]]],
    ) -> None:
        self.widths = sorted(draft)
        self._plain = np.array(plain, dtype=np.float64).reshape(-1, 2)
        self._draft = {rows: np.array(table, dtype=np.float64).reshape(-1, 2) for rows, table in draft.items()}
        self._verify = [np.array(table, dtype=np.float64) for table in verify]
        self._draft_ms = {rows: np.zeros(0) for rows in draft}
        self._target_ms: dict[int, Floats] = {}
        self._scales = [Scale() for _ in self._plain]

    def step_ms(self, seqs: int, blocks: Any, rows: int, drafts: Any) -> Floats:
        """Of so many decoding sequences, draft blocks of so many rows each, and verified drafts: blocks and drafts are
        numbers or arrays."""
        plain, drafting = self._parts(seqs, blocks, rows, drafts)
        return plain + drafting

    def refine(self, seqs: int, blocks: int, rows: int, drafts: int, ms: float) -> None:
        """Move the costs near this size towards what a step has taken."""
        plain, drafting = self._parts(seqs, blocks, rows, drafts)
        expected = plain + float(drafting)
        self._scales[_nearest(self._plain, seqs)].learn(float(drafting) / expected, log(ms / expected))

    def _parts(self, seqs: int, blocks: Any, rows: int, drafts: Any) -> tuple[float, Floats]:
        """What a plain step of these sequences takes, and what drafting adds to it."""
        scale = self._scales[_nearest(self._plain, seqs)]
        target_ms = self._target_timed(seqs, int(np.max(drafts)))
        drafting = self._draft_timed(int(np.max(blocks)), rows)[blocks] + target_ms[drafts] - target_ms[0]
        return exp(scale.speed) * float(target_ms[0]), exp(scale.speed + scale.dearness) * np.asarray(drafting)

    def _draft_timed(self, most: int, rows: int) -> Floats:
        """Of 0, 1, ... blocks of so many rows, at least as many as asked for."""
        width = next((width for width in self.widths if width >= rows), self.widths[-1])
        known = self._draft_ms[width]
        if most >= len(known):
            known = self._draft_ms[width] = _between(self._draft[width], np.arange(2 * most + 2))
            known[0] = 0.0
        return known

    def _target_timed(self, seqs: int, most: int) -> Floats:
        """Of a target pass over so many sequences with 0, 1, ... drafts of them all, at least as many as asked for."""
        known = self._target_ms.get(seqs)
        if known is None or most >= len(known):
            known = self._target_ms[seqs] = self._target_of(seqs, np.arange(2 * most + 2))
        return known

    def _target_of(self, seqs: int, drafts: Any) -> Floats:
        """Between the next smaller and the next larger number of sequences that were measured."""
        above = min(int(np.searchsorted(self._plain[:, 0], seqs)), len(self._plain) - 1)
        below = max(above - 1, 0)
        low, high = self._plain[below, 0], self._plain[above, 0]
        share = min(max((seqs - low) / (high - low), 0.0), 1.0) if high > low else 1.0
        verify = sum(
            part * _between(self._verify[i], drafts) for i, part in ((below, 1 - share), (above, share)) if part
        )
        ms: Floats = _between(self._plain, np.array(seqs)) + verify
        return ms


def _nearest(table: Floats, size: int) -> int:
    return int(np.abs(np.log(table[:, 0] / size)).argmin())


def _between(table: Floats, sizes: Any) -> Floats:
    last_size, last_ms = table[-1]
    beyond = last_ms * sizes / max(last_size, 1)
    return np.where(sizes > last_size, beyond, np.interp(sizes, table[:, 0], table[:, 1]))


class Outcomes:
    """What became of drafts, older outcomes fading: how often the draft at each position was the first to be refused,
    and how often all of so many were accepted. Weights grow instead of fading, and are divided by the last one."""

    __slots__ = ("_weight", "passed", "refused")

    def __init__(self, block_size: int) -> None:
        self.refused = [0.0] * (block_size - 1)
        self.passed = [0.0] * block_size
        self._weight = 1.0

    def add(self, verified: int, accepted: int) -> None:
        """A step that verified so many drafts, of which so many were accepted."""
        if accepted < verified:
            self.refused[accepted] += self._weight
        else:
            self.passed[verified] += self._weight

    def fade(self, memory: float) -> None:
        """Let all that is known weigh so much of what it does."""
        self._weight /= memory
        if self._weight > _MOST_WEIGHT:
            self.refused, self.passed = ([x / self._weight for x in some] for some in (self.refused, self.passed))
            self._weight = 1.0

    @property
    def weighed(self) -> list[float]:
        """Refused [b - 1] and then passed [b], with what they weigh now."""
        return [x / self._weight for x in (*self.refused, *self.passed)]


def counts(outcomes: Sequence[Outcomes]) -> tuple[Floats, Floats]:
    """(tried, kept), each [S, b - 1]: so many drafts at each position had an accepted one before them, and so many of
    these were accepted."""
    weighed = np.array([some.weighed for some in outcomes])
    num_drafts = weighed.shape[1] // 2
    refused, passed = weighed[:, :num_drafts], weighed[:, num_drafts + 1 :]
    tried = np.cumsum((refused + passed)[:, ::-1], axis=1)[:, ::-1]
    return tried, tried - refused


class Usual(NamedTuple):
    """What is known of all sequences together: the chance that a draft is accepted after an accepted one, and the same
    at each position [2, b - 1] of a sequence's first block, and of a later one."""

    chance: float
    at: Floats


def usual(outcomes: Sequence[Outcomes]) -> Usual:
    """From the outcomes of first blocks, and of later ones.

    Later positions are mostly harder, and how much so is much the same everywhere; so first blocks are taken to be as
    much better or worse than later ones, in odds, at every position as they are on the whole. They differ because a
    later block mostly begins where the one before was refused.
    """
    tried, kept = counts(outcomes)
    all_tried, all_kept = tried.sum(axis=0), kept.sum(axis=0)
    chance = float((all_kept.sum() + _PRIOR_WEIGHT * _OPTIMISM) / (all_tried.sum() + _PRIOR_WEIGHT))
    by_position = (all_kept + _PRIOR_WEIGHT * chance) / (all_tried + _PRIOR_WEIGHT)
    expected = (tried * by_position).sum(axis=1)
    better = _times_better(tried.sum(axis=1), kept.sum(axis=1), expected, chance, _PRIOR_WEIGHT)
    return Usual(chance, _shifted(by_position, better[:, None]))


def chances(at: Floats, own: Floats, chance: float, weights: Floats) -> Floats:
    """The chance [W, S, b - 1] that the draft at each position is accepted once all before it are, under each of W
    weights: `at` [S, b - 1] is what is usual, and a sequence is as much better or worse at every position as it is on
    the whole. `own` [S, 3] are its drafts that were tried, that were kept, and that were expected to be.
    """
    tried, kept, expected = own.T
    return _shifted(at, _times_better(tried, kept, expected, chance, weights[:, None])[..., None])


def _times_better(tried: Floats, kept: Floats, expected: Floats, chance: float, weight: Any) -> Any:
    """The odds of what was kept over those of what was expected to be, once so many drafts as usual are added."""
    more = weight * chance
    return _odds((kept + more) / (tried + weight)) / _odds((expected + more) / (tried + weight))


def _shifted(chance: Floats, times: Any) -> Floats:
    odds = _odds(chance) * times
    shifted: Floats = np.clip(odds / (1 + odds), _RAREST, 1 - _RAREST)
    return shifted


def _odds(chance: Any) -> Any:
    chance = np.clip(chance, _RAREST, 1 - _RAREST)
    return chance / (1 - chance)


def surprise(foretold: Floats, verified: Ints, accepted: Ints) -> Floats:
    """How unlikely [W] outcomes of S sequences were under each of W weights: the negative logarithm, with the chances
    `foretold` [W, S, b - 1] that a draft is accepted after an accepted one."""
    positions = np.arange(foretold.shape[2])
    accepted, verified = accepted[:, None], verified[:, None]
    happened = np.where(positions < accepted, foretold, 1 - foretold)
    seen = positions < np.minimum(accepted + 1, verified)
    unlikely: Floats = -(np.log(happened) * seen).sum(axis=(1, 2))
    return unlikely


class Allotment(NamedTuple):
    """How many drafts are verified of each sequence, and the tokens per millisecond that are expected of it."""

    drafts: list[int]
    rate: float


def allot(chances: Floats, costs: CostTable) -> Allotment:
    """The drafts to verify, for the most tokens per second over the whole batch.

    `chances` [S, b - 1] are survivals, 0 in a sequence that may not draft. A sequence either drafts a block, of one
    width for all, or none; of those that draft, the likeliest drafts of all are verified first.
    """
    num_seqs = len(chances)
    if not num_seqs:
        return Allotment([], 0.0)
    plain = Allotment([0] * num_seqs, num_seqs / float(costs.step_ms(num_seqs, 0, 0, 0)))
    if not (chances > 0).any():
        return plain
    _, best = max((_by_blocks(chances[:, : rows - 1], rows, costs) for rows in costs.widths), key=itemgetter(0))
    return best if best.rate > _WORTH_DRAFTING * plain.rate else plain


def _by_blocks(chances: Floats, rows: int, costs: CostTable) -> tuple[float, Allotment]:
    """The best of those with blocks of so many rows, behind how much it is preferred to others."""
    num_seqs, num_drafts = chances.shape
    order = np.argsort(-chances.sum(axis=1), kind="stable")
    ranked = chances[order]
    drafting = np.array(_sizes(int((chances[:, 0] > 0).sum())))
    # [numbers of drafting sequences, drafts]: the drafts of so many sequences, likeliest first
    likeliest = -np.sort(-(ranked * (np.arange(num_seqs) < drafting[:, None])[..., None]).reshape(len(drafting), -1))
    tokens = num_seqs + np.cumsum(likeliest, axis=1)
    rates = tokens / costs.step_ms(num_seqs, drafting[:, None], rows, np.arange(1, num_seqs * num_drafts + 1))
    preferred = rates.copy()
    whole = np.arange(len(drafting)), drafting * num_drafts - 1
    preferred[whole] *= np.where((drafting > 1) | (rows == costs.widths[-1]), _FOR_WHOLE_BLOCKS, 1.0)
    size, last = np.unravel_index(preferred.argmax(), rates.shape)
    drafts = np.zeros(num_seqs, dtype=np.int64)
    drafting_seqs = order[: drafting[size]]
    drafts[drafting_seqs] = (chances[drafting_seqs] >= likeliest[size, last]).sum(axis=1)
    return float(preferred[size, last]), Allotment(drafts.tolist(), float(rates[size, last]))


def _sizes(most: int) -> list[int]:
    """Numbers of drafting sequences worth looking at."""
    return sorted({1, *(most * i // 8 for i in range(1, 9))} - {0})


@dataclass(slots=True)
class Policy:
    """Decides step by step. `width` None is automatic; else every sequence verifies so many rows, its anchor included.

    Without `costs` a whole block. A decision holds for some steps, while nobody comes, ends or disappoints.
    `block_rows` is how wide the blocks of the last step are drafted, whatever a sequence at its end verifies of them.
    """

    block_size: int
    costs: CostTable | None = None
    width: int | None = None
    block_rows: int = field(init=False)
    _blocks: tuple[Outcomes, Outcomes] = field(init=False)
    _usual: Usual = field(init=False)
    _of: dict[Hashable, tuple[float, ...]] = field(default_factory=dict)
    _came: dict[Hashable, int] = field(default_factory=dict)
    _decided: dict[Hashable, int] = field(default_factory=dict)
    _place: dict[Hashable, int] = field(default_factory=dict)
    _foretold: Floats = field(init=False)
    _happened: list[tuple[int, int, int]] = field(default_factory=list)
    _surprise: Floats = field(default_factory=lambda: np.zeros(len(_WEIGHTS)))
    _holds_for: int = 0
    _credit: float = 0.0
    _last_probe: dict[Hashable, int] = field(default_factory=dict)
    _probed: set[Hashable] = field(default_factory=set)
    _risen: set[Hashable] = field(default_factory=set)
    _steps: int = 0

    def __post_init__(self) -> None:
        self.block_rows = self.width or self.block_size
        if self.width is not None:
            self.costs = None
        if self.costs is not None:
            self._credit = self._most_credit(self.costs)
        self._blocks = Outcomes(self.block_size), Outcomes(self.block_size)  # first ones, later ones
        self._usual = usual(self._blocks)

    def drafts(self, wanted: Sequence[tuple[Hashable, int]]) -> list[int]:
        """How many drafts are verified of each (sequence, most drafts that it may verify)."""
        if self.costs is None:
            return [min(most, self.block_rows - 1) for _, most in wanted]
        self._steps += 1
        self._holds_for -= 1
        same = len(wanted) == len(self._place) and all(sequence in self._place for sequence, _ in wanted)
        if self._holds_for < 0 or not same:
            self._decide(wanted, self.costs)
        chosen = [min(self._decided[sequence], most) for sequence, most in wanted]
        self.block_rows = 1 + max((self._decided[sequence] for sequence, _ in wanted), default=0)
        self._probe(wanted, chosen, self.costs)
        return chosen

    def observe(self, sequence: Hashable, verified: int, accepted: int) -> None:
        """What became of a sequence's drafts. It may have been left out of a decision that came before."""
        if not verified or self.costs is None or sequence not in self._place:
            return
        self._happened.append((self._place[sequence], verified, accepted))
        if sequence in self._probed:
            self._probed.discard(sequence)
            self._holds_for = 0
            foretold = self._foretold[self._surprise.argmin(), self._place[sequence], :verified]
            if accepted == verified and foretold.prod() < _SURPRISING:
                self._of.pop(sequence, None)  # the text has changed: what it was says nothing any more
                self._risen.add(sequence)
        elif _DISAPPOINTING * accepted < verified:
            self._holds_for = 0
        later = int(self._is_later(sequence))
        for blocks in self._blocks:
            blocks.fade(_LONG_MEMORY)
        self._blocks[later].add(verified, accepted)
        tried = min(accepted + 1, verified)
        happened = (tried, accepted, float(self._usual.at[later, :tried].sum()))
        before = self._of.get(sequence, _NOTHING)
        self._of[sequence] = tuple(_MEMORY * was + now for was, now in zip(before, happened, strict=True))

    def took(self, seqs: int, blocks: int, rows: int, drafts: int, ms: float, *, prefilled: bool = False) -> None:
        """A step of so many decoding sequences and blocks of so many rows, which verified so many drafts, is over."""
        if self.costs is not None:
            if not prefilled:
                self.costs.refine(seqs, blocks, rows, drafts, ms)
            self._credit = min(self._credit + _PROBE_SHARE * ms, self._most_credit(self.costs))

    def forget(self, sequence: Hashable) -> None:
        for known in (self._of, self._came, self._decided, self._last_probe):
            known.pop(sequence, None)
        self._probed.discard(sequence)
        self._risen.discard(sequence)

    def _most_credit(self, costs: CostTable) -> float:
        """Milliseconds of a probe: no run of them is saved up for."""
        return float(costs.step_ms(1, 1, _PROBE_DRAFTS + 1, _PROBE_DRAFTS))

    def _decide(self, wanted: Sequence[tuple[Hashable, int]], costs: CostTable) -> None:
        self._judge()
        names, most = zip(*wanted, strict=True) if wanted else ((), ())
        self._place = {name: place for place, name in enumerate(names)}
        self._usual = usual(self._blocks)
        own = np.array([self._of.get(name, _NOTHING) for name in names]).reshape(-1, len(_NOTHING))
        self._came |= {name: self._steps for name in names if name not in self._came}
        later = np.array([self._is_later(name) for name in names], dtype=np.int64)
        self._foretold = chances(self._usual.at[later], own, self._usual.chance, _WEIGHTS)
        survival = self._foretold[self._surprise.argmin()].cumprod(axis=1)
        # Who is near its end and can gain little would be left to crawl there, in the place of who waits.
        may_draft = np.array(most)[:, None] > 0
        self._decided = dict(zip(names, allot(survival * may_draft, costs).drafts, strict=True))
        self._holds_for = _HOLDS_FOR

    def _is_later(self, sequence: Hashable) -> bool:
        """Whether its next block is a later one: behind one that was drafted, or a block's length into the answer."""
        return sequence in self._of or self._steps - self._came[sequence] >= self.block_size

    def _judge(self) -> None:
        """Which weight has foretold best what has happened since the last decision."""
        if self._happened:
            places, verified, accepted = np.array(self._happened).T
            self._surprise *= _LONG_MEMORY ** len(places)
            self._surprise += surprise(self._foretold[:, places], verified, accepted)
            self._happened.clear()
        if self._risen:
            self._surprise[:] = 0.0
            for blocks in self._blocks:
                blocks.fade(_LEFT_BEHIND)

    def _probe(self, wanted: Sequence[tuple[Hashable, int]], chosen: list[int], costs: CostTable) -> None:
        """Let plain sequences draft once, those first that have waited longest: until the time saved up is used up, and
        all of them where one has come back to drafting, for what has become easy for it may have for others."""
        lifted = any(drafts and sequence in self._risen for (sequence, _), drafts in zip(wanted, chosen, strict=True))
        self._risen.clear()
        if self._credit <= 0 and not lifted:
            return
        idle = [i for i, (_, most) in enumerate(wanted) if most and not chosen[i]]
        seqs, blocks, drafts = len(chosen), sum(map(bool, chosen)), sum(chosen)
        for i in sorted(idle, key=lambda i: self._last_probe.get(wanted[i][0], -1)):
            if not lifted and self._credit <= 0:
                break
            sequence, most = wanted[i]
            extra = min(most, _PROBE_DRAFTS)
            before = costs.step_ms(seqs, blocks, self.block_rows, drafts)
            self.block_rows = max(self.block_rows, extra + 1)
            blocks, drafts = blocks + 1, drafts + extra
            if not lifted:
                self._credit -= float(costs.step_ms(seqs, blocks, self.block_rows, drafts) - before)
            self._last_probe[sequence] = self._steps
            self._probed.add(sequence)
            chosen[i] = extra
