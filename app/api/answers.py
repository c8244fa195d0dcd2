"""The answers, in OpenAI's shapes."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from fastapi import Response

from app.api.schemas import StreamOptions
from app.messages import FinishReason
from app.text.parsers import ToolCall

Reason = FinishReason | Literal["tool_calls"]


class Step(NamedTuple):
    """One engine step of an answer: drafts verified and accepted, and its tokens' texts in order."""

    verified: int
    accepted: int
    tokens: list[str]

    def body(self) -> dict[str, Any]:
        return {"verified": self.verified, "accepted": self.accepted, "tokens": self.tokens}


class Piece(msgspec.Struct, frozen=True):
    """What is new of answer `index`, or all of it; the last piece of an answer has a `finish_reason`.

    `first_call` is the number of tool calls before. `steps` is empty unless the client wants to see speculation.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    first_call: int = 0
    steps: tuple[Step, ...] = ()
    finish_reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached` of the prompt were found in the prefix cache. `steps` verified drafts, of which
    `accepted` of `verified` were kept; they are told only if the client wants to see speculation."""

    prompt: int
    completion: int
    cached: int = 0
    steps: int = 0
    verified: int = 0
    accepted: int = 0

    def body(self, with_speculation: bool = False) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if with_speculation:
            body["speculation"] = {"steps": self.steps, "verified": self.verified, "accepted": self.accepted}
        return body


UsageSoFar = Callable[[], Usage]


class _Answers:
    """One request's answers: `whole` at once, or as chunks, of which `opening` is an answer's first. The usage so far
    is asked for only where a chunk tells it."""

    def __init__(self, kind: str, chunk_kind: str, prefix: str, model: str, options: StreamOptions | None) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._options = options or StreamOptions()
        head = {"id": self.id, "created": int(time.time()), "model": model}
        self._head = head | {"object": kind}
        self._chunk_head = head | {"object": chunk_kind}

    def last(self, usage: UsageSoFar) -> dict[str, Any] | None:
        """The chunk after all answers, if the client wants it."""
        if not self._options.include_usage:
            return None
        return self._chunk_head | {"choices": [], "usage": usage().body(bool(self._options.include_speculation))}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return self._head | {"choices": [self._choice(piece) for piece in pieces], "usage": usage.body()}

    def chunks(self, piece: Piece, usage: UsageSoFar) -> Iterator[dict[str, Any]]:
        """The chunks that tell `piece`. The steps are told with the first of them."""
        steps = {"speculation": {"steps": [step.body() for step in piece.steps]}} if piece.steps else {}
        for choice in self._choices(piece, bool(steps)):
            yield self._chunk(choice | steps, usage)
            steps = {}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _choices(self, piece: Piece, at_least_one: bool) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _chunk(self, choice: dict[str, Any], usage: UsageSoFar) -> dict[str, Any]:
        chunk = self._chunk_head | {"choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage().body()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk


class ChatAnswers(_Answers):
    def __init__(self, model: str, options: StreamOptions | None = None) -> None:
        super().__init__("chat.completion", "chat.completion.chunk", "chatcmpl", model, options)

    def opening(self, index: int, usage: UsageSoFar) -> dict[str, Any] | None:
        return self._chunk(_delta(index, {"role": "assistant", "content": ""}), usage)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            message["content"] = piece.content or None
            message["tool_calls"] = [_called(call) for call in piece.tool_calls]
        return {"index": piece.index, "message": message, "logprobs": None, "finish_reason": piece.finish_reason}

    def _choices(self, piece: Piece, at_least_one: bool) -> Iterator[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.content:
            deltas.append({"content": piece.content})
        if piece.tool_calls:
            calls = [_called(c) | {"index": i} for i, c in enumerate(piece.tool_calls, piece.first_call)]
            deltas.append({"tool_calls": calls})
        if at_least_one and not deltas:
            deltas.append({})
        for delta in deltas:
            yield _delta(piece.index, delta)
        if piece.finish_reason is not None:
            yield _delta(piece.index, {}, piece.finish_reason)


class CompletionAnswers(_Answers):
    """`echoed` are the prompts' texts, to be said before the answers; none if that was not asked for."""

    def __init__(self, model: str, options: StreamOptions | None = None, echoed: Sequence[str] = ()) -> None:
        super().__init__("text_completion", "text_completion", "cmpl", model, options)
        self._echoed = echoed

    def opening(self, index: int, usage: UsageSoFar) -> dict[str, Any] | None:
        return self._chunk(_text(index, self._echoed[index]), usage) if self._echoed else None

    def _choice(self, piece: Piece) -> dict[str, Any]:
        echoed = self._echoed[piece.index] if self._echoed else ""
        return _text(piece.index, echoed + piece.content, piece.finish_reason)

    def _choices(self, piece: Piece, at_least_one: bool) -> Iterator[dict[str, Any]]:
        if piece.content or at_least_one:
            yield _text(piece.index, piece.content)
        if piece.finish_reason is not None:
            yield _text(piece.index, "", piece.finish_reason)


Answers = ChatAnswers | CompletionAnswers


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")


def _delta(index: int, delta: dict[str, Any], reason: Reason | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _text(index: int, text: str, reason: Reason | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
