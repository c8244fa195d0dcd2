"""One request over a connection of its own, and everything that can be said of how it ended."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tests.soak.questions import SILENCE_SECONDS, Question
from tools.bench.client import Events

ENDLESS_SECONDS = 600.0
"""A server whose answer comes to no end within this hangs as one that is silent does."""
_SMALL_BUFFER = 4096


@dataclass(slots=True)
class Outcome:
    """End of a request. Moments are `time.monotonic()`.

    `deadline` is in seconds. `error` is the "error" of a body or of an event. `broken` tells how the connection failed,
    and `left` is true if the client left. `chunks` are the moments at which events with text came.
    """

    kind: str
    question: Question
    streamed: bool
    sent: float
    deadline: float | None = None
    ended: float = 0.0
    status: int = 0
    retry_after: bool = False
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    done: bool = False
    error: Any = None
    broken: str | None = None
    left: bool = False
    chunks: list[float] = field(default_factory=list)

    def take(self, event: str) -> None:
        """Book an event of a stream. Raises ValueError if it is none."""
        if self.done or self.error is not None:
            raise ValueError(f"{event[:100]!r} came after the end")
        if event == "[DONE]":
            self.done = True
            return
        chunk = msgspec.json.decode(event, type=dict[str, Any])
        self.error = chunk.get("error")
        self._book(chunk)

    def take_whole(self, body: bytes) -> None:
        """Book a body. Raises ValueError if it is no JSON object."""
        answer = msgspec.json.decode(body, type=dict[str, Any])
        self.error = answer.get("error")
        self._book(answer)

    def _book(self, answer: Mapping[str, Any]) -> None:
        if usage := answer.get("usage"):
            self.tokens = usage["completion_tokens"]
        said = False
        for choice in answer.get("choices") or ():
            index, told = choice["index"], choice.get("delta") or choice.get("message") or choice
            if index in self.reasons:
                raise ValueError(f"choice {index} went on after its end")
            text = told.get("content") or told.get("text") or ""
            said = said or bool(text)
            self.texts[index] = self.texts.get(index, "") + text
            if reason := choice.get("finish_reason"):
                self.reasons[index] = reason
        if said:
            self.chunks.append(time.monotonic())


@asynccontextmanager
async def connecting(url: str, *, small_buffer: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    """New connections, as many as wanted; with a `small_buffer` the server soon feels how slowly they are read."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)] if small_buffer else None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(verify=False, limits=limits, socket_options=options)
    async with httpx.AsyncClient(transport=transport, base_url=url, timeout=SILENCE_SECONDS) as http:
        yield http


async def ask(
    http: httpx.AsyncClient,
    kind: str,
    question: Question,
    *,
    stream: bool = False,
    speculate: bool = True,
    deadline: float | None = None,
    leave_after: float | None = None,
    pause: float = 0.0,
) -> Outcome:
    """Ask and see how it ends; nothing is raised. `leave_after` seconds the client goes away; it waits `pause` seconds
    before each read."""
    outcome = Outcome(kind, question, stream, time.monotonic(), deadline)
    headers = {} if deadline is None else {"X-Request-Timeout": f"{deadline:g}"}
    body = dict(question.body)
    if question.status == 200:
        body |= {"speculate": speculate, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True, "include_speculation": pause > 0}
    content = msgspec.json.encode(body) if question.raw is None else question.raw
    try:
        async with (
            asyncio.timeout(ENDLESS_SECONDS if leave_after is None else leave_after),
            http.stream(question.method, question.path, content=content or None, headers=headers) as response,
        ):
            await _read(outcome, response, pause)
    except TimeoutError:
        if leave_after is None:
            outcome.broken = f"no end within {ENDLESS_SECONDS:g} s"
        else:
            outcome.left = True
    except httpx.HTTPError as error:
        outcome.broken = f"{type(error).__name__}: {error}".rstrip(": ")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        outcome.broken = f"what came is no answer: {type(error).__name__}: {error}"
    outcome.ended = time.monotonic()
    return outcome


async def _read(outcome: Outcome, response: httpx.Response, pause: float) -> None:
    outcome.status = response.status_code
    outcome.retry_after = response.headers.get("retry-after", "").isdecimal()
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        whole = await response.aread()
        if outcome.question.method != "GET" or outcome.status != 200:
            outcome.take_whole(whole)
        return
    events = Events()
    async for received in response.aiter_raw():
        for event in events.feed(received):
            outcome.take(event)
        await asyncio.sleep(pause)
