"""How many drafts of each sequence a step verifies: none where drafting does not pay, else as many as pay.

Verification hands out tokens whatever is decided here, so this is about speed alone. What counts is tokens per second
of the whole batch: a step of S sequences in which D draft and T rows are verified gives S + (accepted drafts) tokens in
draft_ms(D) + target_ms(T). Which drafts will be accepted is guessed from what has become of a sequence's last ones; so
nothing is read from the device before the target runs. Pure functions and counts, no torch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

_MEMORY = 0.9
"""What a step's outcome still weighs after the next one of its sequence."""
_LONG_MEMORY = 0.99
"""The same for what sequences do on average, after the next outcome of any of them."""
_AVERAGE_WEIGHT = 6.0
"""How many drafts of its own weigh as much as what other sequences' drafts say of a sequence."""
_PRIOR_WEIGHT = 5.0
"""How many outcomes weigh as much as what is expected without any."""
_OPTIMISM = 0.8
"""The chance of a draft after an accepted one, before anything is known."""
_PROBE_SHARE = 0.018
"""Of the time, spent on finding out whether text that was hopeless has become easy."""
_PROBE_DRAFTS = 5
_REFINEMENT = 0.05
"""How far one step moves the costs towards what it took."""


class CostTable:
    """Milliseconds of a step: its draft pass by blocks, and the rest by target rows. Between the sizes that were
    measured costs are linear, and beyond the last proportional to it.

    `draft` and `target` are (size, ms), sizes ascending.
    """

    def __init__(self, draft: Sequence[tuple[int, float]], target: Sequence[tuple[int, float]]) -> None:
        self._draft, self._target = (np.array(table, dtype=np.float64).reshape(-1, 2) for table in (draft, target))

    def draft_ms(self, blocks: Any) -> Floats:
        """Of no blocks, nothing."""
        return np.where(np.asarray(blocks) > 0, _between(self._draft, blocks), 0.0)

    def target_ms(self, rows: Any) -> Floats:
        return _between(self._target, rows)

    def step_ms(self, blocks: Any, rows: Any) -> Floats:
        return self.draft_ms(blocks) + self.target_ms(rows)

    def refine(self, blocks: int, rows: int, ms: float) -> None:
        """Move the costs near this size towards what a step has taken."""
        # A step that something else held up says little.
        ratio = min(max(ms / float(self.step_ms(blocks, rows)), 0.5), 2.0)
        for table, size in ((self._draft, blocks), (self._target, rows)):
            if size:
                nearest = np.abs(np.log(table[:, 0] / size)).argmin()
                table[nearest, 1] *= 1 + _REFINEMENT * (ratio - 1)


def _between(table: Floats, sizes: Any) -> Floats:
    sizes = np.asarray(sizes, dtype=np.float64)
    last_size, last_ms = table[-1]
    return np.where(sizes > last_size, last_ms * sizes / last_size, np.interp(sizes, table[:, 0], table[:, 1]))


class History:
    """Outcomes of drafts by position, [b - 1] each, older ones fading: `tried[k]` had an accepted one before them, and
    `kept[k]` of these were accepted."""

    def __init__(self, num_drafts: int, memory: float = _MEMORY) -> None:
        self.tried = np.zeros(num_drafts)
        self.kept = np.zeros(num_drafts)
        self._memory = memory

    def add(self, verified: int, accepted: int) -> None:
        """A step that verified so many drafts, of which so many were accepted."""
        self.tried *= self._memory
        self.kept *= self._memory
        self.tried[: min(accepted + 1, verified)] += 1
        self.kept[:accepted] += 1

    def rate(self, expected: float) -> float:
        """The chance of a draft after an accepted one, at any position."""
        return float(self.kept.sum() + _AVERAGE_WEIGHT * expected) / float(self.tried.sum() + _AVERAGE_WEIGHT)


def survival(history: History, average: float) -> Floats:
    """The chance [b - 1] that the draft at each position is accepted, with all before it; `average` is the chance of a
    draft in other sequences. Positions that were hardly reached are like the others of this sequence."""
    rate = history.rate(average)
    chances: Floats = np.cumprod((history.kept + _PRIOR_WEIGHT * rate) / (history.tried + _PRIOR_WEIGHT))
    return chances


class Allotment(NamedTuple):
    """How many drafts are verified of each sequence, and the tokens per millisecond that are expected of it."""

    drafts: list[int]
    rate: float


def allot(chances: Floats, costs: CostTable) -> Allotment:
    """The drafts to verify, for the most tokens per second over the whole batch.

    `chances` [S, b - 1] are survivals, 0 where a draft may not be verified. A sequence either drafts a whole block or
    none; of those that draft, the likeliest drafts of all are verified first.
    """
    num_seqs, _ = chances.shape
    order = np.argsort(-chances.sum(axis=1), kind="stable")
    best = Allotment([0] * num_seqs, num_seqs / float(costs.target_ms(num_seqs)))
    for drafting in _sizes(num_seqs):
        some = chances[order[:drafting]]
        flat = np.sort(some, axis=None)[::-1]
        flat = flat[flat > 0]
        if not len(flat):
            continue
        rates = (num_seqs + np.cumsum(flat)) / costs.step_ms(drafting, num_seqs + np.arange(1, len(flat) + 1))
        most = int(rates.argmax())
        if rates[most] > best.rate:
            drafts = np.zeros(num_seqs, dtype=np.int64)
            drafts[order[:drafting]] = (some >= flat[most]).sum(axis=1)
            best = Allotment(drafts.tolist(), float(rates[most]))
    return best


def _sizes(most: int) -> list[int]:
    """Numbers of drafting sequences worth looking at."""
    return sorted({*(1 << i for i in range(most.bit_length())), *(most * i // 8 for i in range(1, 9))} - {0})


@dataclass(slots=True)
class Policy:
    """Decides step by step. `width` None is automatic; else every sequence verifies so many rows, its anchor included.

    Without `costs` a whole block.
    """

    block_size: int
    costs: CostTable | None = None
    width: int | None = None
    _average: History = field(init=False)
    _histories: dict[Hashable, History] = field(default_factory=dict)
    _credit: float = 0.0
    _last_probe: dict[Hashable, int] = field(default_factory=dict)
    _probed: set[Hashable] = field(default_factory=set)
    _risen: set[Hashable] = field(default_factory=set)
    _steps: int = 0

    def __post_init__(self) -> None:
        if self.costs is not None:
            self._credit = self._most_credit(self.costs)
        self._average = History(self.block_size - 1, _LONG_MEMORY)

    def drafts(self, wanted: Sequence[tuple[Hashable, int]]) -> list[int]:
        """How many drafts are verified of each (sequence, most drafts that it may verify)."""
        self._probed.clear()
        if self.width is not None or self.costs is None:
            return [min(most, (self.width or self.block_size) - 1) for _, most in wanted]
        return self._choose(wanted, self.costs) if wanted else []

    def observe(self, sequence: Hashable, verified: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        if verified:
            if sequence in self._probed and accepted == verified:
                self._histories.pop(sequence, None)  # the text has changed: what it was says nothing any more
                self._risen.add(sequence)
            self._histories.setdefault(sequence, History(self.block_size - 1)).add(verified, accepted)
            self._average.add(verified, accepted)

    def took(self, blocks: int, rows: int, ms: float) -> None:
        """A decode step is over."""
        if self.costs is not None:
            self.costs.refine(blocks, rows, ms)
            self._credit = min(self._credit + _PROBE_SHARE * ms, self._most_credit(self.costs))

    def forget(self, sequence: Hashable) -> None:
        self._histories.pop(sequence, None)
        self._last_probe.pop(sequence, None)
        self._risen.discard(sequence)

    def _most_credit(self, costs: CostTable) -> float:
        """Milliseconds: enough for a probe whatever else drafts, and no long run of them."""
        return 2 * float(costs.step_ms(1, 1 + _PROBE_DRAFTS))

    def _choose(self, wanted: Sequence[tuple[Hashable, int]], costs: CostTable) -> list[int]:
        self._steps += 1
        positions = np.arange(1, self.block_size)
        unknown, average = History(self.block_size - 1), self._average.rate(_OPTIMISM)
        chances = np.array(
            [
                survival(self._histories.get(sequence, unknown), average) * (positions <= most)
                for sequence, most in wanted
            ]
        )
        chosen = allot(chances, costs).drafts
        self._probe(wanted, chosen, costs)
        return chosen

    def _probe(self, wanted: Sequence[tuple[Hashable, int]], chosen: list[int], costs: CostTable) -> None:
        """Let plain sequences draft once, those first that have waited longest: as many as there is time saved up for,
        and all of them where one has come back to drafting, for what has become easy for it may have for others."""
        lifted = any(drafts and sequence in self._risen for (sequence, _), drafts in zip(wanted, chosen, strict=True))
        self._risen.clear()
        idle = [i for i, (_, most) in enumerate(wanted) if most and not chosen[i]]
        blocks, rows = sum(map(bool, chosen)), len(chosen) + sum(chosen)
        for i in sorted(idle, key=lambda i: self._last_probe.get(wanted[i][0], -1)):
            sequence, most = wanted[i]
            extra = min(most, _PROBE_DRAFTS)
            cost = float(costs.step_ms(blocks + 1, rows + extra) - costs.step_ms(blocks, rows))
            if not lifted and self._credit < cost:
                break
            self._credit -= 0.0 if lifted else cost
            self._last_probe[sequence] = self._steps
            self._probed.add(sequence)
            chosen[i] = extra
            blocks, rows = blocks + 1, rows + extra
