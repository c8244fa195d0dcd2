"""Processes that are stopped, for a while and for good: the part of test_soak.py that takes its time waiting."""

import sys

import pytest

from tests.soak.report import summary
from tests.soak.rounds import Plan, soak
from tests.soak.schema import Fuzzed

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")


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
