"""The checks of a soak can fail: each defect that they are there for is planted here, and seen."""

from typing import Any

import pytest

from tests.soak.checks import Window, complaint
from tests.soak.client import Outcome
from tests.soak.questions import CHAT, Expected, Question

QUESTION = Question("sum", CHAT)
BAD = Question("bad", CHAT, status=400)
EXPECTED = {"sum": Expected({0: "1 + 1 = 2"}, {0: "stop"}, 7)}
LOST = {"message": "the engine process was killed", "type": "server_error", "param": None, "code": "engine_loading"}
BUSY = {"message": "80 requests are in flight", "type": "rate_limit_error", "param": None, "code": "server_busy"}
LATE = {"message": "not done by its deadline", "type": "server_error", "param": None, "code": "deadline_exceeded"}
DURING, BEFORE = Window("engine", 12.0, 15.0), Window("engine", 1.0, 9.9)
BURST = Window("burst", 9.0, 13.0)


def answered(**more: Any) -> Outcome:
    """A stream from second 10 to 14 that ended well, but for `more`."""
    usual: dict[str, Any] = {
        "status": 200,
        "texts": {0: "1 + 1 = 2"},
        "reasons": {0: "stop"},
        "tokens": 7,
        "done": True,
    }
    return Outcome("stream", QUESTION, True, sent=10.0, ended=14.0, **(usual | more))


def refused(status: int, error: Any, question: Question = QUESTION, **more: Any) -> Outcome:
    return Outcome("stream", question, True, sent=10.0, ended=14.0, status=status, error=error, **more)


def broken_off(**more: Any) -> Outcome:
    return answered(**{"texts": {0: "1 + 1"}, "reasons": {}, "tokens": 0, "done": False} | more)


def found(outcome: Outcome, *windows: Window) -> str:
    return complaint(outcome, EXPECTED, windows) or ""


@pytest.mark.parametrize(
    ("outcome", "windows"),
    [
        (answered(), []),
        (broken_off(left=True), []),
        (broken_off(error=LOST), [DURING]),
        (refused(503, LOST, retry_after=True), [DURING]),
        (refused(429, BUSY, retry_after=True), [BURST]),
        (refused(400, BUSY, BAD), []),
        (refused(504, LATE, deadline=0.5), []),
        (broken_off(error=LATE, deadline=0.5), []),
        (refused(503, LOST, BAD, retry_after=True), [DURING]),
    ],
)
def test_a_right_answer_and_an_error_with_an_excuse_are_fine(outcome: Outcome, windows: list[Window]) -> None:
    assert found(outcome, *windows) == ""


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (answered(texts={0: "1 + 1 = 3"}), "wrong at character 8"),
        (answered(texts={0: "1 + 1"}), "cut short"),
        (answered(texts={0: "1 + 1 = 2", 1: "x"}), "choice 1 is wrong"),
        (answered(texts={}), "choices []"),
        (answered(reasons={0: "length"}), "finish_reason"),
        (answered(tokens=6), "6 tokens"),
        (answered(done=False), "without [DONE]"),
        (answered(error=LOST), "[DONE] after an error"),
        (broken_off(), "without"),
        (broken_off(error=LOST | {"code": "internal_error"}), "nothing excuses"),
        (broken_off(left=True, texts={0: "1 - 1"}), "alone"),
        (answered(broken="ReadTimeout"), "neither an answer nor an error"),
        (refused(503, LOST), "Retry-After"),
        (refused(429, BUSY, retry_after=True), "outside of a burst"),
        (refused(500, {"detail": "oops"}), "OpenAI's shape"),
        (refused(500, None), "OpenAI's shape"),
        (refused(400, LOST), "nothing excuses"),
        (refused(504, LATE), "before its deadline"),
        (refused(504, LATE, deadline=9.0), "before its deadline"),
        (Outcome("bad input", BAD, False, sent=10.0, ended=14.0, status=200), "bad input was taken"),
    ],
)
def test_every_other_end_is_a_complaint_also_while_the_engine_is_down(outcome: Outcome, why: str) -> None:
    assert why in found(outcome, DURING)


@pytest.mark.parametrize("outcome", [broken_off(error=LOST), refused(503, LOST, retry_after=True)])
def test_an_error_without_a_fault_in_its_time_is_a_complaint(outcome: Outcome) -> None:
    assert "while the engine was well" in found(outcome)
    assert "while the engine was well" in found(outcome, BEFORE, BURST)
