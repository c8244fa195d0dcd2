"""Answers in OpenAI's shapes, whole or in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from fastapi import Response

from app.api.errors import ApiError
from app.api.schemas import StreamOptions
from app.api.stream import Choices, Piece
from app.text.parsers import Parsed, ToolCall

Payload = dict[str, Any]


class ChoiceAnswers(ABC):
    """Answer in `choices`, with their usage and their warnings.

    `echoed` are the prompts' texts, one for each choice, if the answer begins with them. A chunk carries one choice.
    The payload of a choice is a `message`, a `delta` of one, or a `text`.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    empty: ClassVar[Payload]

    def __init__(self, model: str, choices: Choices, options: StreamOptions, echoed: Sequence[str] = ()) -> None:
        self._choices = choices
        self._options = options
        self._echoed = echoed
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = [_choice(piece, self._whole_payload(piece), is_last=True) for piece in pieces]
        answer = self._head | {"object": self.kind, "choices": choices, "usage": self._choices.usage(False)}
        return answer | {"warnings": self._choices.warnings} if self._choices.warnings else answer

    def events(self, piece: Piece) -> bytes:
        """Return the chunks of one piece: the opening, the payloads with the steps, and the end."""
        payloads = self._payloads(piece)
        if piece.steps and not payloads:
            payloads = [self.empty]
        choices = [_choice(piece, payload) for payload in payloads]
        if piece.steps:
            choices[0]["speculation"] = {"steps": piece.steps}
        if piece.is_first and (opening := self._opening(piece.index)) is not None:
            choices.insert(0, _choice(piece, opening))
        if piece.finish_reason is not None:
            choices.append(_choice(piece, self.empty, is_last=True))
        chunks: list[Payload] = [self._head | {"object": self.chunk_kind, "choices": [choice]} for choice in choices]
        wants_usage = self._options.include_usage
        for chunk in chunks:
            if self._options.continuous_usage_stats and wants_usage is not False:
                chunk["usage"] = self._choices.usage(False)
            elif wants_usage:
                chunk["usage"] = None
        if piece.finish_reason is not None and piece.index == 0 and self._choices.warnings:
            chunks[-1]["warnings"] = self._choices.warnings
        return b"".join(map(event, chunks))

    def end(self) -> bytes:
        """Return the usage if the client wants it, and [DONE]."""
        done = b"data: [DONE]\n\n"
        if not self._options.include_usage:
            return done
        usage = self._choices.usage(bool(self._options.include_speculation))
        return event(self._head | {"object": self.chunk_kind, "choices": [], "usage": usage}) + done

    def failure(self, error: ApiError) -> bytes:
        """Return the error. Neither a finish_reason nor [DONE] follows."""
        return event(error.body)

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
        content, reasoning, calls = Parsed.joined(piece.parts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [_tool_call(call) for call in calls]
        return {"message": message}

    def _opening(self, index: int) -> Payload:
        return {"delta": {"role": "assistant", "content": ""}}

    def _payloads(self, piece: Piece) -> list[Payload]:
        content, reasoning, calls = Parsed.joined(piece.parts)
        delta = {
            "reasoning_content": reasoning,
            "content": content,
            "tool_calls": [
                _tool_call(call) | {"index": index} for index, call in enumerate(calls, piece.num_earlier_calls)
            ],
        }
        return [{"delta": {field: value}} for field, value in delta.items() if value]


class CompletionAnswers(ChoiceAnswers):
    """Answer of /v1/completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    empty: ClassVar[Payload] = {"text": ""}

    def _whole_payload(self, piece: Piece) -> Payload:
        return {"text": (self._echoed[piece.index] if self._echoed else "") + Parsed.joined(piece.parts).content}

    def _opening(self, index: int) -> Payload | None:
        return {"text": self._echoed[index]} if self._echoed else None

    def _payloads(self, piece: Piece) -> list[Payload]:
        content = Parsed.joined(piece.parts).content
        return [{"text": content}] if content else []


def _choice(piece: Piece, payload: Payload, *, is_last: bool = False) -> dict[str, Any]:
    """Return a choice with this payload, and with its end if it is the last of a stream or whole."""
    choice = {"index": piece.index, **payload, "logprobs": None, "finish_reason": None}
    if is_last:
        choice["finish_reason"] = piece.finish_reason
        choice |= {"stop_reason": piece.stop_reason, "matched_stop": piece.matched_stop}
    return choice


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
