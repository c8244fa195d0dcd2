"""Turns of connections: what arrives on one leaves the event loop to the others."""

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.api.connection import SETTINGS, Connection

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"1\r\na\r\n"
NUM_CHUNKS = 40_000
MOST_IN_A_TURN = 1500


class Reader:
    """Application that reads bodies, and remembers how much of them it has."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_done = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            self.num_bytes += len(message["body"])
            more = message["more_body"]
        self.num_done += 1
        await asyncio.Event().wait()


def connected(reader: Reader) -> tuple[Connection, Mock]:
    config = uvicorn.Config(cast(Any, reader), **SETTINGS)
    config.load()
    connection = Connection(config, ServerState(), {})
    transport = Mock(asyncio.Transport)
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    connection.connection_made(transport)
    return connection, transport


def test_tiny_chunks_of_all_connections_are_parsed_in_many_turns() -> None:
    asyncio.run(_tiny_chunks())


async def _tiny_chunks() -> None:
    reader = Reader()
    body = CHUNK * NUM_CHUNKS + b"0\r\n\r\n"
    connections = [connected(reader) for _ in range(3)]
    for connection, _ in connections:
        connection.data_received(HEAD)
    await asyncio.sleep(0)
    for connection, transport in connections:
        connection.data_received(body)
        assert transport.method_calls[-1][0] == "pause_reading", "nothing is read before all is parsed"
    most, num_seen = 0, 0
    while reader.num_done < len(connections):
        await asyncio.sleep(0)
        most, num_seen = max(most, reader.num_bytes - num_seen), reader.num_bytes
    assert reader.num_bytes == len(connections) * NUM_CHUNKS
    assert most <= (len(connections) + 1) * MOST_IN_A_TURN
    assert all(transport.method_calls[-1][0] == "resume_reading" for _, transport in connections)
    for connection, _ in connections:
        connection.connection_lost(None)


def test_a_connection_that_is_lost_leaves_its_turn_to_the_others() -> None:
    asyncio.run(_lost())


async def _lost() -> None:
    reader = Reader()
    (lost, _), (kept, _) = connections = [connected(reader) for _ in range(2)]
    for connection, _ in connections:
        connection.data_received(HEAD + CHUNK * NUM_CHUNKS)
    lost.connection_lost(None)
    kept.data_received(b"0\r\n\r\n")
    async with asyncio.timeout(20):
        while not reader.num_done:
            await asyncio.sleep(0)
    kept.connection_lost(None)
