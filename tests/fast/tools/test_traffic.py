"""The model of traffic that refills."""

from tools.lab import traffic
from tools.report.roofline import CHIPS, H200


def test_waits_and_draws_cost_speed_and_no_way_is_above_its_floor() -> None:
    for chip in (H200, CHIPS["Ascend910B3"]):
        for sampled in (False, True):
            floor = traffic.speed(chip, sampled=sampled, overlaps=True, is_floor=True)
            ahead, behind = (traffic.speed(chip, sampled=sampled, overlaps=overlaps) for overlaps in (True, False))
            assert floor > ahead > behind
        assert traffic.speed(chip, sampled=False, overlaps=True) > traffic.speed(chip, sampled=True, overlaps=True)


def test_greedy_requests_have_what_an_h200_measured() -> None:
    """11,760 tok/s, with prompts and answers of other lengths (docs/results/h200.md)."""
    assert abs(traffic.speed(H200, sampled=False, overlaps=True) / 11_760 - 1) < 0.1
