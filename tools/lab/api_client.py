"""Streaming clients that do nothing but count: so many at once, on connections of their own."""

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
    """Seconds of the clock, and of the server's CPU time; or how many of each something took."""

    clock: float
    cpu: float


class Round(NamedTuple):
    """One answer for each client: the start, the first step's arrival at all of them, the last one's, and the end.
    `events` are those between the first and the last."""

    start: Moment
    first: Moment
    last: Moment
    end: Moment
    events: int

    @property
    def streaming(self) -> Moment:
        """What all steps but the first took."""
        return Moment(self.last.clock - self.first.clock, self.last.cpu - self.first.cpu)

    @property
    def whole(self) -> Moment:
        return Moment(self.end.clock - self.start.clock, self.end.cpu - self.start.cpu)


class Clients:
    """So many clients whose answers have `tokens` tokens. `turn` is the socket that lets the engine take its next step:
    each, where it `waits`, else the second one and all others. `cpu` is the server's CPU time."""

    def __init__(
        self, port: int, turn: "zmq.Socket[bytes]", cpu: Callable[[], float], count: int, tokens: int, *, waits: bool
    ) -> None:
        self._port = port
        self._turn = turn
        self._cpu = cpu
        self._count = count
        self._tokens = tokens
        self._waits = waits

    async def run(self) -> Round:
        """Raises ServerError where an answer is not what the engine said."""
        self._arrived = self._ended = 0
        start = self._now()
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
        return Round(start, self._first, self._last, self._now(), self._arrived - self._count)

    async def _stream(self, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            before = event = b""
            while b"[DONE]" not in event:
                before, event = event, await reader.readuntil(b"\n\n")
                if b'"delta":{"content"' in event:
                    self._count_on()
                elif b'"finish_reason":"' in event:
                    self._count_off()
            found = _TOKENS.search(before)
            if found is None or int(found[1]) != self._tokens:
                raise ServerError(f"an answer of {self._tokens} tokens ended with {before.decode()}")
        except asyncio.IncompleteReadError as error:
            raise ServerError(f"an answer broke off: {error.partial.decode()}") from None
        finally:
            writer.close()

    def _count_on(self) -> None:
        """Where the engine waits for the events of a step, as it does for the first, an event is a step."""
        self._arrived += 1
        if self._arrived == self._count:
            self._first = self._now()
        if self._arrived == self._count or (self._waits and self._arrived % self._count == 0):
            self._turn.send(b"", zmq.NOBLOCK)

    def _count_off(self) -> None:
        self._ended += 1
        if self._ended == self._count:
            self._last = self._now()

    def _now(self) -> Moment:
        return Moment(time.perf_counter(), self._cpu())
