"""Answers in the shape of OpenAI's Responses API: a list of items, whole or as typed events."""

import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from app.api.answers import Answers, Piece, Reason, event
from app.api.errors import ApiError
from app.api.responses_schemas import ChosenFunction, ResponsesRequest
from app.api.stream import Choices
from app.text.parsers import ToolCall
from app.text.tokenizer import GenerationDefaults

Event = dict[str, Any]


class ResponseAnswers(Answers):
    """Answer of /v1/responses. Reasoning, text and calls are items, one after the other as they come."""

    def __init__(self, asked: ResponsesRequest, model: str, defaults: GenerationDefaults, choices: Choices) -> None:
        self._choices = choices
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": _now()}
        self._head |= {"model": model, **_echo(asked, defaults)}
        self._numbers = itertools.count()
        self._output: list[dict[str, Any]] = []
        self._open: _TextItem | None = None
        self._reason: Reason | None = None
        self._warnings: Sequence[dict[str, Any]] = ()

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        for piece in pieces:
            for _ in self._read(piece):
                pass
        *_, last = self._finish()
        response: dict[str, Any] = last["response"]
        return response

    def events(self, piece: Piece) -> bytes:
        return self._encode(itertools.chain(self._begin() if piece.is_first else (), self._read(piece)))

    def end(self) -> bytes:
        return self._encode(self._finish())

    def failure(self, error: ApiError) -> bytes:
        """Return the error, and the failed response with the items that are complete."""
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._encode([told, {"type": "response.failed", "response": failed}])

    def _encode(self, events: Iterable[Event]) -> bytes:
        return b"".join(event(data | {"sequence_number": next(self._numbers)}, data["type"]) for data in events)

    def _begin(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress") | {"usage": None}}

    def _read(self, piece: Piece) -> Iterator[Event]:
        self._reason, self._warnings = piece.finish_reason, piece.warnings
        for content, reasoning, calls in piece.parts:
            if reasoning:
                yield from self._write(_Reasoning, reasoning)
            if content:
                yield from self._write(_Message, content)
            for call in calls:
                yield from self._close("completed")
                yield from self._call(call)

    def _write(self, kind: "type[_TextItem]", text: str) -> Iterator[Event]:
        """Write text to the open item, or to a new one if the open one is of another kind."""
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            self._open = kind(len(self._output))
            yield from self._open.begin()
        if text:
            yield self._open.write(text)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self._output.append(self._open.item(status))
            self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        """Write a call, which comes whole."""
        index, kind = len(self._output), "response.function_call_arguments"
        item = {"id": _new_id("fc"), "type": "function_call", "status": "completed", "call_id": _new_id("call")}
        item |= {"name": call.name, "arguments": call.arguments}
        place = {"item_id": item["id"], "output_index": index}
        yield _item_event("added", index, item | {"status": "in_progress", "arguments": ""})
        yield {"type": f"{kind}.delta", **place, "delta": call.arguments}
        yield {"type": f"{kind}.done", **place, "name": call.name, "arguments": call.arguments}
        yield _item_event("done", index, item)
        self._output.append(item)

    def _finish(self) -> Iterator[Event]:
        """End the open item and the response. A complete answer without text and calls has an empty message."""
        status = "incomplete" if self._reason == "length" else "completed"
        has_answer = isinstance(self._open, _Message) or any(item["type"] != "reasoning" for item in self._output)
        if status == "completed" and not has_answer:
            yield from self._write(_Message, "")
        yield from self._close(status)
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _response(self, status: str) -> dict[str, Any]:
        response = self._head | {
            "status": status,
            "completed_at": _now() if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output),
            "usage": self._usage(),
        }
        return response | {"warnings": self._warnings} if self._warnings else response

    def _usage(self) -> dict[str, Any]:
        usage = self._choices.usage(False)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


class _TextItem(ABC):
    """Item at `index` whose one part is text that is being written."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    of_delta: ClassVar[dict[str, Any]] = {}

    def __init__(self, index: int) -> None:
        self.id = _new_id(self.id_prefix)
        self._index = index
        self._texts: list[str] = []
        self._place = {"item_id": self.id, "output_index": index, "content_index": 0}

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def with_parts(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item with these parts."""

    def item(self, status: str) -> dict[str, Any]:
        return self.with_parts(status, [self.part("".join(self._texts))])

    def begin(self) -> Iterator[Event]:
        yield _item_event("added", self._index, self.with_parts("in_progress", []))
        yield {"type": "response.content_part.added", **self._place, "part": self.part("")}

    def write(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": f"response.{self.kind}.delta", **self._place, "delta": text, **self.of_delta}

    def end(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        yield {"type": f"response.{self.kind}.done", **self._place, "text": text, **self.of_delta}
        yield {"type": "response.content_part.done", **self._place, "part": self.part(text)}
        yield _item_event("done", self._index, self.item(status))


class _Message(_TextItem):
    """Text of the answer."""

    id_prefix = "msg"
    kind = "output_text"
    of_delta: ClassVar[dict[str, Any]] = {"logprobs": []}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def with_parts(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}


class _Reasoning(_TextItem):
    """Reasoning before an answer, whole and not summarised."""

    id_prefix = "rs"
    kind = "reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def with_parts(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": parts}


def _item_event(what: str, index: int, item: dict[str, Any]) -> Event:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}


def _now() -> int:
    """Return seconds since the epoch, which a response says and nothing is measured by."""
    return int(time.time())


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _echo(asked: ResponsesRequest, defaults: GenerationDefaults) -> dict[str, Any]:
    """Return the fields of the response that repeat the request, with what was chosen for absent ones."""
    reasoning, choice = asked.reasoning, asked.tool_choice
    return {
        "instructions": asked.instructions,
        "tools": [tool.model_dump() for tool in asked.tools or []],
        "tool_choice": choice.model_dump() if isinstance(choice, ChosenFunction) else choice or "auto",
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "temperature": defaults.temperature if asked.temperature is None else asked.temperature,
        "top_p": defaults.top_p if asked.top_p is None else asked.top_p,
        "max_output_tokens": asked.max_output_tokens,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "metadata": asked.metadata or {},
        "user": asked.user,
        "store": False,
        "background": False,
        "previous_response_id": None,
    }
