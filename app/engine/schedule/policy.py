"""Numbers of drafts that a step verifies of each sequence, and the width of draft blocks.

Verification emits the target's own tokens whatever is decided here, so the policy changes speed only. It maximises the
tokens per second of the whole batch: a step of S sequences that verifies N drafts out of D blocks of W rows emits S +
(accepted drafts) tokens in `CostTable.step_ms(S, D, W, N)`. Acceptance is estimated from earlier steps, so nothing is
read from the device before the target runs. No torch, no clock.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import numpy as np

from app.engine.schedule.costs import CostTable, Floats

# The values below were chosen by replays of recorded acceptance (tests/exhaustive/test_policy_loads.py).
_MEMORY, _OWN_MEMORY = 0.99, 0.9
"""Weight that an outcome keeps after the next outcome of any sequence, and after the next one of the same sequence."""
_OPTIMISM, _PRIOR_DRAFTS = 0.86, 11.0
"""Acceptance before anything is known, and the drafts that weigh as much. It is high, because only drafting shows what
drafts are worth."""
_OWN_PRIOR_DRAFTS = np.array([1.0, 3.0, 20.0, 100.0])
"""Drafts of one sequence that weigh as much as the prior from all: few if texts differ, many if they are alike. Each
number is trusted as it has predicted the last outcomes."""
_TRUST = 0.5
"""Power of the likelihood that it gave them, below 1 because outcomes of one sequence depend on each other."""
_RAREST = 1e-3
"""Chances stay this far from 0 and 1, so that odds are finite."""
_WORTH_DRAFTING = 1.03
"""Expected gain below which plain decoding is kept, because its speed is known."""
_PROBE_SHARE, _PROBE_DRAFTS = 0.012, 5
"""Share of the time spent on probes of plain sequences, and the drafts that one probe verifies."""
_SURPRISE, _SURPRISING_RUN, _KEPT_AT_SURPRISE = 0.1, 0.02, 0.3
"""A probe that is accepted whole although that was less likely than the first, or a run of them less likely than the
second, shows that the text has changed. Outcomes of all sequences then keep the third as their weight."""
_MAX_STEPS, _MANY_SEQS = 16, 32
"""Steps that a decision holds for, because deciding costs host time. If some draft and one disappoints or ends it holds
for one step, and for one more with each of the second number of sequences, of which one always does."""
_DISAPPOINTING = 4
"""A sequence disappoints that keeps less than one in this many of its drafts."""


class Widths(NamedTuple):
    """Drafts to verify of each sequence, and the rows of each draft block, its anchor included."""

    drafts: list[int]
    block: int


@dataclass(slots=True)
class History:
    """One sequence: its fading outcomes, and the last decision about it.

    `expected` is the number of `tried` drafts that the prior expected to be accepted. `survival` are estimates of the
    chance that the first 0, 1, ... b - 1 drafts of a block are accepted, one list for each of `_OWN_PRIOR_DRAFTS`.
    """

    first_step: int
    survival: list[list[float]]
    tried: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0
    drafts: int = 0
    last_probe: int = -1
    is_probed: bool = False


def priors(tried: Floats, accepted: Floats) -> tuple[float, Floats]:
    """Return mean acceptance, and by position for first and later blocks of a sequence, `[2, b - 1]`.

    `tried` `[2, b - 1]` counts the drafts whose predecessors in the block were accepted, `accepted` those accepted
    themselves. Both kinds of blocks share one curve, because later positions are harder in like manner. Later blocks
    mostly begin where a draft was refused, so each kind shifts the odds of the curve.
    """
    mean = float((accepted.sum() + _PRIOR_DRAFTS * _OPTIMISM) / (tried.sum() + _PRIOR_DRAFTS))
    curve = (accepted.sum(axis=0) + _PRIOR_DRAFTS * mean) / (tried.sum(axis=0) + _PRIOR_DRAFTS)
    own = np.stack([tried.sum(axis=1), accepted.sum(axis=1), (tried * curve).sum(axis=1)], axis=1)
    return mean, shifted(np.stack((curve, curve)), own, mean, _PRIOR_DRAFTS)


def shifted(curves: Floats, own: Floats, mean: float, prior_drafts: Any) -> Floats:
    """Return curves `[S, b - 1]` with their odds scaled by each row's own outcomes `[S, 3]`: tried, accepted, expected.

    The scale is the odds of what was accepted over those of what was expected, each with `prior_drafts` at `mean`.
    With several `prior_drafts` `[W, 1, 1]` curves are `[W, S, b - 1]`.
    """
    tried, accepted, expected = own.T[..., None]
    prior = prior_drafts * mean
    scale = _odds((accepted + prior) / (tried + prior_drafts)) / _odds((expected + prior) / (tried + prior_drafts))
    odds = _odds(curves) * scale
    return np.asarray(np.minimum(np.maximum(odds / (1 + odds), _RAREST), 1 - _RAREST))


def _odds(chance: Any) -> Any:
    chance = np.minimum(np.maximum(chance, _RAREST), 1 - _RAREST)
    return chance / (1 - chance)


def best_widths(survival: Floats, costs: CostTable) -> list[int]:
    """Return the drafts to verify of each sequence for the most tokens per second over the whole batch.

    `survival` `[S, b - 1]` is 0 in a sequence that may not draft. A sequence drafts a block, of one width for all, or
    none. Of those that draft, the likeliest drafts of all are verified first.
    """
    num_seqs, num_drafts = survival.shape
    most = int((survival > 0).any(axis=1).sum())
    drafts = [0] * num_seqs
    if not most:
        return drafts
    best = _WORTH_DRAFTING * num_seqs / float(costs.step_ms(num_seqs, 0, 0, 0))
    numbers = np.array(sorted({max(1, most * i // 8) for i in range(1, 9)}))[:, None]  # of drafting sequences to try
    order = np.argsort(-survival, axis=None, kind="stable")
    seqs, places = np.divmod(order, num_drafts)
    likeliest = survival.ravel()[order]
    # Equally likely drafts are verified together, so a choice between them would cost more than its rate says.
    ends = np.flatnonzero(np.diff(likeliest, append=-1.0))
    for rows in costs.widths:
        rank = np.argsort(np.argsort(-survival[:, : rows - 1].sum(axis=1), kind="stable"))
        is_verified = (rank[seqs] < numbers) & (places < rows - 1)
        tokens = num_seqs + (is_verified * likeliest).cumsum(axis=1)[:, ends]
        rates = tokens / costs.step_ms(num_seqs, numbers, rows, is_verified.cumsum(axis=1)[:, ends])
        number, end = np.unravel_index(rates.argmax(), rates.shape)
        if rates[number, end] > best:
            verified = seqs[: ends[end] + 1][is_verified[number, : ends[end] + 1]]
            best, drafts = float(rates[number, end]), np.bincount(verified, minlength=num_seqs).tolist()
    return drafts


class Policy:
    """Chooses widths step by step.

    `width` fixes the rows to verify of every sequence, its anchor included. None is automatic with `costs` and a whole
    block without. An automatic decision holds for some steps, fewer if one that drafts disappoints or ends, and until
    a sequence comes.
    """

    def __init__(self, block_size: int, costs: CostTable | None = None, width: int | None = None) -> None:
        self.block_size = block_size
        self.costs = costs if width is None else None
        self.fixed_block = width or block_size
        self.histories: dict[Hashable, History] = {}
        self.num_decisions = 0
        self._ends = np.zeros((2, 2, block_size))  # fading counts: tried and accepted, of first and later blocks
        self._expected: list[list[float]] = []  # drafts of both kinds that the prior accepts, of 0, 1, ... tried ones
        self._surprise = [0.0] * len(_OWN_PRIOR_DRAFTS)  # of the last outcomes, under each prior
        self._decided_for: set[Hashable] = set()
        self._steps = self._decided_at = self._holds_for = 0
        probe = min(_PROBE_DRAFTS, block_size - 1)
        # Time of one probe at most is saved up, so no two follow each other.
        self._probe_ms = self._max_probe_ms = float(costs.step_ms(1, 1, probe + 1, probe)) if costs else 0.0
        self._probes_all = self._has_drafts = False
        self._whole_run = 1.0  # how likely it was that the last probes were all accepted whole

    def choose(self, wanted: Sequence[tuple[Hashable, int]]) -> Widths:
        """Return the widths of a step for (sequence, most drafts that it may verify)."""
        if self.costs is None:
            return Widths([min(limit, self.fixed_block - 1) for _, limit in wanted], self.fixed_block)
        self._steps += 1
        has_come = not self._decided_for.issuperset(sequence for sequence, _ in wanted)
        if has_come or self._steps - self._decided_at >= self._holds_for:
            self._decide(wanted, self.costs)
        histories = [self.histories[sequence] for sequence, _ in wanted]
        limits = [limit for _, limit in wanted]
        drafts = [min(history.drafts, limit) for history, limit in zip(histories, limits, strict=True)]
        block = 1 + max((history.drafts for history in histories), default=0)
        return self._probe(histories, limits, Widths(drafts, block), self.costs)

    def record_acceptance(self, sequence: Hashable, verified: int, accepted: int) -> None:
        """Learn how many of a sequence's verified drafts were accepted."""
        history = self.histories.get(sequence)
        if not verified or history is None:
            return
        kind, tried = self._kind(history), min(accepted + 1, verified)
        # If all were accepted, no draft was refused after them.
        likelihood = [row[accepted] - row[tried] * (tried > accepted) for row in history.survival]
        if history.is_probed:
            history.is_probed, self._holds_for = False, 0
            whole_run = self._whole_run * float(self._trust() @ likelihood) if accepted == verified else 1.0
            is_news = whole_run < (_SURPRISE if self._whole_run == 1.0 else _SURPRISING_RUN)
            self._whole_run = 1.0 if is_news else whole_run
            if is_news:
                history.tried = history.accepted = history.expected = 0.0
                self._surprise = [0.0] * len(_OWN_PRIOR_DRAFTS)
                self._ends *= _KEPT_AT_SURPRISE
                self._probes_all = True
        if _DISAPPOINTING * accepted < verified:
            self._shorten()
        self._surprise = [_MEMORY * old - log(new) for old, new in zip(self._surprise, likelihood, strict=True)]
        self._ends *= _MEMORY
        self._ends[(0, 1), kind, (tried, accepted)] += 1
        history.tried = _OWN_MEMORY * history.tried + tried
        history.accepted = _OWN_MEMORY * history.accepted + accepted
        history.expected = _OWN_MEMORY * history.expected + self._expected[kind][tried]

    def record_time(
        self, seqs: int, blocks: int, rows: int, drafts: int, ms: float, *, prefilled: bool = False
    ) -> None:
        """Learn that a step of `seqs` sequences, `blocks` blocks of `rows` rows and `drafts` drafts took `ms`."""
        if self.costs is not None:
            if not prefilled:
                self.costs.refine(seqs, blocks, rows, drafts, ms)
            self._probe_ms = min(self._probe_ms + _PROBE_SHARE * ms, self._max_probe_ms)

    def forget(self, sequence: Hashable) -> None:
        """Drop what is known of a sequence that has ended. What all sequences taught stays."""
        self.histories.pop(sequence, None)
        if sequence in self._decided_for:
            if self._has_drafts:
                self._shorten()
            self._decided_for.discard(sequence)

    def _shorten(self) -> None:
        """Let the decision hold no longer than where a sequence disappoints."""
        self._holds_for = min(self._holds_for, 1 + len(self._decided_for) // _MANY_SEQS)

    def _trust(self) -> Floats:
        """Return the shares `[W]` of the `_OWN_PRIOR_DRAFTS` in an estimate."""
        weights: Floats = np.exp(_TRUST * (min(self._surprise) - np.array(self._surprise)))
        return weights / weights.sum()

    def _kind(self, history: History) -> int:
        """Return 1 if the next block follows a drafted one or is a block's length into the answer, else 0."""
        return int(history.tried > 0 or self._steps - history.first_step >= self.block_size)

    def _decide(self, wanted: Sequence[tuple[Hashable, int]], costs: CostTable) -> None:
        mean, curves = priors(*self._ends[..., :0:-1].cumsum(axis=2)[..., ::-1])
        self._expected = np.pad(curves.cumsum(axis=1), ((0, 0), (1, 0))).tolist()
        histories = [self.histories.setdefault(sequence, History(self._steps, [])) for sequence, _ in wanted]
        of_kinds = curves[[self._kind(history) for history in histories]]
        own = np.array([(history.tried, history.accepted, history.expected) for history in histories]).reshape(-1, 3)
        chances = shifted(of_kinds, own, mean, _OWN_PRIOR_DRAFTS[:, None, None]).swapaxes(0, 1)
        may_draft = np.arange(self.block_size - 1) < np.array([limit for _, limit in wanted]).reshape(-1, 1)
        chosen = best_widths((self._trust() @ chances).cumprod(axis=1) * may_draft, costs)
        rows = np.pad(chances.cumprod(axis=2), ((0, 0), (0, 0), (1, 0)), constant_values=1.0).tolist()
        for history, row, drafts in zip(histories, rows, chosen, strict=True):
            history.survival, history.drafts = row, drafts
        self._decided_for = {sequence for sequence, _ in wanted}
        self._decided_at, self._holds_for, self._has_drafts = self._steps, _MAX_STEPS, any(chosen)
        self.num_decisions += 1

    def _probe(self, histories: list[History], limits: list[int], widths: Widths, costs: CostTable) -> Widths:
        """Let plain sequences draft once while saved time lasts, those first whose last probe is the longest ago.

        All of them are probed after a surprise, because what has become easy for one may have for others.
        """
        drafts, block = list(widths.drafts), widths.block
        idle = [i for i, limit in enumerate(limits) if limit and not drafts[i]]
        for i in sorted(idle, key=lambda i: histories[i].last_probe):
            if self._probe_ms <= 0 and not self._probes_all:
                break
            before = costs.step_ms(len(drafts), sum(map(bool, drafts)), block, sum(drafts))
            drafts[i] = min(limits[i], _PROBE_DRAFTS)
            block = max(block, drafts[i] + 1)
            after = costs.step_ms(len(drafts), sum(map(bool, drafts)), block, sum(drafts))
            if not self._probes_all:
                self._probe_ms -= float(after - before)
            histories[i].last_probe, histories[i].is_probed = self._steps, True
        self._probes_all = False
        return Widths(drafts, block)
