"""The policy replayed on traces of acceptance, with planted costs: no clock and no model, so every figure is exact.

A trace says for every step of a sequence how many drafts would be accepted if all were verified.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.costs import tables
from app.engine.dflash.policy import CostTable, History, Policy, allot, survival

BLOCK = 16
STEPS = 400
WIDTHS = (1, 2, 4, 8, 16)
COSTS: dict[str, tuple[list[tuple[int, float]], list[tuple[int, float]]]] = {
    # draft ms by blocks, target ms by rows: dispatch alone, memory-bound, and a machine that pays for every row
    "flat": ([(1, 0.5), (64, 0.5)], [(1, 10.0), (1024, 10.5)]),
    "accelerator": ([(1, 2.0), (16, 2.4), (64, 4.0)], [(1, 11.0), (64, 12.0), (256, 16.0), (1024, 50.0)]),
    "cpu": ([(1, 1.4), (4, 2.6), (16, 6.0), (32, 11.5)], [(1, 2.0), (16, 3.0), (64, 5.5), (256, 15.0), (512, 29.0)]),
}
CHANCES = {"easy": 0.97, "ok": 0.85, "mid": 0.7, "hard": 0.3, "hopeless": 0.03}


def trace(kind: str, random: Random) -> list[int]:
    """`kind` is one of CHANCES, or "changing": easy and hopeless by turns of 60 steps."""
    drafts = []
    for step in range(STEPS):
        now = ("hopeless", "easy")[step // 60 % 2] if kind == "changing" else kind
        accepted = 0
        while accepted < BLOCK - 1 and random.random() < CHANCES[now]:
            accepted += 1
        drafts.append(accepted)
    return drafts


def replay(traces: Sequence[Sequence[int]], costs: str, width: int | None) -> float:
    """Tokens per millisecond."""
    true = CostTable(*COSTS[costs])
    policy = Policy(BLOCK, CostTable(*COSTS[costs]), width)
    tokens, ms = 0, 0.0
    for step in range(len(traces[0])):
        chosen = policy.drafts([(i, BLOCK - 1) for i in range(len(traces))])
        for i, drafts in enumerate(chosen):
            accepted = min(traces[i][step], drafts)
            tokens += accepted + 1
            policy.observe(i, drafts, accepted)
        took = float(true.step_ms(sum(map(bool, chosen)), len(chosen) + sum(chosen)))
        policy.took(sum(map(bool, chosen)), len(chosen) + sum(chosen), took)
        ms += took
    return tokens / ms


def compared(kinds: Sequence[str], costs: str, seed: int = 0) -> tuple[float, float, dict[int, float]]:
    """(auto, the best fixed width, all fixed widths), tokens per millisecond."""
    random = Random(seed)
    traces = [trace(kind, random) for kind in kinds]
    fixed = {width: replay(traces, costs, width) for width in WIDTHS}
    return replay(traces, costs, None), max(fixed.values()), fixed


LOADS = [["easy"], ["mid"], ["hopeless"], ["ok"] * 4, ["hard"] * 4, ["easy"] * 16, ["mid"] * 32, ["hopeless"] * 16]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("kinds", LOADS, ids=lambda kinds: f"{kinds[0]}-{len(kinds)}")
def test_on_text_of_one_kind_it_is_as_good_as_the_best_fixed_width(costs: str, kinds: list[str]) -> None:
    auto, best, _ = compared(kinds, costs)
    assert auto >= 0.97 * best


@pytest.mark.parametrize("costs", ["accelerator", "cpu"])
def test_on_a_mixed_load_it_beats_every_fixed_width(costs: str) -> None:
    auto, best, fixed = compared(["easy"] * 8 + ["hopeless"] * 8, costs)
    assert auto > best, fixed
    assert auto >= 1.05 * fixed[1] and auto >= 1.05 * fixed[BLOCK]


@pytest.mark.parametrize("costs", COSTS)
def test_text_that_has_become_easy_again_is_found(costs: str) -> None:
    """Over several loads, for when a probe comes is chance."""
    shares = []
    for seed in range(4):
        auto, _, fixed = compared(["changing"] * 4, costs, seed)
        shares.append(auto / max(fixed[1], fixed[BLOCK]))
    assert sum(shares) / len(shares) >= 0.9


def test_probing_costs_no_more_than_its_share() -> None:
    auto, _, fixed = compared(["hopeless"] * 8, "cpu")
    assert 0.96 * fixed[1] <= auto < fixed[1]


# Pure parts


def test_costs_are_linear_between_sizes_and_proportional_beyond() -> None:
    costs = CostTable([(1, 2.0), (3, 4.0)], [(2, 10.0), (4, 20.0)])
    assert costs.draft_ms([0, 1, 2, 3, 6]).tolist() == [0.0, 2.0, 3.0, 4.0, 8.0]
    assert costs.target_ms([1, 2, 3, 4, 8]).tolist() == [10.0, 10.0, 15.0, 20.0, 40.0]
    assert float(costs.step_ms(2, 3)) == 18.0


def test_serving_refines_the_costs_near_its_size() -> None:
    costs = CostTable([(1, 1.0), (64, 4.0)], [(1, 10.0), (64, 40.0)])
    for _ in range(400):
        costs.refine(1, 1, 22.0)
    assert float(costs.step_ms(1, 1)) == pytest.approx(22.0, rel=0.02)
    assert float(costs.step_ms(64, 64)) == 44.0, "a size that was not run keeps its cost"
    before = float(costs.step_ms(1, 1))
    costs.refine(1, 1, 1e6)
    assert float(costs.step_ms(1, 1)) < 1.1 * before, "a step that something held up moves little"


def test_warm_up_timings_are_split_into_draft_and_target() -> None:
    def step(seqs: int, width: int) -> float:
        return 5 + 0.5 * seqs * width + (2 + 0.25 * seqs) * (width > 1)

    costs = tables({(n, w): step(n, w) for n in (1, 2, 4, 8) for w in (1, 2, 16)}, BLOCK)
    for n in (1, 2, 4):
        assert float(costs.draft_ms(n)) == pytest.approx(2 + 0.25 * n)
    assert float(costs.target_ms(8)) == pytest.approx(9.0)
    assert float(costs.target_ms(64)) == pytest.approx(5 + 32.0)


def test_survival_falls_with_position_and_follows_what_became_of_drafts() -> None:
    history = History(4)
    assert survival(history, 0.5).tolist() == [0.5, 0.25, 0.125, 0.0625]
    for _ in range(50):
        history.add(4, 2)
    chances = survival(history, 0.5)
    assert chances[1] > 0.75 and chances[2] < 0.25
    assert (np.diff(chances) <= 0).all()


def brute(chances: list[list[float]], costs: CostTable) -> float:
    """The best rate over all numbers of drafts of every sequence."""
    best = 0.0
    sizes = [range(len(row) + 1) for row in chances]

    def search(i: int, drafts: list[int]) -> None:
        nonlocal best
        if i == len(chances):
            gain = sum(sum(row[:n]) for row, n in zip(chances, drafts, strict=True))
            ms = float(costs.step_ms(sum(map(bool, drafts)), len(drafts) + sum(drafts)))
            best = max(best, (len(drafts) + gain) / ms)
            return
        for n in sizes[i]:
            search(i + 1, [*drafts, n])

    search(0, [])
    return best


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=3),
    st.floats(0.1, 5.0),
    st.floats(0.05, 3.0),
)
def test_the_allotment_is_the_best_there_is(rows: list[list[float]], draft_ms: float, row_ms: float) -> None:
    """Against a search over everything, for few sequences."""
    chances = np.cumprod(np.array(rows), axis=1)
    costs = CostTable([(1, draft_ms), (8, draft_ms * 2)], [(1, 1.0), (32, 1.0 + 31 * row_ms)])
    found = allot(chances, costs)
    gain = sum(float(row[:n].sum()) for row, n in zip(chances, found.drafts, strict=True))
    ms = float(costs.step_ms(sum(map(bool, found.drafts)), len(rows) + sum(found.drafts)))
    assert (len(rows) + gain) / ms >= brute(chances.tolist(), costs) * (1 - 1e-9)


def test_no_more_drafts_are_verified_than_a_sequence_may() -> None:
    policy = Policy(BLOCK, CostTable(*COSTS["flat"]))
    for _ in range(20):
        chosen = policy.drafts([("a", 3), ("b", 0), ("c", 15)])
        assert chosen[0] <= 3 and chosen[1] == 0 and chosen[2] == 15
        policy.observe("c", 15, 15)
    assert policy.drafts([]) == []


@pytest.mark.parametrize(("width", "expected"), [(1, [0, 0]), (4, [3, 2]), (16, [15, 2]), (None, [15, 2])])
def test_a_fixed_width_holds_without_costs(width: int | None, expected: list[int]) -> None:
    assert Policy(BLOCK, None, width).drafts([("a", 15), ("b", 2)]) == expected


def test_what_has_ended_is_forgotten() -> None:
    policy = Policy(BLOCK, CostTable(*COSTS["cpu"]))
    for i in range(100):
        policy.drafts([(i, 15)])
        policy.observe(i, 15, 0)
        policy.took(1, 16, 5.0)
        policy.forget(i)
    assert not policy._histories and not policy._last_probe
