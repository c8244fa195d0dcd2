"""Answers in OpenAI's shapes, whole or in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import msgspec
from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from app.api.errors import AnswerWarning, ApiError
from app.api.prompts import Prompt
from app.api.schemas import StreamOptions
from app.api.stream import Choices, Piece, Reason, Usage
from app.text.parsers.base import Parsed, ToolCall

Payload = dict[str, Any]
TextReason = Literal["stop", "length"]
Warnings = Annotated[Sequence[AnswerWarning], Field(description="absent if there are none")]


class Head(TypedDict):
    id: str
    created: int
    model: str


class Ending(TypedDict):
    logprobs: None
    stop_reason: str | int | None
    matched_stop: str | int | None


class Tail(TypedDict):
    usage: Usage
    warnings: NotRequired[Warnings]


class AnsweredFunction(TypedDict):
    name: str
    arguments: str


class AnsweredCall(TypedDict):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[Annotated[str, Field(description="absent unless a reasoning parser found some")]]
    tool_calls: NotRequired[Annotated[list[AnsweredCall], Field(description="absent unless the model called a tool")]]


class ChatChoice(Ending):
    index: int
    message: AnswerMessage
    finish_reason: Reason


class ChatCompletion(Head, Tail):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(Ending):
    index: int
    text: str
    finish_reason: TextReason


class Completion(Head, Tail):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class RenderedPrompt(TypedDict):
    model: str
    token_ids: list[int]
    warnings: NotRequired[Warnings]


class ChoiceAnswers(ABC):
    """Answer in `choices`, with their usage and their warnings.

    `echoed` are the prompts' texts, one for each choice, if the answer begins with them. A chunk carries one choice,
    whose payload is the `delta` of a message, or a `text`.
    """

    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    empty: ClassVar[Payload]

    def __init__(self, model: str, choices: Choices, options: StreamOptions, echoed: Sequence[str] = ()) -> None:
        self._choices = choices
        self._options = options
        self._echoed = echoed
        self._head: Head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def begin(self) -> bytes:
        return b""

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
            choices.append({"index": piece.index, **self.empty, "finish_reason": piece.finish_reason, **_ending(piece)})
        chunks: list[Payload] = [{**self._head, "object": self.chunk_kind, "choices": [one]} for one in choices]
        wants_usage = self._options.include_usage
        for chunk in chunks:
            if self._options.continuous_usage_stats and wants_usage is not False:
                chunk["usage"] = self._choices.usage
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
        usage: Payload = {**self._choices.usage}
        if self._options.include_speculation:
            usage["speculation"] = self._choices.speculation
        return event({**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}) + done

    def failure(self, error: ApiError) -> bytes:
        """Return the error. Neither a finish_reason nor [DONE] follows."""
        return event(error.body)

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def _tail(self) -> Tail:
        tail: Tail = {"usage": self._choices.usage}
        if self._choices.warnings:
            tail["warnings"] = self._choices.warnings
        return tail

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> Mapping[str, object]: ...

    @abstractmethod
    def _opening(self, index: int) -> Payload | None:
        """Return the payload before all pieces of a choice, if there is one."""

    @abstractmethod
    def _payloads(self, piece: Piece) -> list[Payload]:
        """Return the payloads of a piece, none if it has nothing to show."""


class ChatAnswers(ChoiceAnswers):
    """Answer of /v1/chat/completions."""

    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    empty: ClassVar[Payload] = {"delta": {}}

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion:
        choices: list[ChatChoice] = [
            {"index": piece.index, "message": _message(piece), "finish_reason": _reason(piece), **_ending(piece)}
            for piece in pieces
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, **self._tail()}

    def _opening(self, index: int) -> Payload:
        return {"delta": {"role": "assistant", "content": ""}}

    def _payloads(self, piece: Piece) -> list[Payload]:
        texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        calls: dict[int, Payload] = {}  # by index: the beginning of a call, or more of its arguments
        index = piece.num_earlier_calls - 1
        for kind, text in piece.parts:
            if kind in texts:
                texts[kind].append(text)
            elif kind == "call":
                index += 1
                calls[index] = {"index": index, **_tool_call(ToolCall(text, ""))}
            elif kind == "arguments":
                calls.setdefault(index, {"index": index, "function": {}})["function"]["arguments"] = text
        delta = {
            "reasoning_content": "".join(texts["reasoning"]),
            "content": "".join(texts["content"]),
            "tool_calls": list(calls.values()),
        }
        return [{"delta": {field: value}} for field, value in delta.items() if value]


class CompletionAnswers(ChoiceAnswers):
    """Answer of /v1/completions."""

    chunk_kind = "text_completion"
    id_prefix = "cmpl"
    empty: ClassVar[Payload] = {"text": ""}

    def whole(self, pieces: Sequence[Piece]) -> Completion:
        choices: list[TextChoice] = [
            {
                "index": piece.index,
                "text": self._echo(piece.index) + Parsed.of(piece.parts).content,
                "finish_reason": _text_reason(piece),
                **_ending(piece),
            }
            for piece in pieces
        ]
        return {**self._head, "object": "text_completion", "choices": choices, **self._tail()}

    def _echo(self, index: int) -> str:
        return self._echoed[index] if self._echoed else ""

    def _opening(self, index: int) -> Payload | None:
        return {"text": self._echoed[index]} if self._echoed else None

    def _payloads(self, piece: Piece) -> list[Payload]:
        content = Parsed.of(piece.parts).content
        return [{"text": content}] if content else []


def _message(piece: Piece) -> AnswerMessage:
    content, reasoning, calls = Parsed.of(piece.parts)
    message: AnswerMessage = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _choice(piece: Piece, payload: Payload) -> Payload:
    """Return the choice of a chunk that does not end it."""
    return {"index": piece.index, **payload, "logprobs": None, "finish_reason": None}


def _ending(piece: Piece) -> Ending:
    """Return the end of a choice but for its reason."""
    return {"logprobs": None, "stop_reason": piece.stop_reason, "matched_stop": piece.matched_stop}


def _reason(piece: Piece) -> Reason:
    """Return why a choice ended, which its last piece has."""
    assert piece.finish_reason is not None
    return piece.finish_reason


def _text_reason(piece: Piece) -> TextReason:
    """Return why a text ended. It has no tool calls."""
    reason = _reason(piece)
    assert reason != "tool_calls"
    return reason


def _tool_call(call: ToolCall) -> AnsweredCall:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def rendered(model: str, prompt: Prompt, warnings: Sequence[AnswerWarning]) -> RenderedPrompt:
    """Return a prompt's ids as /render answers them, with warnings if there are any."""
    answer: RenderedPrompt = {"model": model, "token_ids": prompt.token_ids}
    if warnings:
        answer["warnings"] = warnings
    return answer


def event(data: Mapping[str, object], name: str = "") -> bytes:
    """Return a Server-Sent Event, with its name if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")
