"""How many drafts of each sequence a step verifies: none where drafting does not pay, else as many as pay.

Verification hands out tokens whatever is decided here, so this is about speed alone. What counts is tokens per second
of the whole batch: a step of S sequences in which D draft and N drafts are verified gives S + (accepted drafts) tokens
in draft_ms(D) + target_ms(S, N). Which drafts will be accepted is guessed from what has become of a sequence's last
ones; so nothing is read from the device before the target runs. No torch, no clock.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.arrays import Ints

Floats = NDArray[np.float64]

_MEMORY = 0.9
"""What a step's outcome still weighs after the next one of its sequence."""
_LONG_MEMORY = 0.995
"""The same for what sequences do on average, after the next outcome of any of them."""
_WEIGHTS = np.array([3.0, 10.0, 30.0, 100.0])
"""How many drafts of its own weigh as much as what other sequences' drafts say of a sequence: few where texts differ,
many where they are alike. Whichever has foretold the last outcomes best is believed."""
_PRIOR_WEIGHT = 5.0
"""How many outcomes of all sequences weigh as much as what is expected without any."""
_OPTIMISM = 0.9
"""The chance of a draft after an accepted one, before anything is known."""
_RAREST = 1e-3
"""No chance is taken to be nearer to 0 or 1."""
_MOST_WEIGHT = 1e100
"""Outcomes are divided by their weight when it has grown beyond this."""
_SURPRISING = 0.1
"""A probe that is accepted whole says that the text has changed if that was less likely than this."""
_LEFT_BEHIND = 0.3
"""What is known of all sequences still weighs so much once one has been found to have become easy."""
_PROBE_SHARE = 0.01
"""Of the time, spent on finding out whether text that was hopeless has become easy."""
_PROBE_DRAFTS = 5
"""Verified of a plain sequence when it is probed."""
_WORTH_DRAFTING = 1.03
"""What is expected of drafting must be so much more than plain decoding, which is known."""
_FOR_WHOLE_BLOCKS = 1.02
"""Rows of one width a sequence are quicker than as many of several, so whole blocks count for so much more."""
_REFINEMENT = 0.08
"""How far one step moves the costs towards what it took."""
_REFINED_EVERY = 17
"""Steps from one that does so to the next; no multiple of the steps that context KV waits for."""
_HOLDS_FOR = 16
"""Steps that a decision holds for, if nothing speaks against it."""
_DISAPPOINTING = 4
"""A step that accepts less than one in so many of its drafts speaks against it."""


class CostTable:
    """Milliseconds of a decode step: a plain one by sequences, plus a draft pass by blocks, plus what verifying takes,
    by sequences and drafts. Between the sizes that were measured costs are linear, beyond them proportional.

    `plain` and `draft` are (size, ms) of the same sizes, ascending; `verify` has for each of them (drafts, ms),
    beginning with (0, 0.0).
    """

    def __init__(
        self,
        plain: Sequence[tuple[int, float]],
        draft: Sequence[tuple[int, float]],
        verify: Sequence[Sequence[tuple[int, float]]],
    ) -> None:
        self._plain, self._draft = (np.array(table, dtype=np.float64).reshape(-1, 2) for table in (plain, draft))
        self._verify = [np.array(table, dtype=np.float64) for table in verify]
        self._draft_ms = np.zeros(0)
        self._target_ms: dict[int, Floats] = {}

    def draft_ms(self, blocks: Any) -> Floats:
        """Of no blocks, nothing. `blocks` is a number or an array of them."""
        if np.max(blocks) >= len(self._draft_ms):
            self._draft_ms = _between(self._draft, np.arange(2 * int(np.max(blocks)) + 2))
            self._draft_ms[0] = 0.0
        return np.asarray(self._draft_ms[blocks])

    def target_ms(self, seqs: int, drafts: Any) -> Floats:
        """Of a target pass over so many sequences, with so many drafts of them all: a number or an array."""
        known = self._target_ms.get(seqs)
        if known is None or np.max(drafts) >= len(known):
            known = self._target_ms[seqs] = self._target_of(seqs, np.arange(2 * int(np.max(drafts)) + 2))
        return np.asarray(known[drafts])

    def step_ms(self, seqs: int, blocks: Any, drafts: Any) -> Floats:
        return self.draft_ms(blocks) + self.target_ms(seqs, drafts)

    def refine(self, seqs: int, blocks: int, drafts: int, ms: float) -> None:
        """Move the costs near this size towards what a step has taken."""
        # A step that something else held up says little.
        ratio = min(max(ms / float(self.step_ms(seqs, blocks, drafts)), 0.5), 2.0)
        scale = 1 + _REFINEMENT * (ratio - 1)
        # How a size's time is shared out stays as it was timed: else what is not run would keep the cost of a day when
        # the machine was slower, and stay unlikely.
        nearest = _nearest(self._plain, seqs)
        self._plain[nearest, 1] *= scale
        self._verify[nearest][:, 1] *= scale
        self._draft[nearest, 1] *= scale
        self._draft_ms = np.zeros(0)
        self._target_ms.clear()

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

    def add(self, verified: int, accepted: int, memory: float) -> None:
        """A step that verified so many drafts, of which so many were accepted."""
        self.fade(memory)
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


def chances(average: Outcomes, outcomes: Sequence[Outcomes], weights: Floats) -> Floats:
    """The chance [W, S, b - 1] that the draft at each position is accepted once all before it are, in S sequences with
    these outcomes, under each of W weights. `average` is of all sequences together.

    Later positions are mostly harder, and how much so is much the same everywhere. So a sequence is taken to be as
    much better or worse than all together, in odds, at every position as it is on the whole; and a weight says how many
    drafts of its own it takes to believe that it differs.
    """
    tried, kept = counts([average, *outcomes])
    usual = (kept[0].sum() + _PRIOR_WEIGHT * _OPTIMISM) / (tried[0].sum() + _PRIOR_WEIGHT)
    by_position = (kept[0] + _PRIOR_WEIGHT * usual) / (tried[0] + _PRIOR_WEIGHT)
    tried, kept, weights = tried[1:], kept[1:], weights[:, None]
    own = (kept.sum(axis=1) + weights * usual) / (tried.sum(axis=1) + weights)
    odds = _odds(by_position) * (_odds(own) / _odds(usual))[..., None]
    weights = weights[..., None]
    found: Floats = np.clip((kept + weights * odds / (1 + odds)) / (tried + weights), _RAREST, 1 - _RAREST)
    return found


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

    `chances` [S, b - 1] are survivals, 0 in a sequence that may not draft. A sequence either drafts a whole block or
    none; of those that draft, the likeliest drafts of all are verified first.
    """
    num_seqs, num_drafts = chances.shape
    best = Allotment([0] * num_seqs, num_seqs / float(costs.target_ms(num_seqs, 0))) if num_seqs else Allotment([], 0.0)
    may = int((chances[:, 0] > 0).sum())
    if not may:
        return best
    order = np.argsort(-chances.sum(axis=1), kind="stable")
    ranked = chances[order]
    drafting = np.array(_sizes(may))
    # [numbers of drafting sequences, drafts]: the drafts of so many sequences, likeliest first
    likeliest = -np.sort(-(ranked * (np.arange(num_seqs) < drafting[:, None])[..., None]).reshape(len(drafting), -1))
    tokens = num_seqs + np.cumsum(likeliest, axis=1)
    target_ms = costs.target_ms(num_seqs, np.arange(1, num_seqs * num_drafts + 1))
    rates = tokens / (costs.draft_ms(drafting)[:, None] + target_ms)
    preferred = rates.copy()
    preferred[np.arange(len(drafting)), drafting * num_drafts - 1] *= _FOR_WHOLE_BLOCKS
    size, last = np.unravel_index(preferred.argmax(), rates.shape)
    if rates[size, last] > _WORTH_DRAFTING * best.rate:
        drafts = np.zeros(num_seqs, dtype=np.int64)
        drafting_seqs = order[: drafting[size]]
        drafts[drafting_seqs] = (chances[drafting_seqs] >= likeliest[size, last]).sum(axis=1)
        best = Allotment(drafts.tolist(), float(rates[size, last]))
    return best


def _sizes(most: int) -> list[int]:
    """Numbers of drafting sequences worth looking at."""
    return sorted({1, *(most * i // 8 for i in range(1, 9))} - {0})


@dataclass(slots=True)
class Policy:
    """Decides step by step. `width` None is automatic; else every sequence verifies so many rows, its anchor included.

    Without `costs` a whole block. A decision holds for some steps, while no other sequence comes and none disappoints.
    """

    block_size: int
    costs: CostTable | None = None
    width: int | None = None
    _average: Outcomes = field(init=False)
    _of: dict[Hashable, Outcomes] = field(default_factory=dict)
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
        if self.width is not None:
            self.costs = None
        if self.costs is not None:
            self._credit = self._most_credit(self.costs)
        self._average = Outcomes(self.block_size)

    def drafts(self, wanted: Sequence[tuple[Hashable, int]]) -> list[int]:
        """How many drafts are verified of each (sequence, most drafts that it may verify)."""
        if self.costs is None:
            return [min(most, (self.width or self.block_size) - 1) for _, most in wanted]
        self._steps += 1
        self._holds_for -= 1
        if self._holds_for < 0 or any(sequence not in self._decided for sequence, _ in wanted):
            self._decide(wanted, self.costs)
        chosen = [min(self._decided[sequence], most) for sequence, most in wanted]
        self._probe(wanted, chosen, self.costs)
        return chosen

    def observe(self, sequence: Hashable, verified: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        if not verified or self.costs is None:
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
        self._average.add(verified, accepted, _LONG_MEMORY)
        self._of.setdefault(sequence, Outcomes(self.block_size)).add(verified, accepted, _MEMORY)

    def took(self, seqs: int, blocks: int, drafts: int, ms: float, *, prefilled: bool = False) -> None:
        """A step of so many decoding sequences and blocks, which verified so many drafts, is over."""
        if self.costs is not None:
            if self._steps % _REFINED_EVERY == 0 and not prefilled:
                self.costs.refine(seqs, blocks, drafts, ms)
            self._credit = min(self._credit + _PROBE_SHARE * ms, self._most_credit(self.costs))

    def forget(self, sequence: Hashable) -> None:
        for known in (self._of, self._decided, self._last_probe):
            known.pop(sequence, None)
        self._probed.discard(sequence)
        self._risen.discard(sequence)

    def _most_credit(self, costs: CostTable) -> float:
        """Milliseconds of a probe: no run of them is saved up for."""
        return float(costs.step_ms(1, 1, _PROBE_DRAFTS))

    def _decide(self, wanted: Sequence[tuple[Hashable, int]], costs: CostTable) -> None:
        self._judge()
        names, most = zip(*wanted, strict=True) if wanted else ((), ())
        self._place = {name: place for place, name in enumerate(names)}
        unknown = Outcomes(self.block_size)
        self._foretold = chances(self._average, [self._of.get(name, unknown) for name in names], _WEIGHTS)
        survival = self._foretold[self._surprise.argmin()].cumprod(axis=1)
        # Who is near its end and can gain little would be left to crawl there, in the place of who waits.
        may_draft = np.array(most)[:, None] > 0
        self._decided = dict(zip(names, allot(survival * may_draft, costs).drafts, strict=True))
        self._holds_for = _HOLDS_FOR

    def _judge(self) -> None:
        """Which weight has foretold best what has happened since the last decision."""
        if self._happened:
            places, verified, accepted = np.array(self._happened).T
            self._surprise *= _LONG_MEMORY ** len(places)
            self._surprise += surprise(self._foretold[:, places], verified, accepted)
            self._happened.clear()
        if self._risen:
            self._surprise[:] = 0.0
            self._average.fade(_LEFT_BEHIND)

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
            if not lifted:
                self._credit -= float(
                    costs.step_ms(seqs, blocks + 1, drafts + extra) - costs.step_ms(seqs, blocks, drafts)
                )
            self._last_probe[sequence] = self._steps
            self._probed.add(sequence)
            chosen[i] = extra
            blocks, drafts = blocks + 1, drafts + extra
