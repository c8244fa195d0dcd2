"""POST /v1/responses: items of OpenAI's Responses API, answered as the conversation of chat that they are."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api import openapi
from app.api import responses_schemas as items
from app.api.body import parse
from app.api.chat import converse
from app.api.errors import ApiError, bad_request
from app.api.generate import Received, answer, receive
from app.api.responses_answers import ResponseAnswers, ResponseBody
from app.api.responses_tools import check_names, flatten, joined_name
from app.api.schemas import MAX_CALLS, MediaPart, SamplingRequest
from app.api.services import services_of
from app.metrics import Metrics

router = APIRouter()

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chat -> their names in this API."""

_EVENT = (
    "A server-sent event with a name. Its data is in JSON. A response in it, and an item, is `in_progress` until it "
    "ends. The last event has the response: `completed`, `incomplete`, or `failed` with its `error`."
)


@router.post(
    "/v1/responses",
    **openapi.route(
        "Answer a conversation of items",
        ResponseBody,
        *openapi.GENERATING,
        body=(items.ResponsesRequest,),
        stream=_EVENT,
    ),
)
async def responses(request: Request) -> Response:
    services = services_of(request)
    with services.hold(request) as held:
        received = await receive(request, items.ResponsesRequest, held)
        conversation, body = await services.in_thread(request, _as_chat, received.body, services.metrics)
        with conversation.renaming_errors():
            chat: Received[items.ConversationRequest] = replace(received, body=body)  # type: ignore[arg-type, assignment]
            choices = await converse(chat)
    choices.warnings = [{**one, "param": conversation.field_name(one["param"])} for one in choices.warnings]
    answers = ResponseAnswers(received.body, received.model_name, services.tokenizer.defaults, choices)
    return await answer(chat, choices, answers)


def _as_chat(asked: items.ResponsesRequest, metrics: Metrics) -> "tuple[Conversation, items.ConversationRequest]":
    """Return the request's conversation, and the equivalent body of /v1/chat/completions. Raises ApiError 400."""
    conversation = Conversation(asked)
    with conversation.renaming_errors():
        return conversation, parse(conversation.as_chat(), items.ConversationRequest, metrics)


class Conversation:
    """A request's items as messages of chat. Each message has a source, the field that it comes from."""

    def __init__(self, body: items.ResponsesRequest) -> None:
        self._body = body
        self._messages: list[dict[str, Any]] = []
        self._sources: list[str] = []
        self._tools = list(flatten(body.tools or []))
        check_names(self._tools)
        if body.instructions:
            self._add("instructions", role="system", content=body.instructions)
        if isinstance(body.input, str):
            self._add("input", role="user", content=body.input)
        else:
            for index, item in enumerate(body.input):
                self._add_item(f"input.{index}", item)

    def as_chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent body of /v1/chat/completions."""
        body = self._body
        choice: Any = body.tool_choice
        if isinstance(choice, items.ChosenFunction):
            choice = {"type": choice.type, "function": {"name": joined_name(choice.namespace, choice.name)}}
        return {name: getattr(body, name) for name in SamplingRequest.model_fields} | {
            "messages": self._messages,
            "tools": [tool.for_chat() for tool in self._tools],
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_completion_tokens": body.max_output_tokens,
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
            "chat_template_kwargs": body.chat_template_kwargs,
        }

    @contextmanager
    def renaming_errors(self) -> Iterator[None]:
        """Raise errors about fields of chat with the names of this API's fields instead."""
        try:
            yield
        except ApiError as error:
            raise replace(
                error, message=self._renamed(error), param=error.param and self.field_name(error.param)
            ) from None

    def _renamed(self, error: ApiError) -> str:
        """Return the message with this API's names of fields. Texts in quotes or backticks may be the client's.

        A field is the param, or opens the message. With a param without dots it may also have one of `_NAMES`.
        """
        param = error.param or ""
        starts = {0, error.message.find(f"`{param}`")}

        def rename(match: re.Match[str]) -> str:
            field: str | None = match[1]
            is_field = field and (match.start() in starts or ("." not in param and field in _NAMES))
            return f"`{self.field_name(field)}`" if field and is_field else match[0]

        return re.sub(r'"(?:[^"\\]|\\.)*"|`([^`]+)`', rename, error.message)

    def field_name(self, field: str) -> str:
        """Return the request's field that a field of chat comes from."""
        if match := re.match(r"(messages|tools)\.(\d+)(?:\.function)?", field):
            kind, index = match[1], int(match[2])
            if kind == "messages" and index < len(self._sources):
                return self._sources[index]
            if kind == "tools" and index < len(self._tools):
                return self._tools[index].path + field[match.end() :]
        return _NAMES.get(field) or re.sub(r"^tool_choice\.function", "tool_choice", field)

    def _add(self, source: str, **message: Any) -> None:
        self._messages.append(message)
        self._sources.append(source)

    def _add_item(self, source: str, item: items.Item) -> None:
        """Add an item. Reasoning, text and calls that follow each other in this order are one message of chat."""
        if isinstance(item, items.FunctionCallOutput):
            self._add(source, role="tool", tool_call_id=item.call_id, content=_result(item.output))
        elif isinstance(item, items.InputMessage) and item.role != "assistant":
            self._add(source, role=item.role, content=_text(item.content))
        else:
            self._extend_turn(source, item)

    def _extend_turn(
        self, source: str, item: items.InputMessage | items.FunctionCallItem | items.ReasoningItem
    ) -> None:
        last = self._messages[-1] if self._messages else {"role": None}
        is_call = isinstance(item, items.FunctionCallItem)  # Only a call may follow text or a call.
        if last["role"] != "assistant" or not (is_call or (not last["content"] and "tool_calls" not in last)):
            self._add(source, role="assistant", content="")
        turn = self._messages[-1]
        self._sources[-1] = source
        if isinstance(item, items.FunctionCallItem):
            function = {"name": joined_name(item.namespace, item.name), "arguments": item.arguments}
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
            if len(calls) > MAX_CALLS:
                raise bad_request(f"`{source}`: at most {MAX_CALLS} calls may follow each other.", source)
        elif isinstance(item, items.InputMessage):
            turn["content"] = _text(item.content)
        elif item.text:
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), item.text)))


def _text(content: items.InputText) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _result(output: str | list[items.ResultPart]) -> str | list[dict[str, str]]:
    """Return a function's output as the content of a message of chat."""
    if isinstance(output, str):
        return output
    return [
        {"type": part.type} if isinstance(part, MediaPart) else {"type": "text", "text": part.text} for part in output
    ]
