"""POST /v1/responses: items of OpenAI's Responses API, answered as the conversation of chat that they are."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from app.api import openapi
from app.api import responses_schemas as items
from app.api.answers import json_response
from app.api.body import parse
from app.api.chat import converse
from app.api.errors import AnswerWarning, ApiError, bad_request, unsupported
from app.api.generate import Received, answer, receive
from app.api.response_store import ResponseStore, Turn, shown
from app.api.responses_answers import Deleted, ResponseAnswers, ResponseBody
from app.api.responses_tools import check_names, flatten, joined_name
from app.api.schemas import MAX_CALLS, MAX_MESSAGES, MediaPart, SamplingRequest
from app.api.services import services_of
from app.api.shares import Held
from app.metrics import Metrics

router = APIRouter()

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chat -> their names in this API."""

_NOT_KEPT: AnswerWarning = {
    "code": "response_not_kept",
    "param": "store",
    "message": "The conversation is larger than a client's part of --response-store-bytes, and cannot be continued.",
}
_KEY = {"parameters": [{"name": "key", "in": "path", "required": True, "schema": {"type": "string"}}]}

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
    store = services.responses
    with services.hold(request) as held:
        received = await receive(request, items.ResponsesRequest, held)
        asked = received.body
        recalled = _recall(store, asked, held)
        conversation, body = await services.in_thread(request, _as_chat, asked, recalled, store, services.metrics)
        with conversation.renaming_errors():
            chat: Received[items.ConversationRequest] = replace(received, body=body, warnings=())  # type: ignore[arg-type, assignment]
            choices = await converse(chat)
    # Those of the body itself have this API's names already.
    of_chat: list[AnswerWarning] = [{**one, "param": conversation.field_name(one["param"])} for one in choices.warnings]
    choices.warnings = [*received.warnings, *of_chat]
    keep = None
    if conversation.turn is not None and store.fits(conversation.turn):
        keep = partial(store.keep, held.client_id, conversation.turn)
    elif conversation.turn is not None:
        choices.warnings = [*choices.warnings, _NOT_KEPT]
    answers = ResponseAnswers(asked, received.model_name, services.tokenizer.defaults, choices, keep)
    return await answer(chat, choices, answers)


@router.get(
    "/v1/responses/resp_{key}",
    **openapi.route("A response that is kept", ResponseBody, 400, 401, 404),
    openapi_extra=_KEY,
)
async def stored_response(request: Request) -> Response:
    """Return a response of this client's, as it was answered."""
    if request.query_params.get("stream", "false") != "false":
        raise bad_request("`stream`: a response that is kept comes whole. Leave it out.", "stream")
    services, identifier = services_of(request), _identifier(request)
    stored = services.responses.get(services.client_id(request), identifier)
    if stored is None:
        raise services.responses.gone(f"The response {shown(identifier)}", None, "response_not_found")
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/resp_{key}", **openapi.route("Forget a response", Deleted, 401, 404), openapi_extra=_KEY)
async def delete_response(request: Request) -> Response:
    """Drop a response of this client's."""
    services, identifier = services_of(request), _identifier(request)
    if not services.responses.delete(services.client_id(request), identifier):
        raise services.responses.gone(f"The response {shown(identifier)}", None, "response_not_found")
    return json_response(Deleted(id=identifier, object="response", deleted=True))


def _identifier(request: Request) -> str:
    return f"resp_{request.path_params['key']}"


class Recalled(NamedTuple):
    """Turns that a request continues or refers to."""

    previous: Turn | None
    referred: list[Turn]


def _recall(store: ResponseStore, asked: items.ResponsesRequest, held: Held) -> Recalled:
    """Return what the request recalls, whose bytes `held` counts with its body's.

    Raises ApiError 400 or 404, or ClientBusy.
    """
    if asked.store and not store.is_on:
        raise unsupported("`store`: nothing is kept here (--response-store-bytes 0). Send false.", "store")
    previous = None
    if (identifier := asked.previous_response_id) is not None:
        stored = store.get(held.client_id, identifier)
        if stored is None:
            param = "previous_response_id"
            raise store.gone(f"`{param}`: the response {shown(identifier)}", param, "previous_response_not_found")
        previous = stored.turn
    given = asked.input if isinstance(asked.input, list) else []
    wanted = dict[str, int]()
    for index, item in enumerate(given):
        if isinstance(item, items.ItemReference):
            if item.id in wanted:  # A few bytes would recall a large item thousands of times.
                param = f"input.{index}.id"
                raise bad_request(f"`{param}` refers to the item {shown(item.id)} once more. Refer to it once.", param)
            wanted[item.id] = index
    referred, missing = store.with_items(held.client_id, set(wanted))
    if missing:
        identifier = min(missing, key=lambda each: wanted[each])
        param = f"input.{wanted[identifier]}.id"
        raise store.gone(f"`{param}`: the item {shown(identifier)}", param, "item_not_found")
    held.add(sum(len(turn.items) for turn in (previous, *referred) if turn is not None))
    return Recalled(previous, referred)


def _as_chat(
    asked: items.ResponsesRequest, recalled: Recalled, store: ResponseStore, metrics: Metrics
) -> "tuple[Conversation, items.ConversationRequest]":
    """Return the request's conversation, and the equivalent body of /v1/chat/completions. Raises ApiError 400."""
    conversation = Conversation(asked, recalled)
    if store.is_on and asked.store is not False:
        conversation.turn = conversation.as_turn()
    with conversation.renaming_errors():
        return conversation, parse(conversation.as_chat(), items.ConversationRequest, metrics)


class Conversation:
    """A request's items as messages of chat. Each message has a source, the field that it comes from."""

    turn: Turn | None = None  # to keep with the answer

    def __init__(self, body: items.ResponsesRequest, recalled: Recalled) -> None:
        self._body = body
        self._items: list[tuple[str, items.Item]] = []  # of the whole conversation, with their sources
        self._messages: list[dict[str, Any]] = []
        self._sources: list[str] = []
        self._tools = list(flatten(body.tools or []))
        check_names(self._tools)
        if body.instructions:
            self._add("instructions", role="system", content=body.instructions)
        if recalled.previous is not None:
            earlier = items.ITEMS.validate_python(recalled.previous.read())
            self._items += [("previous_response_id", item) for item in earlier]
        if isinstance(body.input, str):
            self._items.append(("input", items.InputMessage(role="user", content=body.input)))
        else:
            known = {item["id"]: item for turn in reversed(recalled.referred) for item in turn.read() if "id" in item}
            for index, item in enumerate(body.input):
                if isinstance(item, items.ItemReference):
                    (item,) = items.ITEMS.validate_python([known[item.id]])
                self._items.append((f"input.{index}", item))
        if len(self._items) > MAX_MESSAGES:  # Reasoning items become one message, so no later check counts them.
            raise bad_request(
                f"`input`, with what it continues, has {len(self._items)} items; at most {MAX_MESSAGES} are read. "
                "Begin a new conversation, or leave out earlier items.",
                "input",
            )
        for source, item in self._items:
            self._add_item(source, item)

    def as_turn(self) -> Turn:
        """Return the items of the conversation, without `instructions`, which later requests do not inherit."""
        return Turn.of([item for _, item in self._items])

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
        elif not isinstance(item, items.ItemReference):
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
        elif item.encrypted_content and all(one["code"] != "reasoning_left_out" for one in self._body.warnings):
            why = "Another server encrypted this reasoning, and maybe more of it: it is not in the prompt."
            param = f"{source}.encrypted_content"
            self._body.warnings.append({"code": "reasoning_left_out", "param": param, "message": why})


def _text(content: items.InputText) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _result(output: str | list[items.ResultPart]) -> str | list[dict[str, str]]:
    """Return a function's output as the content of a message of chat."""
    if isinstance(output, str):
        return output
    return [
        {"type": part.type} if isinstance(part, MediaPart) else {"type": "text", "text": part.text} for part in output
    ]
