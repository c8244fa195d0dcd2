"""Engine deltas to text, text to Server-Sent Events, and the client's going away to an abort."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from app.api.answers import Answers, Piece, Reason, Step, Usage
from app.api.errors import ApiError, deadline_exceeded, unavailable
from app.api.services import Services
from app.client.request_stream import RequestStream
from app.messages import TokenDelta
from app.text.detokenizer import Detokenizer
from app.text.parsers.qwen3 import OutputParser

KEEP_ALIVE_SECONDS = 15.0
_LOOKS = 5
"""How often in this time it is looked whether a comment is due."""

T = TypeVar("T")


class TextStream:
    """One answer: its deltas, decoded, cut at stop strings and parsed. A stop string's match aborts the request.

    `by_step` tells the text of every token, step by step, and counts `steps`. Tool calls beyond `most_calls` are
    dropped.
    """

    def __init__(
        self,
        index: int,
        deltas: RequestStream,
        detokenizer: Detokenizer,
        parser: OutputParser,
        services: Services,
        by_step: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self.index = index
        self.cached_tokens = 0
        self.steps = Counter[str]()
        self._deltas = deltas
        self._detokenizer = detokenizer
        self._parser = parser
        self._services = services
        self._by_step = by_step
        self._most_calls = most_calls
        self._calls = 0

    @property
    def n_tokens(self) -> int:
        return self._detokenizer.num_tokens

    def ring(self, bell: asyncio.Event) -> None:
        """From now on set `bell` whenever there is something to take."""
        self._deltas.notify(bell)

    def take(self) -> Piece | None:
        """What has come since the last call, maybe with no text; None if nothing has. Raises ApiError if the engine
        failed on this request."""
        delta = self._deltas.take()
        if delta is None:
            return None
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if self._deltas.expired:
            raise deadline_exceeded()
        if delta.finish_reason in ("error", "abort"):
            reason = delta.error or "the request was aborted"
            if (phase := self._services.engine.state.phase) != "ready":
                raise unavailable(f"The engine stopped before the answer was done: {reason}.", f"engine_{phase}")
            raise ApiError(500, f"The engine failed on this request: {reason}.", code="engine_error")
        steps: tuple[Step, ...] = ()
        if self._by_step and delta.token_ids:
            steps = tuple(self._steps(delta))
            text = "".join(text for step in steps for text in step.tokens)
        else:
            text = self._detokenizer.push(delta.token_ids, delta.finish_reason)
        return self._piece(text, steps)

    def _steps(self, delta: TokenDelta) -> Iterator[Step]:
        """The delta token by token. What is held back for a stop string is told with the token that frees it."""
        token_ids = iter(delta.token_ids)
        left = len(delta.token_ids)
        for step in delta.steps:
            texts: list[str] = []
            for token_id in itertools.islice(token_ids, step.n_tokens):
                left -= 1
                texts.append(self._detokenizer.push([token_id], None if left else delta.finish_reason))
                if self._detokenizer.finish_reason is not None:
                    break
            self.steps.update(steps=int(step.n_verified > 0), verified=step.n_verified, accepted=step.n_accepted)
            yield Step(step.n_verified, step.n_accepted, texts)
            if self._detokenizer.finish_reason is not None:
                return

    def _piece(self, text: str, steps: tuple[Step, ...]) -> Piece:
        parsed = self._parser.push(text)
        content, reasoning, calls = parsed.content, parsed.reasoning, parsed.tool_calls
        reason: Reason | None = self._detokenizer.finish_reason
        if reason is not None:
            self._deltas.close(self._detokenizer.finish_reason)
            rest = self._parser.finish()
            content, reasoning, calls = content + rest.content, reasoning + rest.reasoning, calls + rest.tool_calls
        first_call = self._calls
        if self._most_calls is not None:
            calls = calls[: self._most_calls - first_call]
        self._calls += len(calls)
        if reason == "stop" and self._calls:
            reason = "tool_calls"
        return Piece(self.index, content, reasoning, calls, first_call, steps, reason)

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self._deltas.close()


def usage_of(prompt_tokens: int, streams: Sequence[TextStream], choices: int) -> Usage:
    """The usage so far. A prompt counts once, however many `choices` it has; what was cached of it is what its first
    choice found, which the others may have found because of that one."""
    counts = sum((stream.steps for stream in streams), Counter[str]())
    return Usage(
        prompt_tokens,
        sum(stream.n_tokens for stream in streams),
        sum(stream.cached_tokens for stream in streams[::choices]),
        counts["steps"],
        counts["verified"],
        counts["accepted"],
    )


async def collect(streams: Sequence[TextStream]) -> list[Piece]:
    """Every answer whole. All are read as they come, so that each ends at its stop string, and all at an error."""
    pieces: dict[int, list[Piece]] = {stream.index: [] for stream in streams}
    async with aclosing(interleave(streams, asyncio.Event())) as coming:
        async for some in coming:
            for piece in some:
                pieces[piece.index].append(piece)
    return [_whole(parts) for parts in pieces.values()]


def _whole(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        pieces[0].index,
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
        finish_reason=pieces[-1].finish_reason,
    )


async def interleave(streams: Sequence[TextStream], bell: asyncio.Event) -> AsyncGenerator[list[Piece], None]:
    """What has come of all answers, again and again until all have ended; nothing, if somebody else rang the bell.
    Closing this closes the streams."""
    for stream in streams:
        stream.ring(bell)
    left = len(streams)
    try:
        while left:
            await bell.wait()
            bell.clear()
            pieces = [piece for stream in streams if (piece := stream.take()) is not None]
            left -= sum(piece.finish_reason is not None for piece in pieces)
            yield pieces
    finally:
        for stream in streams:
            stream.close()


async def events(
    streams: Sequence[TextStream], answers: Answers, prompt_tokens: int, choices: int
) -> AsyncGenerator[bytes, None]:
    """The Server-Sent Events of a streamed answer with `choices` for every prompt.

    An error before the first event is raised, so it can keep its status. A later one is sent as an error event, and
    then neither a finish_reason nor [DONE] follows: a broken answer never looks like a finished one. Where nothing is
    sent for KEEP_ALIVE_SECONDS a comment is, so that no proxy takes the connection for dead.
    """
    opened: set[int] = set()
    sent_at: float | None = None
    usage = partial(usage_of, prompt_tokens, streams, choices)
    bell = asyncio.Event()
    looking = asyncio.create_task(_ring_now_and_then(bell))
    coming = interleave(streams, bell)
    try:
        async for pieces in coming:
            chunks: list[dict[str, Any]] = []
            for piece in pieces:
                if piece.index not in opened and (opening := answers.opening(piece.index, usage)) is not None:
                    chunks.append(opening)
                chunks += answers.chunks(piece, usage)
                opened.add(piece.index)
            if chunks:
                sent_at = time.monotonic()
                yield b"".join([event(chunk) for chunk in chunks])
            elif sent_at is not None and time.monotonic() - sent_at > (1 - 1 / _LOOKS) * KEEP_ALIVE_SECONDS:
                sent_at = time.monotonic()
                yield b": keep-alive\n\n"
        if (last := answers.last(usage)) is not None:
            yield event(last)
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        if sent_at is None:
            raise
        yield event(error.body)
    finally:
        looking.cancel()
        await coming.aclose()


async def _ring_now_and_then(bell: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE_SECONDS / _LOOKS)
        bell.set()


class EventStream(StreamingResponse):
    """Server-Sent Events whose generator is closed in any case, at once and not by the garbage collector."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            _chain(first, rest),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first: then ClientDisconnect is raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    yield first
    async for data in rest:
        yield data


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
