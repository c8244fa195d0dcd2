"""Runs of requests without a server: how many are in flight, and what the steps of a run say."""

from typing import Any, cast

import pytest

from app.messages import SpecStep, StepOutput, StepStats, TokenDelta
from tools.lab.in_process import random_requests, run
from tools.report.speeds import clocks


class OneAtATime:
    """Core that ends the oldest request with each step."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.in_flight: list[int] = []
        self.served: list[str] = []

    def add(self, request: Any) -> None:
        self.waiting.append(request)

    def step(self) -> StepOutput:
        self.in_flight.append(len(self.waiting))
        ended = self.waiting.pop(0).request_id
        self.served.append(ended)
        going_on = [TokenDelta(request.request_id, [1], []) for request in self.waiting]
        stats = StepStats("mixed", 0.01, 2, 0, 0, 0, 0)
        return StepOutput([TokenDelta(ended, [1, 2], [], finish_reason="length"), *going_on], stats)


def test_a_request_that_ends_makes_room_for_the_next_and_no_more_are_in_flight_than_asked() -> None:
    core = OneAtATime()
    found = run(cast(Any, core), random_requests(6, 3, 4, 9), 2)
    assert core.in_flight == [2, 2, 2, 2, 2, 1] and len(set(core.served)) == 6
    assert found.tokens == 6 * 2 + 5 and found.speed == found.tokens / found.seconds
    assert found.steady_speed is found.step_ms is found.steady_length is None, "none decoded alone"


class TwoSequences:
    """Core of two sequences: a prompt of 1 s, and then steps of 10 ms."""

    def __init__(self, steps: int, error: str | None = None) -> None:
        self._left, self._error = steps, error
        self._prefilled = False

    def add(self, request: Any) -> None:
        return

    def step(self) -> StepOutput:
        if not self._prefilled:
            self._prefilled = True
            deltas = [TokenDelta("a", [1, 2], []), TokenDelta("b", [1], [])]
            return StepOutput(deltas, StepStats("prefill", 1.0, 2, 0, 0, 0, 0))
        self._left -= 1
        spec, end = [SpecStep(1, n_verified=3, n_accepted=1)], None if self._left else "length"
        deltas = [
            TokenDelta("a", [1, 2], spec, finish_reason=end),
            TokenDelta("b", [1], spec, finish_reason=end, error=self._error),
        ]
        return StepOutput(deltas, StepStats("decode", 0.01, 2, 0, 0, 0, 0, num_decoding=2))


def test_a_run_tells_its_decode_steps_the_acceptance_and_the_prompts() -> None:
    found = run(cast(Any, TwoSequences(3)), random_requests(2, 4, 8, 9), 2)
    assert found.tokens == 12 and found.decode_tokens == 9 and found.steady_length == 1.5
    assert found.decode_rows == {8: 3} and found.decode_ms == [10.0] * 3 and found.step_ms == 10.0
    assert found.steady_speed == pytest.approx(300) and found.prefill_seconds == 1.0
    assert found.kinds == {"prefill", "decode"} and found.texts["b"] == [1] * 4
    assert found.accepted == [("a", 1), ("b", 1)] * 3 and found.acceptance_length == 2
    assert found.acceptance_length_of(["c"]) == 1, "none of its drafts was verified"


def test_a_run_in_which_a_request_fails_has_no_speed() -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        run(cast(Any, TwoSequences(1, error="out of luck")), random_requests(2, 4, 8, 9), 2)


def test_a_machine_without_the_vendors_tool_tells_no_clocks(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    assert clocks() is None
