import asyncio
import time

import pytest

from app.engine_client.request_stream import RequestStream
from app.messages import SpecStep, TokenDelta
from app.metrics import Metrics

PHASES = ("queue", "prefill", "decode")


@pytest.fixture
def left() -> list[RequestStream]:
    """Return the list that every closed stream is added to."""
    return []


@pytest.fixture
def stream(left) -> RequestStream:
    return RequestStream("r", left.append, Metrics(), arrived=0.0)


def test_undelivered_deltas_become_one_that_keeps_the_step_bounds(stream):
    async def read():
        stream.put(TokenDelta("r", [1, 2], [SpecStep(2, 15, 1)], cached_tokens=16))
        stream.put(TokenDelta("r", [3], [SpecStep(1, 15, 0)], cached_tokens=16))
        stream.put(TokenDelta("r", [4], [SpecStep(1, 15, 0)], cached_tokens=16, finish_reason="stop"))
        return [stream.take(), stream.take()]

    assert asyncio.run(read()) == [
        TokenDelta("r", [1, 2, 3, 4], [SpecStep(2, 15, 1), SpecStep(1, 15, 0), SpecStep(1, 15, 0)], 16, "stop"),
        None,
    ]


def test_an_abort_by_this_side_keeps_what_the_engine_counted(stream):
    async def read():
        stream.put(TokenDelta("r", [1, 2], [], cached_tokens=16))
        stream.put(TokenDelta("r", [], [], finish_reason="abort"))
        return stream.take().token_ids, stream.timeline.tokens, stream.timeline.cached_tokens

    assert asyncio.run(read()) == ([1, 2], 2, 16)


def test_a_reader_may_wait_for_several_tokens_or_the_end(stream):
    async def read():
        event = asyncio.Event()
        stream.notify(event, tokens=3)
        heard = []
        for token_ids, finish in [([1], None), ([2], None), ([3, 4], None), ([5], None), ([], "error")]:
            stream.put(TokenDelta("r", token_ids, [], finish_reason=finish))
            heard.append(stream.take().token_ids if event.is_set() else None)
            event.clear()
        return heard

    assert asyncio.run(read()) == [None, None, [1, 2, 3, 4], None, [5]]


def test_closing_twice_leaves_once(stream, left):
    stream.close()
    stream.close()
    assert left == [stream]


def test_a_closed_stream_has_no_more_deltas(stream):
    async def read():
        stream.close()
        stream.put(TokenDelta("r", [1], []))
        return stream.take()

    assert asyncio.run(read()) is None


def test_several_streams_set_one_event_and_what_came_before_is_not_lost(stream):
    async def read():
        other = RequestStream("s", lambda _: None, Metrics(), arrived=0.0)
        event = asyncio.Event()
        stream.put(TokenDelta("r", [1], []))
        stream.notify(event)
        other.notify(event)
        assert event.is_set()
        first = stream.take(), other.take()
        event.clear()
        other.put(TokenDelta("s", [2], [], finish_reason="stop"))
        assert event.is_set()
        return [*first, stream.take(), other.take(), other.take()]

    ended = TokenDelta("s", [2], [], finish_reason="stop")
    assert asyncio.run(read()) == [TokenDelta("r", [1], []), None, None, ended, None]


def test_the_phases_of_a_request_are_observed_when_it_ends():
    metrics = Metrics()

    async def read():
        stream = RequestStream("r", lambda _: None, metrics, arrived=time.monotonic() - 100)
        stream.timeline.begin(stream.timeline.arrived + 60)
        stream.put(TokenDelta("r", [1, 2], []))
        stream.put(TokenDelta("r", [3], [], finish_reason="stop"))
        stream.close()

    asyncio.run(read())
    found = dict(line.split(" ") for line in metrics.render().decode().splitlines() if not line.startswith("#"))
    queue, prefill, decode = (float(found[f"dflash:request_{name}_time_seconds_sum"]) for name in PHASES)
    assert queue == 60 and 40 <= prefill < 100 and 0 <= decode < 60
    assert float(found["dflash:request_generation_tokens_sum"]) == 3


def test_phases_that_a_request_did_not_reach_are_not_observed():
    metrics = Metrics()

    async def read():
        RequestStream("r", lambda _: None, metrics, arrived=0.0).close()

    asyncio.run(read())
    assert all(f"dflash:request_{name}_time_seconds_count 0.0" in metrics.render().decode() for name in PHASES)
