"""Ratios of paired rounds: their intervals hold what they promise, and verdicts follow from them."""

import itertools
import math
import random
from collections.abc import Callable

import pytest

from tools.bench.paired import MIN_ROUNDS, Claim, Comparison, Ratio, ratio, rounds


def drifting(factor: float, noise: float, seed: int) -> Callable[[], float]:
    """Speeds of a machine whose speed wanders by half, as every variant feels it that runs in the same round."""
    rng = random.Random(seed)
    turns = itertools.count()
    return lambda: factor * (100 + 50 * math.sin(next(turns))) * math.exp(rng.gauss(0, noise))


@pytest.mark.parametrize("n", [6, 7, 10, 20])
def test_the_interval_holds_the_true_ratio_95_times_in_100(n: int) -> None:
    rng = random.Random(n)
    held = 0
    for _ in range(600):
        found = ratio([1.1 * math.exp(rng.gauss(0, 0.1)) for _ in range(n)], [1.0] * n)
        held += found.low <= 1.1 <= found.high
    assert 0.935 <= held / 600 <= 0.99


def test_over_six_rounds_the_interval_is_from_the_least_to_the_greatest_ratio() -> None:
    ratios = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    found = ratio(ratios, [1.0] * 6)
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(1.5))
    assert found.middle == pytest.approx(math.exp(0.5 * (math.log(1.2) + math.log(1.3))), rel=0.01)


def test_equal_rounds_leave_no_width() -> None:
    found = ratio([30.0] * 8, [15.0] * 8)
    assert (found.middle, found.low, found.high, found.width) == (2.0, 2.0, 2.0, 0.0)
    assert str(found) == "2.00 (2.00-2.00)"


def test_fewer_than_six_rounds_say_nothing_certain() -> None:
    found = ratio([2.0] * (MIN_ROUNDS - 1), [1.0] * (MIN_ROUNDS - 1))
    assert (found.middle, found.low, found.high) == (2.0, 0.0, math.inf)
    assert str(found) == "2.00"


def test_ratios_are_the_same_seen_from_the_other_side() -> None:
    ours, theirs = [3.0, 4.0, 5.0, 3.5, 4.5, 4.1, 3.9], [2.0, 2.1, 2.2, 2.0, 1.9, 2.3, 2.0]
    there, back = ratio(ours, theirs), ratio(theirs, ours)
    assert (back.middle, back.low, back.high) == pytest.approx((1 / there.middle, 1 / there.high, 1 / there.low))


@pytest.mark.parametrize(
    ("bound", "found", "verdict"),
    [
        (None, Ratio(2.0, 1.99, 2.01), "measured"),
        (None, Ratio(2.0, 1.5, 2.5), "unsettled"),
        (1.0, Ratio(2.0, 1.5, 2.5), "met"),
        (1.0, Ratio(1.0, 0.99, 1.01), "met"),
        (1.0, Ratio(0.99, 0.98, 1.0), "missed"),
        (1.0, Ratio(0.8, 0.7, 0.9), "missed"),
        (1.0, Ratio(1.1, 0.9, 1.3), "unsettled"),
    ],
)
def test_verdicts(bound: float | None, found: Ratio, verdict: str) -> None:
    assert Claim("a", "b", bound).verdict(found, tight=0.03) == verdict


def test_a_planted_difference_of_two_percent_is_found_through_drift() -> None:
    variants = {"old": drifting(1.0, 0.005, 1), "new": drifting(1.02, 0.005, 2)}
    *_, last = rounds(variants, [Claim("new", "old")], max_rounds=60, tight=0.01)
    found = last.ratio(last.claims[0])
    assert last.is_settled and last.num_rounds < 60
    assert 1 < found.low <= 1.02 <= found.high


def test_an_outlier_round_moves_little() -> None:
    theirs = [100.0 + k for k in range(12)]
    ours = [1.5 * speed for speed in theirs]
    ours[5] /= 10
    found = ratio(ours, theirs)
    assert found.middle == pytest.approx(1.5) and found.width < 0.03


def test_rounds_run_every_variant_once_in_an_order_that_turns() -> None:
    order: list[str] = []

    def ran(name: str) -> float:
        order.append(name)
        return 1.0 + len(order)

    *_, last = rounds({name: lambda name=name: ran(name) for name in "abc"}, max_rounds=20)
    by_round = ["".join(order[k : k + 3]) for k in range(0, 60, 3)]
    assert last.num_rounds == 20 and {"".join(sorted(turn)) for turn in by_round} == {"abc"}
    assert len(set(by_round)) > 3


def test_rounds_end_as_soon_as_all_is_known_or_when_there_have_been_enough() -> None:
    claims = [Claim("b", "a")]
    known = list(rounds({"a": lambda: 1.0, "b": lambda: 2.0}, claims, max_rounds=50))
    assert len(known) == MIN_ROUNDS and known[-1].is_settled
    wild = random.Random(3)
    unknown = list(rounds({"a": lambda: 1.0, "b": lambda: 1 + wild.random()}, claims, max_rounds=9))
    assert len(unknown) == 9 and unknown[-1].verdict(claims[0]) == "unsettled"


def test_a_comparison_without_claims_is_settled_by_its_rounds() -> None:
    assert not Comparison({"a": [1.0] * 5}, ()).is_settled
    assert Comparison({"a": [1.0] * 6}, ()).is_settled


@pytest.mark.parametrize(("bound", "is_so"), [(0.8, False), (1.0, None), (1.2, True), (1.3, True)])
def test_a_ratio_is_below_a_bound_only_if_its_whole_interval_is(bound, is_so):
    assert Ratio(1.0, 0.9, 1.2).at_most(bound) is is_so
    assert ratio([1.0] * 5, [1.0] * 5).at_most(bound) is None, "five rounds tell nothing"
