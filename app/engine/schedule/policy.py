"""How many drafts a step verifies of each sequence, and how wide draft blocks are.

Verification emits the target's own tokens whatever is decided here, so this changes speed only.

- Estimated: the chance that the first k drafts of a block are accepted, from outcomes of earlier steps (`Acceptance`).
- Maximised: tokens per millisecond of the whole batch (`best_widths`). A step of S sequences that verifies N drafts out
  of D blocks of W rows emits S + (accepted drafts) tokens in `CostTable.step_ms(S, D, W, N)`.
- Decided again: if a sequence comes, ends or disappoints, after a probe, and at least every 16 steps (`Policy`).

Nothing is read from the device before the target runs. No torch, no clock.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from app.engine.schedule.costs import CostTable, Floats

# Chosen by replays of recorded acceptance (tests/exhaustive/test_policy_loads.py).
_MEMORY = 0.99  # weight that an outcome keeps after the next outcome of any sequence
_OWN_MEMORY = 0.9  # and after the next outcome of the same sequence
_OPTIMISM = 0.86  # acceptance before anything is known: high, because only drafting shows what drafts are worth
_PRIOR_DRAFTS = 11.0  # drafts that weigh as much as this optimism
_OWN_PRIOR_DRAFTS = np.array([1.0, 3.0, 20.0, 100.0])  # of one sequence, that weigh as much as those of all
_TRUST = 0.5  # power of the likelihood of outcomes, below 1 because those of one sequence depend on each other
_RAREST = 1e-3  # chances stay this far from 0 and 1, so that odds are finite
_WORTH_DRAFTING = 1.03  # gain below which plain decoding is kept, because its speed is known
_PROBE_SHARE = 0.012  # share of the time that is spent on probes of plain sequences
_PROBE_DRAFTS = 5  # drafts that a probe verifies
_SURPRISE = 0.1  # chance of a wholly accepted probe, below which the text has changed
_SURPRISING_RUN = 0.02  # the same of a run of them
_KEPT_AT_SURPRISE = 0.3  # weight that outcomes of all sequences keep then
_MAX_STEPS = 16  # steps that a decision holds for, because deciding costs host time
_MANY_SEQS = 32  # a decision holds one step longer for each 32 sequences: of many, one always disappoints
_DISAPPOINTING = 4  # a sequence disappoints if it keeps less than one in four of its drafts


class Widths(NamedTuple):
    """Drafts to verify of each sequence, and the rows of each draft block, its anchor included."""

    drafts: list[int]
    block: int


@dataclass(slots=True)
class History:
    """One sequence: its outcomes, which fade, and the last decision about it."""

    first_step: int
    tried: float = 0.0  # drafts whose predecessors in the block were accepted
    accepted: float = 0.0
    expected: float = 0.0  # accepted drafts that the curve of all sequences predicted for them
    survival: list[list[float]] = field(default_factory=list)  # `[P, b]`, see `Acceptance.survival`
    drafts: int = 0
    last_probe: int = -1
    is_probed: bool = False


class Acceptance:
    """Chances of drafts: a curve by position from all sequences, whose odds each sequence's own outcomes scale.

    How much an outcome of one sequence says about it depends on how much texts differ. So each of P `_OWN_PRIOR_DRAFTS`
    has its estimate, weighted by how well it has predicted the last outcomes.
    """

    def __init__(self, block_size: int) -> None:
        self._outcomes = np.zeros((2, 2, block_size))  # of first and later blocks: so many drafts tried, and accepted
        self._expected: list[list[float]] = []  # of first and later blocks: accepted drafts of 0, 1, ... tried
        self._surprise = np.zeros(len(_OWN_PRIOR_DRAFTS))  # minus the log-likelihood of the last outcomes

    def survival(self, histories: Sequence[History], kinds: Sequence[int]) -> Floats:
        """Return the chances `[S, b - 1]` that the first 1, 2, ... b - 1 drafts of a block are accepted.

        Each history keeps the P estimates that these are a mean of.
        """
        mean, curves = priors(*self._outcomes[..., :0:-1].cumsum(axis=2)[..., ::-1])  # of at least so many drafts
        self._expected = np.pad(curves.cumsum(axis=1), ((0, 0), (1, 0))).tolist()
        own = np.array([(history.tried, history.accepted, history.expected) for history in histories]).reshape(-1, 3)
        chances = shifted(curves[kinds], own, mean, _OWN_PRIOR_DRAFTS[:, None, None]).swapaxes(0, 1)
        rows = np.pad(chances.cumprod(axis=2), ((0, 0), (0, 0), (1, 0)), constant_values=1.0).tolist()
        for history, survival in zip(histories, rows, strict=True):
            history.survival = survival
        return (self._trust() @ chances).cumprod(axis=1)

    def likelihood(self, history: History, verified: int, accepted: int) -> Floats:
        """Return the chances `[P]` that exactly `accepted` of a block's `verified` drafts are accepted."""
        tried = min(accepted + 1, verified)  # if all were accepted, no draft was rejected after them
        return np.array([row[accepted] - row[tried] * (tried > accepted) for row in history.survival])

    def chance(self, history: History, verified: int, accepted: int) -> float:
        return float(self._trust() @ self.likelihood(history, verified, accepted))

    def learn(self, history: History, kind: int, verified: int, accepted: int) -> None:
        tried = min(accepted + 1, verified)
        self._surprise = _MEMORY * self._surprise - np.log(self.likelihood(history, verified, accepted))
        self._outcomes *= _MEMORY
        self._outcomes[(0, 1), kind, (tried, accepted)] += 1
        history.tried = _OWN_MEMORY * history.tried + tried
        history.accepted = _OWN_MEMORY * history.accepted + accepted
        history.expected = _OWN_MEMORY * history.expected + self._expected[kind][tried]

    def doubt(self, history: History) -> None:
        """Forget what a sequence was like, and most of what all were: the text has changed."""
        history.tried = history.accepted = history.expected = 0.0
        self._surprise[:] = 0.0
        self._outcomes *= _KEPT_AT_SURPRISE

    def _trust(self) -> Floats:
        """Return the weights `[P]` of the estimates."""
        weights: Floats = np.exp(_TRUST * (self._surprise.min() - self._surprise))
        return weights / weights.sum()


def priors(tried: Floats, accepted: Floats) -> tuple[float, Floats]:
    """Return mean acceptance, and by position for first and later blocks of a sequence, `[2, b - 1]`.

    `tried` `[2, b - 1]` counts the drafts whose predecessors in the block were accepted, `accepted` those accepted
    themselves. Both kinds of blocks share one curve, because later positions are harder in like manner. Later blocks
    mostly begin where a draft was rejected, so each kind shifts the odds of the curve.
    """
    mean = float((accepted.sum() + _PRIOR_DRAFTS * _OPTIMISM) / (tried.sum() + _PRIOR_DRAFTS))
    curve = (accepted.sum(axis=0) + _PRIOR_DRAFTS * mean) / (tried.sum(axis=0) + _PRIOR_DRAFTS)
    own = np.stack([tried.sum(axis=1), accepted.sum(axis=1), (tried * curve).sum(axis=1)], axis=1)
    return mean, shifted(np.stack((curve, curve)), own, mean, _PRIOR_DRAFTS)


def shifted(curves: Floats, own: Floats, mean: float, prior_drafts: Any) -> Floats:
    """Return curves `[S, b - 1]` with their odds scaled by each row's own outcomes `[S, 3]`: tried, accepted, expected.

    The scale is the odds of what was accepted over those of what was expected, each with `prior_drafts` at `mean`.
    With several `prior_drafts` `[P, 1, 1]` curves are `[P, S, b - 1]`.
    """
    tried, accepted, expected = own.T[..., None]
    prior = prior_drafts * mean
    scale = _odds((accepted + prior) / (tried + prior_drafts)) / _odds((expected + prior) / (tried + prior_drafts))
    odds = _odds(curves) * scale
    return np.asarray((odds / (1 + odds)).clip(_RAREST, 1 - _RAREST))


def _odds(chance: Floats) -> Floats:
    chance = chance.clip(_RAREST, 1 - _RAREST)
    return chance / (1 - chance)


def best_widths(survival: Floats, costs: CostTable) -> list[int]:
    """Return the drafts to verify of each sequence for the most tokens per millisecond of the whole batch.

    `survival` `[S, b - 1]` is 0 in a sequence that may not draft. A sequence drafts a block, of one width for all, or
    none. Of those that draft, the likeliest drafts of all are verified first.
    """
    num_seqs, num_drafts = survival.shape
    drafts, may_draft = [0] * num_seqs, int(survival.any(axis=1).sum())
    if not may_draft:
        return drafts
    best = _WORTH_DRAFTING * num_seqs / float(costs.step_ms(num_seqs, 0, 0, 0))
    numbers = np.array(sorted({max(1, may_draft * i // 8) for i in range(1, 9)}))[:, None]  # drafting sequences to try
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
    block without.
    """

    def __init__(self, block_size: int, costs: CostTable | None = None, width: int | None = None) -> None:
        self.block_size = block_size
        self.costs = costs if width is None else None
        self.fixed_block = width or block_size
        self.histories: dict[Hashable, History] = {}
        self._acceptance = Acceptance(block_size)
        self._decided_for: set[Hashable] = set()  # sequences of the last decision
        self._step = self._decided_at = self._decide_at = 0
        probe = min(_PROBE_DRAFTS, block_size - 1)
        # Time of one probe at most is saved up, so no two follow each other.
        self._probe_ms = self._max_probe_ms = float(costs.step_ms(1, 1, probe + 1, probe)) if costs else 0.0
        self._run_of_probes = 1.0  # how likely it was that the last probes were all accepted whole

    def choose(self, wanted: Sequence[tuple[Hashable, int]]) -> Widths:
        """Return the widths of a step for (sequence, most drafts that it may verify)."""
        limits = [limit for _, limit in wanted]
        if self.costs is None:
            return Widths([min(limit, self.fixed_block - 1) for limit in limits], self.fixed_block)
        self._step += 1
        has_come = not self._decided_for.issuperset(sequence for sequence, _ in wanted)
        if has_come or self._step >= self._decide_at:
            self._decide(wanted, self.costs)
        histories = [self.histories[sequence] for sequence, _ in wanted]
        drafts = [min(history.drafts, limit) for history, limit in zip(histories, limits, strict=True)]
        self._probe(histories, limits, drafts, self.costs)
        return Widths(drafts, 1 + max(drafts, default=0))

    def record_acceptance(self, sequence: Hashable, verified: int, accepted: int) -> None:
        """Learn how many of a sequence's verified drafts were accepted."""
        history = self.histories.get(sequence)
        if not verified or history is None:
            return
        kind = self._kind(history)
        if history.is_probed:
            history.is_probed, self._decide_at = False, 0
            least = _SURPRISE if self._run_of_probes == 1.0 else _SURPRISING_RUN
            self._run_of_probes *= self._acceptance.chance(history, verified, accepted)
            is_news = accepted == verified and self._run_of_probes < least
            if is_news:
                self._acceptance.doubt(history)
            if is_news or accepted < verified:
                self._run_of_probes = 1.0
        if _DISAPPOINTING * accepted < verified:
            self._decide_soon()
        self._acceptance.learn(history, kind, verified, accepted)

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
        history = self.histories.pop(sequence, None)
        self._decided_for.discard(sequence)
        if history and history.drafts:
            self._decide_soon()

    def _kind(self, history: History) -> int:
        """Return 1 if the next block follows a drafted one or is a block's length into the answer, else 0."""
        return int(history.tried > 0 or self._step - history.first_step >= self.block_size)

    def _decide(self, wanted: Sequence[tuple[Hashable, int]], costs: CostTable) -> None:
        histories = [self.histories.setdefault(sequence, History(self._step)) for sequence, _ in wanted]
        survival = self._acceptance.survival(histories, [self._kind(history) for history in histories])
        limits = np.array([limit for _, limit in wanted]).reshape(-1, 1)
        chosen = best_widths(survival * (np.arange(self.block_size - 1) < limits), costs)
        for history, drafts in zip(histories, chosen, strict=True):
            history.drafts = drafts
        self._decided_for = {sequence for sequence, _ in wanted}
        self._decided_at, self._decide_at = self._step, self._step + _MAX_STEPS

    def _decide_soon(self) -> None:
        """Decide again as soon as a sequence disappoints. Of many one always does, so a decision holds longer."""
        self._decide_at = min(self._decide_at, self._decided_at + 1 + len(self._decided_for) // _MANY_SEQS)

    def _probe(self, histories: list[History], limits: list[int], drafts: list[int], costs: CostTable) -> None:
        """Have plain sequences draft once while saved time lasts, those first whose last probe is the longest ago."""
        idle = [i for i, limit in enumerate(limits) if limit and not drafts[i]] if self._probe_ms > 0 else []
        for i in sorted(idle, key=lambda i: histories[i].last_probe):
            before = _step_ms(drafts, costs)
            drafts[i] = min(limits[i], _PROBE_DRAFTS)
            self._probe_ms -= _step_ms(drafts, costs) - before
            histories[i].last_probe, histories[i].is_probed = self._step, True
            if self._probe_ms <= 0:
                break


def _step_ms(drafts: list[int], costs: CostTable) -> float:
    return float(costs.step_ms(len(drafts), sum(map(bool, drafts)), 1 + max(drafts), sum(drafts)))
