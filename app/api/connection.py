"""One client's connection: uvicorn's, with a time limit on everything that a client can delay."""

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.api.errors import ApiError
from app.api.middleware import MAX_HEAD_BYTES, head_too_large

HEAD_SECONDS = 10.0
STALLED_SECONDS = 120.0
_KEEP_ALIVE_SECONDS = 75  # More than the 60 s of most proxies: the side that closes first may lose a request.
_BYTES_AT_ONCE = 2**13  # that are parsed in a turn of the event loop: 1,365 chunks of a byte, about 2 ms

_TURNS: "WeakKeyDictionary[asyncio.AbstractEventLoop, deque[Connection]]" = WeakKeyDictionary()
"""The connections of a loop that wait for their turn to parse."""


class Connection(H11Protocol):
    """A connection that is closed if a head is not complete after HEAD_SECONDS.

    What arrives is parsed in pieces, one of all connections in each turn of the event loop: the transport reads up to
    8 MiB in a turn, which as chunks of one byte takes the parser seconds.

    body.py limits the time of bodies, and `set_stall_timeout` the time of clients that do not read. The parser is h11,
    because httptools loses the bodies of clients that offer h2c, like Java's, and chunks answers to HTTP/1.0.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unparsed = bytearray()
        self._waits = False  # for its turn
        self._turns = _TURNS.setdefault(self.loop, deque())
        self.flow = _Flow(transport, self._go_on)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if not self._waits and not self.flow.read_paused:
            self._parse()

    def _parse(self) -> None:
        piece = bytes(self._unparsed[:_BYTES_AT_ONCE])
        del self._unparsed[:_BYTES_AT_ONCE]
        super().data_received(piece)
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()
        else:
            self._stop_timer()
        self._go_on()

    def _go_on(self) -> None:
        """Wait for the next turn to parse what is left, and read nothing until then. With nothing left, read."""
        if self.flow.read_paused or self.transport.is_closing():
            return
        if not self._unparsed:
            self.transport.resume_reading()
            return
        self.transport.pause_reading()
        if not self._waits:
            self._waits = True
            self._turns.append(self)
            if len(self._turns) == 1:
                self.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Parse a piece of the connection that has waited longest, maybe another one than this."""
        first = self._turns.popleft()
        if self._turns:
            self.loop.call_soon(self._take_turn)
        first._waits = False
        if first._unparsed:
            first._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self._unparsed.clear()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP in OpenAI's shape. uvicorn calls this while it handles h11's exception."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = sys.exc_info()[1]
            too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
            answer = head_too_large() if too_large else ApiError(400, msg, code="invalid_http")
            response = answer.response()
            response.headers["Connection"] = "close"
            head = h11.Response(status_code=response.status_code, headers=response.raw_headers)
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an offer to upgrade, which HTTP allows."""


class _Flow(FlowControl):
    """Flow control that calls `resumed` when reading may go on."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resumed = resumed

    def resume_reading(self) -> None:
        super().resume_reading()
        self._resumed()


SETTINGS: dict[str, Any] = {
    "http": Connection,
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
    "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
}
"""Keyword arguments of uvicorn.Config."""


def set_stall_timeout(listener: socket.socket) -> None:
    """Make the kernel close connections whose client reads nothing for STALLED_SECONDS. Linux only."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALLED_SECONDS))
