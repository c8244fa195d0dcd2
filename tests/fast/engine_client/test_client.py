"""EngineClient tells routers and readers of an engine's death, and keeps nothing of what has ended. No process is
started."""

import asyncio
import gc
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine_client.admission import Admission
from app.engine_client.client import EngineClient
from app.engine_client.request_stream import RequestStream
from app.messages import CacheEvent, Request, StepOutput, StepStats, TokenDelta
from app.metrics import Metrics

STATS = StepStats("decode", 0.01, 1, 0, 1, 16, 0)


class StandInSupervisor:
    """Supervisor of an engine that is ready, takes every command, and dies when the test says so."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(phase="ready", info=SimpleNamespace(max_num_seqs=4), reason="")

    def start(self, on_output: Any, on_death: Any) -> None:
        self.output, self.die = on_output, on_death

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


ENDS: dict[str, Callable[[EngineClient, Any, RequestStream], Any]] = {
    "finished": lambda client, supervisor, stream: supervisor.output(
        StepOutput([TokenDelta("a", [1], [], finish_reason="stop")], STATS)
    ),
    "closed": lambda client, supervisor, stream: stream.close(),
    "aborted": lambda client, supervisor, stream: client.abort("a"),
    "expired": lambda client, supervisor, stream: client.expire("a"),
    "dead": lambda client, supervisor, stream: supervisor.die("killed by SIGKILL"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_request_that_has_ended_is_kept_by_nothing_until_its_deadline(end: str):
    """A timer of an hour would keep the stream of each request that has ended since."""

    async def kept() -> tuple[Any, asyncio.TimerHandle, EngineClient]:
        supervisor = StandInSupervisor()
        client = EngineClient(supervisor, Admission(), Metrics())
        client.start()
        stream = client.submit(Request("a", [1], 5), deadline=time.monotonic() + 3600)
        timer = client._running["a"].timer
        assert timer is not None and client.admission.num_in_flight == 1
        ENDS[end](client, supervisor, stream)
        reference = weakref.ref(stream)
        stream.close()
        del stream
        gc.collect()
        return reference(), timer, client

    stream, timer, client = asyncio.run(kept())
    assert stream is None and timer.cancelled()
    assert (client.num_running, client.admission.num_in_flight, client.idle.is_set()) == (0, 0, True)
