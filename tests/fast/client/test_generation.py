import asyncio

import pytest

from app.client.request_stream import Generation
from app.messages import SpecStep, TokenDelta
from app.metrics import Metrics


@pytest.fixture
def left() -> list[Generation]:
    """The generations whose reader has gone."""
    return []


@pytest.fixture
def generation(left) -> Generation:
    return Generation("r", left.append, Metrics(), arrived=0.0)


def test_undelivered_deltas_become_one_that_keeps_the_step_bounds(generation):
    async def read():
        generation.put(TokenDelta("r", [1, 2], [SpecStep(2, 15, 1)], cached_tokens=16))
        generation.put(TokenDelta("r", [3], [SpecStep(1, 15, 0)]))
        generation.put(TokenDelta("r", [4], [SpecStep(1, 15, 0)], finish_reason="stop"))
        return [delta async for delta in generation]

    assert asyncio.run(read()) == [
        TokenDelta("r", [1, 2, 3, 4], [SpecStep(2, 15, 1), SpecStep(1, 15, 0), SpecStep(1, 15, 0)], 16, "stop")
    ]


def test_a_cancelled_wait_frees_the_engine(generation, left):
    async def wait():
        waiting = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    asyncio.run(wait())
    assert left == [generation]


def test_closing_twice_leaves_once(generation, left):
    generation.close()
    asyncio.run(generation.aclose())
    assert left == [generation]


def test_a_closed_generation_has_no_more_deltas(generation):
    async def read():
        generation.close()
        generation.put(TokenDelta("r", [1], []))
        return [delta async for delta in generation]

    assert asyncio.run(read()) == []


def test_several_generations_ring_one_bell_and_what_came_before_is_not_lost(generation):
    async def read():
        other = Generation("s", lambda _: None, Metrics(), arrived=0.0)
        bell = asyncio.Event()
        generation.put(TokenDelta("r", [1], []))
        generation.ring(bell)
        other.ring(bell)
        assert bell.is_set()
        first = generation.take(), other.take()
        bell.clear()
        other.put(TokenDelta("s", [2], [], finish_reason="stop"))
        assert bell.is_set()
        return [*first, generation.take(), other.take(), other.take()]

    ended = TokenDelta("s", [2], [], finish_reason="stop")
    assert asyncio.run(read()) == [TokenDelta("r", [1], []), None, None, ended, None]
