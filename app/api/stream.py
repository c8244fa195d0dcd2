"""Tokens of the engine to text, and text to Server-Sent Events."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, cast

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from app import log
from app.api.errors import AnswerWarning, ApiError, internal_error, unavailable
from app.engine_client.client import EngineClient
from app.engine_client.request_stream import RequestStream, Timeline
from app.messages import FinishReason, TokenDelta
from app.text.detokenizer import Detokenizer
from app.text.parsers import OutputParser
from app.text.parsers.base import Part, joined

KEEP_ALIVE_SECONDS = 15.0
_CHECKS_PER_KEEP_ALIVE = 5
_TOKENS_AT_ONCE = 8  # of an answer that is not streamed; more would delay the streams that are read after it

Reason = Literal["stop", "length", "tool_calls"]
T = TypeVar("T")


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@dataclass(frozen=True, slots=True)
class Piece:
    """New part of the choice `index`."""

    index: int
    parts: Sequence[Part] = ()  # in the order of the output
    num_earlier_calls: int = 0  # that began in earlier pieces
    steps: Sequence[dict[str, Any]] = ()  # if the client wants them: drafts `verified`, `accepted`, texts of `tokens`
    finish_reason: Reason | None = None  # of the last piece only
    is_first: bool = False
    stop_reason: str | int | None = None  # what ended the choice, as vLLM reports it
    matched_stop: str | int | None = None  # and as SGLang does


class Answers(Protocol):
    """Writer of one request's answer, either `whole` or as Server-Sent Events."""

    def whole(self, pieces: Sequence[Piece]) -> Mapping[str, object]:
        """Return the body of an answer. Each piece is a whole choice."""

    def begin(self) -> bytes:
        """Return the events before all pieces, or b"" if there are none."""

    def events(self, piece: Piece) -> bytes:
        """Return the events of a piece, or b"" if it has none."""

    def end(self) -> bytes:
        """Return the events after all pieces."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that breaks off."""

    def keep_alive(self) -> bytes:
        """Return what a stream sends when it has nothing to say."""


@dataclass(slots=True)
class Choice:
    """One choice: its deltas, decoded, cut at stop strings and parsed. A stop string aborts the request."""

    index: int
    deltas: RequestStream
    detokenizer: Detokenizer
    parser: OutputParser
    engine: EngineClient
    with_steps: bool = False  # split the text into steps and tokens
    eos_ids: Collection[int] = ()  # stop tokens that are the model's, not the client's
    counts: Counter[str] = field(default_factory=Counter)
    has_begun: bool = False
    num_before_content: int = 0  # tokens of the reasoning and its marks

    def take(self) -> Piece | None:
        """Return what has arrived since the last call, or None. Raises ApiError if the engine failed on the request."""
        delta = self.deltas.take()
        if delta is None:
            return None
        if self.deltas.expired:
            message = "The request was not done by its deadline (--request-timeout, X-Request-Timeout) and was ended."
            raise ApiError(504, f"{message} Its answer is incomplete.", code="deadline_exceeded")
        if delta.finish_reason in ("error", "abort"):
            reason = delta.error or "the request was aborted"
            if (phase := self.engine.state.phase) != "ready":
                raise unavailable(f"The engine stopped before the answer was done: {reason}.", f"engine_{phase}")
            raise ApiError(500, f"The engine failed on this request: {reason}.", code="engine_error")
        return self._read(delta)

    def _read(self, delta: TokenDelta) -> Piece:
        """Return the piece of a delta. Tokens after the end of the answer are not read."""
        detokenizer, parser = self.detokenizer, self.parser
        texts: list[str] = []
        parts: list[Part] = []
        token_ids: list[int] = []
        is_over = False
        for token_ids, finish in self._tokens(delta):
            is_before_content = parser.is_before_content
            text = detokenizer.push(token_ids, finish)
            parsed = parser.push(text)
            is_hidden = is_before_content and not parser.shows_reasoning
            texts.append("".join(part.text for part in parsed if part.kind == "content") if is_hidden else text)
            parts += parsed
            if is_before_content:
                self.num_before_content = detokenizer.num_tokens
            if is_over := detokenizer.finish_reason is not None or parser.has_all_calls:
                break
        reason: Reason | None = None
        if is_over:
            self.deltas.timeline.tokens = detokenizer.num_tokens  # fewer than the engine's after a stop string
            self.deltas.close(detokenizer.finish_reason or "stop")
            ended = cast(Reason, detokenizer.finish_reason or "stop")  # `take` has raised for "error" and "abort"
            parts += parser.finish(is_cut=ended == "length")
            is_called = parser.has_whole_calls and (parser.has_all_calls or ended == "stop")
            reason = "tool_calls" if is_called else ended
        is_first, self.has_begun = not self.has_begun, True
        steps = self._steps(delta, texts) if self.with_steps and delta.token_ids else ()
        num_earlier = parser.num_calls - sum(part.kind == "call" for part in parts)
        piece = Piece(self.index, joined(parts), num_earlier, steps, reason, is_first)
        if detokenizer.finish_reason != "stop":
            return piece
        matched = detokenizer.stop_string or next(reversed(token_ids), None)
        return replace(piece, matched_stop=matched, stop_reason=None if matched in self.eos_ids else matched)

    def _tokens(self, delta: TokenDelta) -> Iterator[tuple[list[int], FinishReason | None]]:
        """Yield the tokens, one by one if the text of each counts or the answer or its reasoning may end at any."""
        one_by_one = self.with_steps or self.parser.max_calls is not None or self.parser.is_before_content
        count = max(1, len(delta.token_ids))
        size = 1 if one_by_one else count
        for start in range(0, count, size):
            yield delta.token_ids[start : start + size], delta.finish_reason if start + size >= count else None

    def _steps(self, delta: TokenDelta, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the steps with the texts of their tokens, up to the last token that was read.

        Text that a stop string may hold back comes with the token that frees it. A token of hidden reasoning has no
        text.
        """
        steps = []
        left = iter(texts)
        for step in delta.steps:
            tokens = list(itertools.islice(left, step.n_tokens))
            if not tokens:
                break
            self.counts.update(steps=int(step.n_verified > 0), verified=step.n_verified, accepted=step.n_accepted)
            counts = {"verified": step.n_verified, "accepted": step.n_accepted, "ms": round(1000 * step.seconds, 3)}
            steps.append(counts | {"tokens": tokens})
        return steps


@dataclass
class Choices:
    """All choices of one request, by index. The `num_per_prompt` choices of a prompt are neighbours.

    `warnings` are for the answer. `on_close` is called once, after the end of all choices.
    """

    num_prompt_tokens: int
    num_per_prompt: int
    warnings: Sequence[AnswerWarning] = ()
    on_close: Callable[[], None] | None = None
    _choices: list[Choice] = field(default_factory=list)
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, choice: Choice) -> None:
        self._choices.append(choice)
        choice.deltas.notify(self._event)

    def close(self) -> None:
        """Abort the choices that still run. Idempotent."""
        for choice in self._choices:
            choice.deltas.close()
        usage = self.usage
        log.request.get({}).update(
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            finish_reason=",".join(line.outcome for line in self.timelines),
        )
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    @property
    def timelines(self) -> list[Timeline]:
        return [choice.deltas.timeline for choice in self._choices]

    @property
    def usage(self) -> Usage:
        """The usage so far.

        A prompt counts once, with the cached tokens of its first choice, because the other choices may hit the pages
        of that one.
        """
        num_new = sum(line.tokens for line in self.timelines)
        cached = sum(line.cached_tokens for line in self.timelines[:: self.num_per_prompt])
        reasoned = [one for one in self._choices if one.parser.reasoning.has_reasoned]
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": self.num_prompt_tokens + num_new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(one.num_before_content for one in reasoned)},
        }

    @property
    def speculation(self) -> dict[str, int]:
        """The steps that verified drafts so far, and the drafts that they verified and accepted."""
        counts = sum((choice.counts for choice in self._choices), Counter[str]())
        return {name: counts[name] for name in ("steps", "verified", "accepted")}

    async def whole(self) -> list[Piece]:
        """Return every choice as one piece, read many tokens at a time. All choices end at the error of one."""
        for choice in self._choices:
            if not choice.detokenizer.stop and choice.parser.max_calls is None:  # else it may end before the engine
                choice.deltas.notify(self._event, _TOKENS_AT_ONCE)
        parts: list[list[Piece]] = [[] for _ in self._choices]
        async with aclosing(self.pieces()) as arriving:
            async for pieces in arriving:
                for piece in pieces:
                    parts[piece.index].append(piece)
        return [replace(pieces[-1], parts=[part for piece in pieces for part in piece.parts]) for pieces in parts]

    async def pieces(self, pause: float | None = None) -> AsyncGenerator[list[Piece], None]:
        """Yield the new pieces of all choices until all have finished, and none after `pause` seconds without any.

        At its end, `close`.
        """
        num_running = len(self._choices)
        try:
            while num_running:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._event.wait()
                self._event.clear()
                pieces = [piece for choice in self._choices if (piece := choice.take()) is not None]
                num_running -= sum(piece.finish_reason is not None for piece in pieces)
                yield pieces
        finally:
            self.close()


async def events(choices: Choices, answers: Answers) -> AsyncGenerator[bytes, None]:
    """Yield the Server-Sent Events of a streamed answer.

    An error is the last event, so that a broken answer never looks complete. After KEEP_ALIVE_SECONDS without an event
    `answers.keep_alive` is sent, before the first too, because proxies close silent connections.
    """
    sent_at = time.monotonic()
    pause = KEEP_ALIVE_SECONDS / _CHECKS_PER_KEEP_ALIVE
    try:
        if opening := answers.begin():
            yield opening
        async with aclosing(choices.pieces(pause)) as arriving:
            async for pieces in arriving:
                if new := b"".join(map(answers.events, pieces)):
                    sent_at = time.monotonic()
                    yield new
                elif time.monotonic() - sent_at > KEEP_ALIVE_SECONDS - pause:
                    sent_at = time.monotonic()
                    yield answers.keep_alive()
        yield answers.end()
    except Exception as error:
        failure = error if isinstance(error, ApiError) else internal_error()
        log.request.get({}).update(code=failure.code)
        yield answers.failure(failure)
        if error is not failure:
            raise


class EventStream(StreamingResponse):
    """Server-Sent Events, whose head does not wait for the first of them.

    In any case `events` is closed and `close` is called at the end, and not by the garbage collector.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._close()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client leaves first, cancel it and raise ClientDisconnect."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
