"""Answers in OpenAI's shapes, whole or in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
from fastapi import Response

from app.api.errors import ApiError
from app.api.schemas import StreamOptions
from app.messages import FinishReason
from app.text.parsers import Parsed, ToolCall

Reason = FinishReason | Literal["tool_calls"]
Payload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """New part of the choice `index`. The last piece of a choice has a `finish_reason`.

    `parts` is what was parsed, in its order. `num_earlier_calls` counts the tool calls of earlier pieces. `steps` is
    empty unless the client wants them. A step has its number of drafts `verified` and `accepted`, and the texts of its
    `tokens`. The last piece of the first choice has the `warnings` about the request. `stop_reason` and `matched_stop`
    of a last piece are what ended the choice, as vLLM and SGLang name it.
    """

    index: int
    parts: Sequence[Parsed] = ()
    num_earlier_calls: int = 0
    steps: Sequence[dict[str, Any]] = ()
    finish_reason: Reason | None = None
    is_first: bool = False
    warnings: Sequence[Payload] = ()
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None

    @property
    def content(self) -> str:
        return "".join(part.content for part in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(part.reasoning for part in self.parts)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [call for part in self.parts for call in part.tool_calls]


class Answers(ABC):
    """Writer of one request's answer, whole or as Server-Sent Events."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the answer of which each piece is one whole choice."""

    @abstractmethod
    def events(self, piece: Piece) -> bytes:
        """Return the events of one piece, b"" if it has nothing to show."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events behind all pieces."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that `error` breaks off."""


class ChoiceAnswers(Answers):
    """Answer in choices. `usage(with_speculation)` returns the usage so far.

    `echoed` are the prompts' texts, one for each choice, if the answer begins with them. A chunk carries one choice.
    The payload of a choice is a `message`, a `delta` of one, or a `text`.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    empty: ClassVar[Payload]

    def __init__(
        self,
        model: str,
        usage: Callable[[bool], dict[str, Any]],
        options: StreamOptions,
        echoed: Sequence[str] = (),
    ) -> None:
        self._usage = usage
        self._options = options
        self._echoed = echoed
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = [_last_choice(piece, self._whole_payload(piece)) for piece in pieces]
        answer = self._head | {"object": self.kind, "choices": choices, "usage": self._usage(False)}
        warnings = [warning for piece in pieces for warning in piece.warnings]
        return answer | {"warnings": warnings} if warnings else answer

    def events(self, piece: Piece) -> bytes:
        return b"".join(map(event, self.chunks(piece)))

    def end(self) -> bytes:
        """Return the usage if the client wants it, and [DONE]."""
        done = b"data: [DONE]\n\n"
        if not self._options.include_usage:
            return done
        usage = self._usage(bool(self._options.include_speculation))
        return event(self._head | {"object": self.chunk_kind, "choices": [], "usage": usage}) + done

    def failure(self, error: ApiError) -> bytes:
        """Return the error. Neither a finish_reason nor [DONE] follows."""
        return event(error.body)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of one piece: the opening, the payloads with the steps, and the end."""
        payloads = self._payloads(piece)
        if piece.steps and not payloads:
            payloads = [self.empty]
        choices = [_choice(piece.index, payload) for payload in payloads]
        if piece.steps:
            choices[0]["speculation"] = {"steps": piece.steps}
        if piece.finish_reason is not None:
            choices.append(_last_choice(piece, self.empty))
        chunks = []
        if piece.is_first and (opening := self._opening(piece.index)) is not None:
            chunks.append(self._chunk(_choice(piece.index, opening)))
        chunks += map(self._chunk, choices)
        if piece.warnings:
            chunks[-1]["warnings"] = piece.warnings
        return chunks

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | {"object": self.chunk_kind, "choices": [choice]}
        if self._options.wants_continuous_usage:
            chunk["usage"] = self._usage(False)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    @abstractmethod
    def _whole_payload(self, piece: Piece) -> Payload: ...

    @abstractmethod
    def _opening(self, index: int) -> Payload | None:
        """Return the payload before all pieces of a choice, if there is one."""

    @abstractmethod
    def _payloads(self, piece: Piece) -> list[Payload]:
        """Return the payloads of a piece, none if it has nothing to show."""


class ChatAnswers(ChoiceAnswers):
    """Answer of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    empty: ClassVar[Payload] = {"delta": {}}

    def _whole_payload(self, piece: Piece) -> Payload:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            message["content"] = piece.content or None
            message["tool_calls"] = [_tool_call(call) for call in piece.tool_calls]
        return {"message": message}

    def _opening(self, index: int) -> Payload:
        return {"delta": {"role": "assistant", "content": ""}}

    def _payloads(self, piece: Piece) -> list[Payload]:
        calls = enumerate(piece.tool_calls, piece.num_earlier_calls)
        delta = {
            "reasoning_content": piece.reasoning,
            "content": piece.content,
            "tool_calls": [_tool_call(call) | {"index": index} for index, call in calls],
        }
        return [{"delta": {field: value}} for field, value in delta.items() if value]


class CompletionAnswers(ChoiceAnswers):
    """Answer of /v1/completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    empty: ClassVar[Payload] = {"text": ""}

    def _whole_payload(self, piece: Piece) -> Payload:
        return {"text": (self._echoed[piece.index] if self._echoed else "") + piece.content}

    def _opening(self, index: int) -> Payload | None:
        return {"text": self._echoed[index]} if self._echoed else None

    def _payloads(self, piece: Piece) -> list[Payload]:
        return [{"text": piece.content}] if piece.content else []


def _choice(index: int, payload: Payload, reason: Reason | None = None) -> dict[str, Any]:
    return {"index": index, **payload, "logprobs": None, "finish_reason": reason}


def _last_choice(piece: Piece, payload: Payload) -> dict[str, Any]:
    """Return the choice with its end."""
    stop = {"stop_reason": piece.stop_reason, "matched_stop": piece.matched_stop}
    return _choice(piece.index, payload, piece.finish_reason) | stop


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Return a Server-Sent Event, with its name if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(
    body: dict[str, Any] | list[Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")
