"""What no single field can tell, and what depends on the model that is served."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from app.api.errors import bad_request, clip, context_length_exceeded
from app.api.refusals import GRAMMAR, empty
from app.api.schemas import Body, ChatMessage, GenerationRequest, TemplatedRequest
from app.text.chat_template import ChatTemplate


def token_budget(
    param: str, prompt: int, asked: int | None, default: int | None, limit: int, asked_param: str = "max_tokens"
) -> int:
    """How many tokens a request may make so that prompt and answer fit `limit` together.

    `asked` is the client's number and must fit as it stands; without it, `default` or all that fits, whichever is
    less. Raises ApiError `context_length_exceeded`; `param` is the field that holds the prompt, `asked_param` the one
    that alone asks for more than there is.
    """
    room = limit - prompt
    if room < 1:
        raise context_length_exceeded(param, limit, prompt)
    if asked is not None and asked > room:
        raise context_length_exceeded(param if asked <= limit else asked_param, limit, prompt, asked)
    return asked or min(room, default or room)


def check_fields_together(parsed: Body) -> None:
    """What no single field can tell. Raises ApiError."""
    for where, extra in _extras(parsed):
        _refuse_extra(where, extra)
    if isinstance(parsed, GenerationRequest) and parsed.stream_options is not None and not parsed.stream:
        raise bad_request("`stream_options` is only allowed when `stream` is true.", "stream_options")
    if isinstance(parsed, TemplatedRequest):
        _check_conversation(parsed)


def _check_conversation(parsed: TemplatedRequest) -> None:
    for index, message in enumerate(parsed.messages):
        _check_message(f"messages.{index}", message)
    for index, tool in enumerate(parsed.tools or []):
        if tool.function.strict:
            param = f"tools.{index}.function.strict"
            raise bad_request(f"`{param}` may not be true. {GRAMMAR.format(param)}", param, "unsupported_parameter")
    if parsed.continue_final_message:
        if parsed.add_generation_prompt:
            raise bad_request(
                "`continue_final_message` and `add_generation_prompt` exclude each other. Send one of them.",
                "continue_final_message",
            )
        last = parsed.messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.text:
            raise bad_request(
                "`continue_final_message` needs a last message of the assistant's with text in it.",
                "continue_final_message",
            )


def _check_message(where: str, message: ChatMessage) -> None:
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        beside = " or `tool_calls`" if message.role == "assistant" else ""
        raise bad_request(f"`{where}.content`{beside} is required.", f"{where}.content", "missing_parameter")
    for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, field) and message.role != role:
            param = f"{where}.{field}"
            raise bad_request(f"`{param}` belongs to messages of the role {role}, not {message.role}.", param)


def check_template(asked: TemplatedRequest, template: ChatTemplate) -> None:
    """What the model's own chat template cannot do. Raises ApiError."""
    if asked.offered_tools and "tools" not in template.variables:
        raise bad_request(
            "This model's chat template has no place for `tools`. Leave them out, or describe them in a message.",
            "tools",
            "unsupported_parameter",
        )
    for index, message in enumerate(asked.messages):
        if message.tool_calls and "tool_calls" not in (template.source or ""):
            param = f"messages.{index}.tool_calls"
            raise bad_request(
                f"This model's chat template has no place for `{param}`. Say in `content` what was called.",
                param,
                "unsupported_parameter",
            )
    for name, value in (asked.chat_template_kwargs or {}).items():
        if name == "enable_thinking" and not isinstance(value, bool | None):
            param = f"chat_template_kwargs.{name}"
            raise bad_request(f"`{param}` must be true or false: to a template any text is true.", param)
        if name not in template.switches and value is not None and value is not False:
            known = ", ".join(f"`{switch}`" for switch in template.switches) or "none"
            param = f"chat_template_kwargs.{clip(name)}"
            raise bad_request(
                f"This model's chat template does not know `{clip(name)}`. What it knows: {known}.",
                param,
                "unsupported_parameter",
            )


def _extras(parsed: BaseModel, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The unknown fields of every object below the top level, with the object's path."""
    for field in type(parsed).model_fields:
        value = getattr(parsed, field)
        items = [(str(i), item) for i, item in enumerate(value)] if isinstance(value, list) else [("", value)]
        for index, item in items:
            if isinstance(item, BaseModel):
                path = ".".join(filter(None, (where, field, index)))
                yield path, item.model_extra or {}
                yield from _extras(item, path)


def _refuse_extra(where: str, extra: dict[str, Any]) -> None:
    """Below the top level an unknown field passes only while it says nothing."""
    for name, value in extra.items():
        if value is not None and value is not False and not empty(value):
            param = f"{where}.{clip(name)}"
            raise bad_request(f"`{param}` is not supported. Leave it out.", param, "unsupported_parameter")
