"""Answers in the shape of OpenAI's Responses API: a list of items, whole or as typed events."""

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from app.api.answers import event
from app.api.errors import ApiError
from app.api.responses_schemas import ChosenFunction, ResponsesRequest
from app.api.stream import Choices, Piece, Reason
from app.text.parsers import ToolCall
from app.text.tokenizer import GenerationDefaults

Event = dict[str, Any]
Kind = Literal["output_text", "reasoning_text"]


class ResponseAnswers:
    """Answer of /v1/responses. Reasoning, text and calls are items, one after the other as they come."""

    def __init__(self, asked: ResponsesRequest, model: str, defaults: GenerationDefaults, choices: Choices) -> None:
        self._choices = choices
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._head |= {"model": model, **_echo(asked, defaults)}
        self._numbers = itertools.count()
        self._output: list[dict[str, Any]] = []
        self._open: _TextItem | None = None
        self._reason: Reason | None = None

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
        broken = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        failed = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._encode([broken, {"type": "response.failed", "response": failed}])

    def _encode(self, events: Iterable[Event]) -> bytes:
        return b"".join(event(data | {"sequence_number": next(self._numbers)}, data["type"]) for data in events)

    def _begin(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress") | {"usage": None}}

    def _read(self, piece: Piece) -> Iterator[Event]:
        self._reason = piece.finish_reason
        for content, reasoning, calls in piece.parts:
            if reasoning:
                yield from self._write("reasoning_text", reasoning)
            if content:
                yield from self._write("output_text", content)
            for call in calls:
                yield from self._close("completed")
                yield from self._call(call)

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        """Write text to the open item, or to a new one if the open one is of another kind."""
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            self._open = _TextItem(kind, len(self._output))
            yield from self._open.begin()
        if text:
            yield self._open.write(text)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            for ended in self._open.end(status):
                yield ended
            self._output.append(ended["item"])
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
        is_written = self._open is not None and self._open.kind == "output_text"
        has_answer = is_written or any(item["type"] != "reasoning" for item in self._output)
        if status == "completed" and not has_answer:
            yield from self._write("output_text", "")
        yield from self._close(status)
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _response(self, status: str) -> dict[str, Any]:
        response = self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output),
            "usage": self._usage(),
        }
        warnings = self._choices.warnings if self._reason is not None else ()
        return response | {"warnings": warnings} if warnings else response

    def _usage(self) -> dict[str, Any]:
        usage = self._choices.usage(False)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


class _TextItem:
    """Item at `index` whose one part, of a `kind`, is text that is being written: a message, or reasoning."""

    def __init__(self, kind: Kind, index: int) -> None:
        self.kind = kind
        self._index = index
        self._texts: list[str] = []
        if kind == "output_text":
            self._head: Event = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
            self._part: Event = {"type": kind, "annotations": [], "logprobs": []}
            self._of_delta: Event = {"logprobs": []}
        else:
            self._head = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
            self._part = {"type": kind}
            self._of_delta = {}
        self._place = {"item_id": self._head["id"], "output_index": index, "content_index": 0}

    def begin(self) -> Iterator[Event]:
        yield _item_event("added", self._index, self._head | {"status": "in_progress", "content": []})
        yield {"type": "response.content_part.added", **self._place, "part": self._part | {"text": ""}}

    def write(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": f"response.{self.kind}.delta", **self._place, "delta": text, **self._of_delta}

    def end(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        part = self._part | {"text": text}
        yield {"type": f"response.{self.kind}.done", **self._place, "text": text, **self._of_delta}
        yield {"type": "response.content_part.done", **self._place, "part": part}
        yield _item_event("done", self._index, self._head | {"status": status, "content": [part]})


def _item_event(what: str, index: int, item: dict[str, Any]) -> Event:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}


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
