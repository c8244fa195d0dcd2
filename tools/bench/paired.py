"""Speed ratios on a machine whose speed drifts: every round runs each variant once, and ratios are within rounds.

The ratio is the Hodges-Lehmann estimate over the rounds (Hodges and Lehmann 1963), and its 95 % interval is that of
Wilcoxon's signed ranks. Both are medians of pairwise means, so an outlier round moves them little. Rounds end when the
answer is known. This looks at the data after each round, so the interval covers slightly less than 95 %.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

MIN_ROUNDS = 6
"""The signed-rank statistic of five rounds has no interval of 95 %."""
_QUANTILE = 1.96  # of the normal distribution, at 97.5 %


@dataclass(frozen=True, slots=True)
class Ratio:
    """Estimate with its 95 % interval, which is infinite over fewer than MIN_ROUNDS rounds."""

    middle: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Return the interval's width as a share of the estimate."""
        return (self.high - self.low) / self.middle

    def at_most(self, bound: float) -> bool | None:
        """Return None if the bound lies inside the interval."""
        return False if self.low > bound else True if self.high <= bound else None

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.middle:.2f}"
        return f"{self.middle:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return ours / theirs over the same rounds. All figures are positive."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    if len(logs) < MIN_ROUNDS:
        return Ratio(math.exp(median(means)), 0.0, math.inf)
    n = len(logs)
    spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    outside = max(0, math.floor(n * (n + 1) / 4 - _QUANTILE * spread) - 1)
    return Ratio(*(math.exp(x) for x in (median(means), means[outside], means[-1 - outside])))


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim that `variant` is at least `bound` times as fast as `against`. Without a bound the ratio is measured."""

    variant: str
    against: str
    bound: float | None = None

    def verdict(self, ratio: Ratio, tight: float) -> str:
        """Return "met" or "missed", without a bound "measured", or "unsettled" if the interval is too wide to say."""
        known = ratio.width <= tight
        if self.bound is None:
            return "measured" if known else "unsettled"
        if ratio.low >= self.bound or (known and ratio.middle >= self.bound):
            return "met"
        return "missed" if ratio.high < self.bound or known else "unsettled"


@dataclass(slots=True)
class Comparison:
    """Speeds of each variant by round, with claims about them.

    A ratio is known when its interval is at most `tight` of it wide.
    """

    speeds: dict[str, list[float]]
    claims: Sequence[Claim]
    tight: float = 0.03

    def ratio(self, claim: Claim) -> Ratio:
        return ratio(self.speeds[claim.variant], self.speeds[claim.against])

    def verdict(self, claim: Claim) -> str:
        return claim.verdict(self.ratio(claim), self.tight)

    @property
    def num_rounds(self) -> int:
        return min(map(len, self.speeds.values()))

    @property
    def is_settled(self) -> bool:
        return self.num_rounds >= MIN_ROUNDS and all(self.verdict(claim) != "unsettled" for claim in self.claims)


def rounds(
    variants: Mapping[str, Callable[[], float]],
    claims: Sequence[Claim] = (),
    *,
    max_rounds: int,
    tight: float = 0.03,
    seed: int = 0,
) -> Iterator[Comparison]:
    """Yield the comparison after each round, until it is settled or `max_rounds` are over.

    A variant returns its speed, and is warm already.
    """
    order = random.Random(seed)
    comparison = Comparison({name: [] for name in variants}, claims, tight)
    names = list(variants)
    for _ in range(max_rounds):
        order.shuffle(names)
        for name in names:
            comparison.speeds[name].append(variants[name]())
        yield comparison
        if comparison.is_settled and claims:
            return
