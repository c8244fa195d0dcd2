"""Some minutes of `make soak`: every kind of load and, with `make proof`, every kind of fault at least once."""

import sys

import pytest

from tests.soak.report import page, summary
from tests.soak.rounds import Plan, soak
from tests.soak.schema import Fuzzed

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")


def test_every_request_ends_rightly_and_nothing_is_left_behind() -> None:
    """Nothing of it depends on how fast this machine is: no engine is ended for being slow."""
    cycle = ("kill", "burst", "calm")
    plan = Plan(0.2, seed=1, step_timeout=600.0, workers=6, slow_tokens=200, cycle=cycle, shutdown_timeout=600.0)
    findings = soak(plan, print)
    print("\n".join(summary(findings, Fuzzed())))
    assert findings.problems == []
    assert [fault.kind for fault in findings.faults] == ["SIGKILL"]
    for kind in ("stream", "plain", "long prompt", "slow reader", "burst", "bad input", "look"):
        assert findings.ends[kind, "right"] > 0, kind
    assert findings.ends["abort", "left"] > 0
    assert findings.held["half-open socket"] > 0
    assert "All of it held" in "\n".join(page(findings, Fuzzed(), []))


@pytest.mark.slow
def test_who_is_stopped_for_a_while_loses_nothing_and_for_good_is_replaced() -> None:
    """A machine may hold an engine up by itself for ten seconds more than the pause, and that is no hang."""
    cycle = ("pause", "hang")
    plan = Plan(0.1, 2, 15.0, pause=5.0, workers=3, slow_tokens=50, cycle=cycle, shutdown_timeout=600.0)
    findings = soak(plan, print)
    print("\n".join(summary(findings, Fuzzed())))
    assert findings.problems == []
    assert [fault.kind for fault in findings.faults] == [
        "SIGSTOP for 5 s",
        "both processes stopped for 18 s",
        "SIGSTOP for good",
    ]
    assert findings.ends["stream", "right"] > 0
