"""Answers in the shape of OpenAI's Responses API: a list of items, whole or as typed events."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from app.api.answers import Warnings, event
from app.api.errors import ApiError
from app.api.response_store import new_id
from app.api.responses_schemas import ChosenFunction, NamespaceTool, ResponsesRequest, Tool, sealed
from app.api.responses_tools import flatten
from app.api.schemas import OtherTool
from app.api.stream import Choices, CompletionTokensDetails, Piece, PromptTokensDetails, Reason
from app.text.tokenizer import GenerationDefaults

Event = dict[str, Any]
Kind = Literal["output_text", "reasoning_text"]
Status = Literal["completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    annotations: list[Any]
    logprobs: list[Any]
    text: str


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    status: Status
    content: list[ReasoningText]
    encrypted_content: NotRequired[Annotated[str, Field(description="absent unless `include` asks for it")]]


class CalledName(TypedDict):
    namespace: NotRequired[Annotated[str, Field(description="absent unless the function was offered in one")]]
    name: str


class OutputCall(CalledName):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class Echo(TypedDict):
    """The fields of a response that repeat the request, with what was chosen for absent ones."""

    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    max_output_tokens: int | None
    reasoning: dict[str, str | None]
    text: dict[str, dict[str, str]]
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    user: str | None
    store: bool
    background: Literal[False]
    previous_response_id: str | None


class ResponseHead(Echo):
    id: str
    object: Literal["response"]
    created_at: int
    model: str


class ResponseBody(ResponseHead):
    status: Status
    completed_at: int | None
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage
    warnings: NotRequired[Warnings]


class Deleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseAnswers:
    """Answer of /v1/responses. Reasoning, text and calls are items, one after the other as they come.

    `keep` stores a complete response, and returns True if it did.
    """

    def __init__(
        self,
        asked: ResponsesRequest,
        model: str,
        defaults: GenerationDefaults,
        choices: Choices,
        keep: Callable[[ResponseBody], bool] | None = None,
    ) -> None:
        self._choices = choices
        self._keep = keep
        self._head: ResponseHead = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **_echo(asked, defaults),
            "store": keep is not None,
        }
        # What the client calls the functions of namespaces, by the names that the model writes.
        self._names: dict[str | None, CalledName] = {
            tool.name: {"namespace": tool.group.name, "name": tool.tool.name}
            for tool in flatten(asked.tools or [])
            if tool.group is not None and not isinstance(tool.tool, OtherTool)
        }
        self._seals_reasoning = bool(asked.include)
        self._numbers = itertools.count()
        self._output: list[OutputItem] = []
        self._open: _TextItem | _CallItem | None = None
        self._reason: Reason | None = None

    def whole(self, pieces: Sequence[Piece]) -> ResponseBody:
        for piece in pieces:
            for _ in self._read(piece):
                pass
        *_, last = self._finish()
        response: ResponseBody = last["response"]
        return response

    def begin(self) -> bytes:
        """Return the events that a response has before its engine begins, as OpenAI's."""
        return self._encode(map(self._in_progress, ("created", "in_progress")))

    def events(self, piece: Piece) -> bytes:
        return self._encode(self._read(piece))

    def keep_alive(self) -> bytes:
        """Return an event, because clients like Codex give up on a stream whose comments alone tell that it lives."""
        return self._encode([self._in_progress("in_progress")])

    def end(self) -> bytes:
        return self._encode(self._finish())

    def failure(self, error: ApiError) -> bytes:
        """Return the error, and the failed response with the items that are complete."""
        broken = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        cause = {"code": "server_error", "message": error.message}
        failed = self._unfinished(status="failed", error=cause, store=False)
        return self._encode([broken, {"type": "response.failed", "response": failed}])

    def _encode(self, events: Iterable[Event]) -> bytes:
        return b"".join(event(data | {"sequence_number": next(self._numbers)}, data["type"]) for data in events)

    def _in_progress(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": self._unfinished(status="in_progress", usage=None)}

    def _read(self, piece: Piece) -> Iterator[Event]:
        self._reason = piece.finish_reason
        for kind, text in piece.parts:
            if kind == "reasoning":
                yield from self._write("reasoning_text", text)
            elif kind == "content":
                yield from self._write("output_text", text)
            elif kind == "call":
                yield from self._begin_item(partial(_CallItem, self._names.get(text, {"name": text})))
            elif kind == "arguments":
                assert self._open is not None
                yield self._open.write(text)
            else:
                yield from self._close("completed" if kind == "whole" else "incomplete")

    def _write(self, kind: Kind, text: str) -> Iterator[Event]:
        """Write text to the open item, or to a new one if the open one is of another kind."""
        if self._open is None or self._open.kind != kind:
            yield from self._begin_item(partial(_TextItem, kind, self._seals_reasoning))
        if text and self._open is not None:
            yield self._open.write(text)

    def _begin_item(self, make: "Callable[[int], _TextItem | _CallItem]") -> Iterator[Event]:
        """Begin an item, made for its index, after the one that is open."""
        yield from self._close("completed")
        self._open = make(len(self._output))
        yield from self._open.begin()

    def _close(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self._output.append(self._open.item(status))
            self._open = None

    def _finish(self) -> Iterator[Event]:
        """End the open item and the response. A complete answer without text and calls has an empty message."""
        status: Status = "incomplete" if self._reason == "length" else "completed"
        is_written = self._open is not None and self._open.kind == "output_text"
        has_answer = is_written or any(item["type"] != "reasoning" for item in self._output)
        if status == "completed" and not has_answer:
            yield from self._write("output_text", "")
        yield from self._close(status)
        response = self._response(status)
        if self._keep is not None:
            response["store"] = status == "completed" and self._keep(response)
        yield {"type": f"response.{status}", "response": response}

    def _response(self, status: Status) -> ResponseBody:
        response: ResponseBody = {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output),
            "usage": self._usage(),
        }
        if self._choices.warnings and self._reason is not None:
            response["warnings"] = self._choices.warnings
        return response

    def _unfinished(self, **fields: object) -> Event:
        """Return the response before its end, which only streams show."""
        return {**self._response("incomplete"), "incomplete_details": None, **fields}

    def _usage(self) -> ResponseUsage:
        usage = self._choices.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


class _CallItem:
    """Call of a function, the item at `index`, whose arguments are being written."""

    kind = "function_call"

    def __init__(self, name: CalledName, index: int) -> None:
        self._id, self._call_id, self._name = new_id("fc"), new_id("call"), name
        self._index = index
        self._texts: list[str] = []
        self._position = {"item_id": self._id, "output_index": index}

    def item(self, status: Status) -> OutputCall:
        """Return the item as far as it is written."""
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            **self._name,
            "arguments": "".join(self._texts),
        }

    def begin(self) -> Iterator[Event]:
        yield _item_event("added", self._index, {**self.item("incomplete"), "status": "in_progress"})

    def write(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": "response.function_call_arguments.delta", **self._position, "delta": text}

    def end(self, status: Status) -> Iterator[Event]:
        item = self.item(status)
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **self._position, **done}
        yield _item_event("done", self._index, item)


class _TextItem:
    """Item at `index` that is being written: a message or reasoning, with one part of text of this `kind`."""

    def __init__(self, kind: Kind, seals_reasoning: bool, index: int) -> None:
        self.kind = kind
        self._seals_reasoning = seals_reasoning
        self._index = index
        self._id = new_id("msg" if kind == "output_text" else "rs")
        self._texts: list[str] = []
        self._delta_fields: Event = {"logprobs": []} if kind == "output_text" else {}
        self._position = {"item_id": self._id, "output_index": index, "content_index": 0}

    def item(self, status: Status) -> OutputMessage | OutputReasoning:
        """Return the item, once it is written."""
        text = "".join(self._texts)
        if self.kind == "output_text":
            written = [_output_text(text)]
            return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": written}
        thought = [_reasoning_text(text)]
        item: OutputReasoning = {
            "id": self._id,
            "type": "reasoning",
            "summary": [],
            "status": status,
            "content": thought,
        }
        if self._seals_reasoning:
            item["encrypted_content"] = sealed(text)
        return item

    def _part(self, text: str) -> OutputText | ReasoningText:
        return _output_text(text) if self.kind == "output_text" else _reasoning_text(text)

    def begin(self) -> Iterator[Event]:
        empty = {**self.item("incomplete"), "status": "in_progress", "content": []}
        yield _item_event("added", self._index, empty)
        yield {"type": "response.content_part.added", **self._position, "part": self._part("")}

    def write(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": f"response.{self.kind}.delta", **self._position, "delta": text, **self._delta_fields}

    def end(self, status: Status) -> Iterator[Event]:
        text = "".join(self._texts)
        yield {"type": f"response.{self.kind}.done", **self._position, "text": text, **self._delta_fields}
        yield {"type": "response.content_part.done", **self._position, "part": self._part(text)}
        yield _item_event("done", self._index, self.item(status))


def _output_text(text: str) -> OutputText:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _reasoning_text(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}


def _item_event(what: str, index: int, item: Mapping[str, object]) -> Event:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}


def _echo_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool that is offered, without those in it that are not."""
    if not isinstance(tool, NamespaceTool):
        return dict(tool)
    return {**dict(tool), "tools": [dict(inner) for inner in tool.tools if not isinstance(inner, OtherTool)]}


def _echo(asked: ResponsesRequest, defaults: GenerationDefaults) -> Echo:
    reasoning, choice = asked.reasoning, asked.tool_choice
    return {
        "instructions": asked.instructions,
        "tools": [_echo_tool(tool) for tool in asked.tools or [] if not isinstance(tool, OtherTool)],
        "tool_choice": choice.model_dump(exclude_unset=True)
        if isinstance(choice, ChosenFunction)
        else choice or "auto",
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "temperature": defaults.temperature if asked.temperature is None else asked.temperature,
        "top_p": defaults.top_p if asked.top_p is None else asked.top_p,
        "max_output_tokens": asked.max_output_tokens,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "metadata": asked.metadata or {},
        "user": asked.user,
        "store": False,
        "background": False,
        "previous_response_id": asked.previous_response_id,
    }
