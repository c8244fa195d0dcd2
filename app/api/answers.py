"""Answers in OpenAI's shapes, whole or in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import Response

from app.api.schemas import StreamOptions
from app.messages import FinishReason
from app.text.parsers import ToolCall

Reason = FinishReason | Literal["tool_calls"]


class Step(msgspec.Struct, frozen=True):
    """One engine step of a choice: drafts verified and accepted, and the texts of its tokens in order."""

    verified: int
    accepted: int
    tokens: list[str]


class Piece(msgspec.Struct, frozen=True):
    """New part of the choice `index`. The last piece of a choice has a `finish_reason`.

    `num_earlier_calls` counts the tool calls of earlier pieces. `steps` is empty unless the client wants them.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_earlier_calls: int = 0
    steps: tuple[Step, ...] = ()
    finish_reason: Reason | None = None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached` tokens of the prompt came from the prefix cache.

    `steps` are the engine steps that verified drafts. `accepted` of `verified` drafts were kept.
    """

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


class Answers(ABC):
    """Writer of one request's answer. `usage` returns the usage so far.

    A chunk carries one choice. Its payload is a `delta` of a message, or a `text`.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    payload_key: ClassVar[str]
    empty_payload: ClassVar[Any]

    def __init__(self, model: str, usage: Callable[[], Usage], options: StreamOptions) -> None:
        self._usage = usage
        self._options = options
        head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._head = head | {"object": self.kind}
        self._chunk_head = head | {"object": self.chunk_kind}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the answer of which each piece is one whole choice."""
        return self._head | {"choices": [self._whole_choice(piece) for piece in pieces], "usage": self._usage().body()}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of one piece: the opening, the payloads with the steps, and the end."""
        payloads = self._payloads(piece)
        if piece.steps and not payloads:
            payloads = [self.empty_payload]
        choices = [self._choice(piece.index, payload) for payload in payloads]
        if piece.steps:
            choices[0]["speculation"] = {"steps": piece.steps}
        if piece.is_first and (opening := self._opening(piece.index)) is not None:
            choices.insert(0, self._choice(piece.index, opening))
        if piece.finish_reason is not None:
            choices.append(self._choice(piece.index, self.empty_payload, piece.finish_reason))
        return [self._chunk(choice) for choice in choices]

    def usage_chunk(self) -> dict[str, Any] | None:
        """Return the chunk behind all choices, or None if the client does not want it."""
        if not self._options.include_usage:
            return None
        return self._chunk_head | {"choices": [], "usage": self._usage().body(bool(self._options.include_speculation))}

    def _choice(self, index: int, payload: object, reason: Reason | None = None) -> dict[str, Any]:
        return {"index": index, self.payload_key: payload, "logprobs": None, "finish_reason": reason}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._chunk_head | {"choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage().body()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> dict[str, Any]: ...

    @abstractmethod
    def _opening(self, index: int) -> object | None:
        """Return the payload before all pieces of a choice, if there is one."""

    @abstractmethod
    def _payloads(self, piece: Piece) -> list[Any]:
        """Return the payloads of a piece, none if it has nothing to show."""


class ChatAnswers(Answers):
    """Answer of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    payload_key = "delta"
    empty_payload: ClassVar[dict[str, Any]] = {}

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            message["content"] = piece.content or None
            message["tool_calls"] = [_tool_call(call) for call in piece.tool_calls]
        return {"index": piece.index, "message": message, "logprobs": None, "finish_reason": piece.finish_reason}

    def _opening(self, index: int) -> object:
        return {"role": "assistant", "content": ""}

    def _payloads(self, piece: Piece) -> list[Any]:
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.content:
            deltas.append({"content": piece.content})
        if piece.tool_calls:
            calls = enumerate(piece.tool_calls, piece.num_earlier_calls)
            deltas.append({"tool_calls": [_tool_call(call) | {"index": index} for index, call in calls]})
        return deltas


class CompletionAnswers(Answers):
    """Answer of /v1/completions. With `echo`, `prompts` are the texts before the choices, one for each."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    payload_key = "text"
    empty_payload = ""

    def __init__(
        self, model: str, usage: Callable[[], Usage], options: StreamOptions, prompts: Sequence[str] = ()
    ) -> None:
        super().__init__(model, usage, options)
        self._prompts = prompts

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece.index, (self._opening(piece.index) or "") + piece.content, piece.finish_reason)

    def _opening(self, index: int) -> str | None:
        return self._prompts[index] if self._prompts else None

    def _payloads(self, piece: Piece) -> list[Any]:
        return [piece.content] if piece.content else []


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")
