"""EngineClient tells routers and readers of an engine's death. No process is started."""

import asyncio
from types import SimpleNamespace
from typing import Any

from app.engine_client.admission import Admission
from app.engine_client.client import EngineClient
from app.messages import CacheEvent, Request
from app.metrics import Metrics


class StandInSupervisor:
    """Supervisor of an engine that is ready, takes every command, and dies when the test says so."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(phase="ready", info=SimpleNamespace(max_num_seqs=4), reason="")

    def start(self, on_output: Any, on_death: Any) -> None:
        self.die = on_death

    def send(self, command: Any) -> None:
        pass


class Published:
    """Publisher that keeps the events."""

    def __init__(self) -> None:
        self.events: list[CacheEvent] = []

    def start(self) -> None:
        pass

    def publish(self, events: list[CacheEvent]) -> None:
        self.events.extend(events)


def test_an_engines_death_ends_its_requests_and_tells_routers_that_no_page_is_cached():
    async def died() -> tuple[Any, list[CacheEvent], int]:
        supervisor, published = StandInSupervisor(), Published()
        client = EngineClient(supervisor, Admission(), Metrics(), published)
        client.start()
        stream = client.submit(Request("a", [1], 5))
        supervisor.die("killed by SIGKILL")
        return stream.take(), published.events, client.num_running

    delta, events, num_running = asyncio.run(died())
    assert (delta.finish_reason, delta.error, num_running) == ("error", "killed by SIGKILL", 0)
    assert events == [CacheEvent("cleared")]
