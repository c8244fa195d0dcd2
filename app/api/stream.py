"""Engine deltas to text, text to Server-Sent Events, and the client's going away to an abort."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from app.api.errors import ApiError
from app.api.protocol import Answers, Usage
from app.api.services import Services
from app.generation import Generation
from app.text.detokenizer import Detokenizer
from app.types import FinishReason

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of answer `index`; the last piece of an answer has a `finish_reason`."""

    index: int
    text: str
    finish_reason: FinishReason | None


class TextStream:
    """One answer: its Generation, decoded and cut at stop strings. A stop string's match aborts the Generation."""

    def __init__(self, index: int, generation: Generation, detokenizer: Detokenizer, services: Services) -> None:
        self.index = index
        self.cached_tokens = 0
        self._generation = generation
        self._detokenizer = detokenizer
        self._services = services

    @property
    def n_tokens(self) -> int:
        return self._detokenizer.n_tokens

    async def next(self) -> Piece:
        """The next piece, maybe with no text. Raises ApiError if the engine failed on this request."""
        delta = await anext(self._generation)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if delta.finish_reason in ("error", "abort"):
            reason = delta.error or "the request was aborted"
            if self._services.engine.state.phase != "ready":
                raise self._services.unavailable(f"The engine stopped before the answer was done: {reason}.")
            raise ApiError(500, f"The engine failed on this request: {reason}.", code="engine_error")
        text = self._detokenizer.push(delta.token_ids, delta.finish_reason)
        if self._detokenizer.finish_reason is not None:
            self._generation.close(self._detokenizer.finish_reason)
        return Piece(self.index, text, self._detokenizer.finish_reason)

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self._generation.close()


def usage_of(prompt_tokens: int, streams: Sequence[TextStream]) -> Usage:
    return Usage(prompt_tokens, sum(s.n_tokens for s in streams), sum(s.cached_tokens for s in streams))


async def collect(streams: Sequence[TextStream]) -> list[tuple[str, FinishReason]]:
    """Every answer whole. Waiting deltas coalesce, so reading one after the other costs nothing."""
    answers: list[tuple[str, FinishReason]] = []
    for stream in streams:
        texts = []
        while True:
            piece = await stream.next()
            texts.append(piece.text)
            if piece.finish_reason is not None:
                break
        answers.append(("".join(texts), piece.finish_reason))
    return answers


async def interleave(streams: Sequence[TextStream]) -> AsyncGenerator[Piece, None]:
    """Pieces of all answers as they come, each answer's in order. Closing this closes the streams."""
    waiting = {asyncio.ensure_future(stream.next()): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                piece = task.result()
                stream = waiting.pop(task)
                if piece.finish_reason is None:
                    waiting[asyncio.ensure_future(stream.next())] = stream
                yield piece
    finally:
        for task in waiting:
            task.cancel()
        for stream in streams:
            stream.close()
        await asyncio.gather(*waiting, return_exceptions=True)  # One answer's error is told; the others' are not lost.


async def events(
    streams: Sequence[TextStream], answers: Answers, prompt_tokens: int, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The Server-Sent Events of a streamed answer.

    An error before the first event is raised, so it can keep its status. A later one is sent as an error event, and
    then neither a finish_reason nor [DONE] follows: a broken answer never looks like a finished one.
    """
    opened: set[int] = set()
    sent = False
    pieces = interleave(streams)
    try:
        async for piece in pieces:
            chunks: list[dict[str, Any] | None] = []
            if piece.index not in opened:
                chunks.append(answers.opening(piece.index))
            if piece.text:
                chunks.append(answers.piece(piece.index, piece.text))
            if piece.finish_reason is not None:
                chunks.append(answers.closing(piece.index, piece.finish_reason))
            opened.add(piece.index)
            if data := b"".join(_event(chunk) for chunk in chunks if chunk is not None):
                sent = True
                yield data
        if include_usage:
            yield _event(answers.usage(usage_of(prompt_tokens, streams)))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        if not sent:
            raise
        yield _event(error.body)
    finally:
        await pieces.aclose()


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


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for data in rest:
        yield data


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
