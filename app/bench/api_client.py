"""Streaming clients that do nothing but count: so many at once, on connections of their own, that go step by step."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from app.bench.client import ServerError

STOP = ("\n\n", "<end>")
"""What clients ask to stop at. It is looked for, and does not come."""
_HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Moment(NamedTuple):
    """Seconds of the clock, and of the server's CPU time."""

    clock: float
    cpu: float


class Round(NamedTuple):
    """One answer for each client: the start, the first step's arrival at all of them, the last one's, and the end."""

    start: Moment
    first: Moment
    last: Moment
    end: Moment


class Clients:
    """So many clients whose answers have `tokens` tokens in `steps` steps. `turn` is the socket that lets the engine
    take its next step, `cpu` the server's CPU time."""

    def __init__(
        self, port: int, turn: "zmq.Socket[bytes]", cpu: Callable[[], float], count: int, tokens: int, steps: int
    ) -> None:
        self._port = port
        self._turn = turn
        self._cpu = cpu
        self._count = count
        self._tokens = tokens
        self._steps = steps

    async def run(self) -> Round:
        """Raises ServerError where an answer is not what the engine said."""
        self._arrived = 0
        self._moments = [self._now()]
        said = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": self._tokens, "ignore_eos": True}
        said |= {"stop": STOP, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(said)
        request = (_HEAD.format(len(body)) + body).encode()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    group.create_task(self._stream(request))
        except* ServerError as errors:
            raise errors.exceptions[0] from None
        start, first, last = self._moments
        return Round(start, first, last, self._now())

    async def _stream(self, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            before = event = b""
            while b"[DONE]" not in event:
                before, event = event, await reader.readuntil(b"\n\n")
                if b'"delta":{"content"' in event:
                    self._count_on()
            found = _TOKENS.search(before)
            if found is None or int(found[1]) != self._tokens:
                raise ServerError(f"an answer of {self._tokens} tokens ended with {before.decode()}")
        except asyncio.IncompleteReadError as error:
            raise ServerError(f"an answer broke off: {error.partial.decode()}") from None
        finally:
            writer.close()

    def _count_on(self) -> None:
        """An event is a step, because the next step waits for the events of this one."""
        self._arrived += 1
        if self._arrived % self._count == 0:
            if self._arrived // self._count in (1, self._steps):
                self._moments.append(self._now())
            self._turn.send(b"", zmq.NOBLOCK)

    def _now(self) -> Moment:
        return Moment(time.perf_counter(), self._cpu())
