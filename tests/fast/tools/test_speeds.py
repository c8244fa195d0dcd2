"""A refilled run serves three batches and never has more requests in flight than its concurrency."""

from types import SimpleNamespace
from typing import Any, cast

from tools.lab.floors import Load
from tools.lab.speeds import clocks, refilled


class OneAtATime:
    """Core that ends the oldest request with each step."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.in_flight: list[int] = []
        self.served: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, request: Any) -> None:
        self.waiting.append(request)

    def step(self) -> Any:
        self.in_flight.append(len(self.waiting))
        self.served.append(self.waiting.pop(0).request_id)
        going_on = [SimpleNamespace(token_ids=[1], finish_reason=None) for _ in self.waiting]
        return SimpleNamespace(deltas=[SimpleNamespace(token_ids=[1, 2], finish_reason="length"), *going_on])


def test_a_refilled_run_keeps_as_many_requests_in_flight_as_it_is_asked() -> None:
    core = OneAtATime()
    speed = refilled(cast(Any, SimpleNamespace(core=core, target=SimpleNamespace(vocab_size=9))), Load(2, 3, 4))
    assert core.in_flight == [2, 2, 2, 2, 2, 1] and len(set(core.served)) == 6 and speed > 0


def test_a_machine_without_the_vendors_tool_tells_no_clocks(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    assert clocks() is None
