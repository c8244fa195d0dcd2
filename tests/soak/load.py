"""Clients of every kind, the good and the bad, each asking again as soon as it has its answer."""

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from tests.soak.checks import Window
from tests.soak.client import Outcome, ask, connecting
from tests.soak.questions import Catalogue

BURST = 256
KINDS = {"stream": 8, "plain": 4, "abort": 3, "deadline": 1, "bad input": 3, "long prompt": 1, "look": 1}
"""Weights of the usual clients' questions."""
_LONGEST_STAY = 0.6
_READ_PAUSE = 0.03
_AFTER_AN_ERROR = 0.3
_HALF_OPEN = (
    b"",
    b"POST /v1/chat/comp",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nContent-Type: applic",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"GET /metrics HTTP/1.1\r\nHost: soak\r\n\r\n",
)


@dataclass
class Load:
    """All clients. `outcomes` is how the requests of this round ended, `held` how many half-open sockets there were.

    `due` is what the usual clients ask before they ask at random: every kind once, however short a round is.
    """

    url: str
    asked: Catalogue
    rng: random.Random
    workers: int
    outcomes: list[Outcome] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    held: Counter[str] = field(default_factory=Counter)
    due: list[str] = field(default_factory=lambda: list(KINDS))

    async def run(self, enough: asyncio.Event) -> None:
        """Until it is enough, and everybody has an answer."""
        async with (
            connecting(self.url) as http,
            connecting(self.url, small_buffer=True) as slow,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(self.workers):
                clients.create_task(self._usual(http, enough))
            clients.create_task(self._slow_reader(slow, enough))
            clients.create_task(self._half_open(enough))

    async def _usual(self, http: httpx.AsyncClient, enough: asyncio.Event) -> None:
        while self.due or not enough.is_set():
            kind = self.due.pop() if self.due else self.rng.choices(list(KINDS), list(KINDS.values()))[0]
            await self._book(await self._one(http, kind))

    async def _book(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.status >= 429 or outcome.broken is not None:
            await asyncio.sleep(_AFTER_AN_ERROR)

    async def _one(self, http: httpx.AsyncClient, kind: str) -> Outcome:
        rng = self.rng
        stream, speculate = rng.random() < 0.7, rng.random() < 0.8
        anything = [*self.asked.short, *self.asked.long, self.asked.slow]
        match kind:
            case "bad input":
                return await ask(http, kind, rng.choice(self.asked.bad))
            case "look":
                return await ask(http, kind, rng.choice(self.asked.looks))
            case "long prompt":
                return await ask(http, kind, rng.choice(self.asked.long), stream=stream, speculate=speculate)
            case "abort":
                stay = rng.uniform(0, _LONGEST_STAY)
                return await ask(http, kind, rng.choice(anything), stream=stream, speculate=speculate, leave_after=stay)
            case "deadline":
                return await ask(http, kind, rng.choice(anything), stream=stream, deadline=rng.uniform(0.01, 1))
        return await ask(http, kind, rng.choice(self.asked.short), stream=kind == "stream", speculate=speculate)

    async def _slow_reader(self, http: httpx.AsyncClient, enough: asyncio.Event) -> None:
        while not enough.is_set():
            await self._book(await ask(http, "slow reader", self.asked.slow, stream=True, pause=_READ_PAUSE))

    async def _half_open(self, enough: asyncio.Event) -> None:
        """Open clients that send a part of a request, or read nothing of their answer, and vanish."""
        address = urlsplit(self.url)
        while not enough.is_set():
            writers = []
            with contextlib.suppress(ConnectionError):  # Without a server the others say so.
                for start in self.rng.choices(_HALF_OPEN, k=6):
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                    writer.write(start)
                    writers.append(writer)
            self.held["half-open socket"] += len(writers)
            await asyncio.wait({asyncio.create_task(enough.wait())}, timeout=self.rng.uniform(0.5, 3))
            for writer in writers:
                _vanish(writer)

    async def burst(self) -> None:
        """BURST connections at once. 429 is a right answer to those that are too many while it lasts."""
        began = time.monotonic()
        async with connecting(self.url) as http:
            everybody = (
                ask(http, "burst", self.rng.choice(self.asked.short), stream=self.rng.random() < 0.7)
                for _ in range(BURST)
            )
            self.outcomes += await asyncio.gather(*everybody)
        self.windows.append(Window("burst", began, time.monotonic()))


def _vanish(writer: asyncio.StreamWriter) -> None:
    """Reset the connection, like a host that has lost power and come back."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
