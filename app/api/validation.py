"""Checks of several fields together, and of fields against the model that is served."""

from collections.abc import Iterator
from difflib import get_close_matches
from functools import reduce
from typing import Any, cast

from pydantic import BaseModel

from app.api.errors import AnswerWarning, bad_request, clip, context_length_exceeded, unsupported
from app.api.refusals import LABELS, LEFT_OUT, NESTED, REFUSED, asks
from app.api.schemas import (
    TEXT_ONLY,
    Body,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    MediaPart,
    OtherTool,
    SamplingRequest,
    TemplatedRequest,
)
from app.api.services import Services
from app.metrics import Metrics
from app.text.chat_template import ChatTemplate
from app.text.parsers import reasoning_for

_NO_PLACE = "This model's chat template has no place for"
_MAX_UNKNOWN = 16  # warnings of one answer about unknown fields
_MAX_PATH = 128  # characters of an unknown field's path
_DATA = ("properties", "$defs", "definitions", "parsed", "parsed_arguments")
"""Unknown fields whose names are a schema's or the data of an answer, and ask for nothing."""
_GENERATING = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
"""Fields that may stand in a body for /tokenize too, where they change nothing."""
MAX_BIAS = 100.0
MAX_TEMPERATURE = 1e6
"""Beyond it the noise of sampling is all that counts, and fp32 overflows."""
_LEVELS = ("low", "medium", "high")
"""Efforts that chat templates with `reasoning_effort` write into the prompt."""


def token_budget(
    param: str, prompt: int, asked: tuple[str, int | None], default: int | None, limit: int, *, clamps: bool = False
) -> int:
    """Return the number of tokens that a request may generate, so that prompt and answer fit `limit` together.

    The field and value `asked` by the client must fit, unless the server `clamps` it. Without a value the budget is
    `default`, or all that fits if that is less. Raises ApiError about the prompt's field `param`, or about the field
    that is asked if it exceeds `limit` without the prompt.
    """
    room, (max_param, max_tokens) = limit - prompt, asked
    if room < 1:
        raise context_length_exceeded(param, limit, prompt)
    if max_tokens is not None and max_tokens > room and not clamps:
        raise context_length_exceeded(param if max_tokens <= limit else max_param, limit, prompt, max_tokens)
    return min(room, max_tokens or default or room)


def check_fields_together(body: Body) -> None:
    """Raise ApiError for fields that exclude or need each other."""
    options = body.stream_options if isinstance(body, GenerationRequest) and not body.stream else None
    if options is not None and any(asks(value) for _, value in options):
        raise bad_request("`stream_options` is only allowed when `stream` is true.", "stream_options")
    if not isinstance(body, TemplatedRequest):
        return
    for index, one in enumerate(body.messages):
        _check_message(f"messages.{index}", one)
    on, off = _fields_that_turn(body, True), _fields_that_turn(body, False)
    if on and off:
        raise bad_request(f"`{on[0]}` turns thinking on, and `{off[0]}` turns it off. Send one of them.", off[0])
    other = (body.chat_template_kwargs or {}).get("reasoning_effort")
    if None not in (body.reasoning_effort, other) and body.reasoning_effort != other:
        message = "`reasoning_effort` and `chat_template_kwargs.reasoning_effort` differ. Send one of them."
        raise bad_request(message, "reasoning_effort")
    if body.forces_call:
        _check_forced_call(body)
    if body.continue_final_message:
        last = body.messages[-1]
        if body.add_generation_prompt:
            problem = "and `add_generation_prompt` exclude each other. Send one of them."
        elif last.role != "assistant" or last.tool_calls or not last.text:
            problem = "needs a last message of the assistant's with text in it."
        else:
            return
        raise bad_request(f"`continue_final_message` {problem}", "continue_final_message")


def _fields_that_turn(body: TemplatedRequest, on: bool) -> list[str]:
    """Return the fields that turn thinking on, or off."""
    said = {
        "enable_thinking": body.enable_thinking,
        "reasoning_effort": body.reasoning_effort and body.reasoning_effort != "none",
        "chat_template_kwargs.enable_thinking": (body.chat_template_kwargs or {}).get("enable_thinking"),
    }
    return [field for field, value in said.items() if value is on]


def _check_forced_call(body: TemplatedRequest) -> None:
    names = [tool.function.name for tool in body.functions]
    if not names:
        left = "none of the `tools` is a function. Offer one." if body.tools else "there are no `tools`. Offer some."
        raise bad_request(f"`tool_choice` asks for a call, but {left}", "tool_choice")
    if (name := body.forced_function) is not None and name not in names:
        param = "tool_choice.function.name"
        raise bad_request(f"`{param}` is `{clip(name)}`, which is none of the `tools`.", param)
    if body.continue_final_message or body.add_generation_prompt is False:
        field = "continue_final_message" if body.continue_final_message else "add_generation_prompt: false"
        raise bad_request(
            f"`tool_choice` asks for an answer that begins with a call, and `{field}` for one that does not begin. "
            "Send one of them.",
            "tool_choice",
        )


def _check_message(where: str, message: ChatMessage) -> None:
    instead = (message.tool_calls or None, message.reasoning_content, message.reasoning, message.refusal)
    if message.content is None and (message.role != "assistant" or all(value is None for value in instead)):
        calls = " or `tool_calls`" if message.role == "assistant" else ""
        raise bad_request(f"`{where}.content`{calls} is required.", f"{where}.content", "missing_parameter")
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, MediaPart) and message.role != "tool":
            param = f"{where}.content.{index}.type"
            raise bad_request(f'`{param}` {TEXT_ONLY}, not "{part.type}".', param)
    fields = ("tool_calls", "reasoning_content", "reasoning", "tool_call_id")
    for field, value in [*((field, getattr(message, field)) for field in fields), ("content", message.thinking)]:
        role = "tool" if field == "tool_call_id" else "assistant"
        if value and message.role != role:
            param, what = f"{where}.{field}", "Reasoning in " if field == "content" else ""
            raise bad_request(f"{what}`{param}` belongs to messages of the role {role}, not {message.role}.", param)
    if len({message.reasoning_content, message.reasoning, message.thinking} - {None, ""}) > 1:
        param = f"{where}.reasoning" if message.reasoning else f"{where}.reasoning_content"
        raise bad_request(f"`{param}` and other reasoning of the message differ. Send one of them.", param)


def check_template(body: TemplatedRequest, services: Services) -> None:
    """Raise ApiError for fields that need what the model's chat template or its parsers do not have."""
    template, call_format = services.tokenizer.template_for(body.offers_tools), services.call_format
    reasons = services.reasoning_parser is not None
    separates = reasons and getattr(body, "separate_reasoning", None) is not False
    if getattr(body, "include_reasoning", None) is False and not separates and _thinks(services, template):
        why = "`separate_reasoning` is false" if reasons else "this server parses none (--reasoning-parser)"
        raise unsupported(
            f"`include_reasoning` false leaves parsed reasoning out, but {why}. Leave it out.", "include_reasoning"
        )
    if body.forces_call and call_format is None:
        raise unsupported(
            "`tool_choice` asks for a call, but the form of this model's tool calls is not known "
            '(--tool-call-parser). Use "auto".',
            "tool_choice",
        )
    if body.offers_tools and "tools" not in template.variables:
        raise unsupported(f"{_NO_PLACE} `tools`. Leave them out, or describe them in a message.", "tools")
    for index, message in enumerate(body.messages):
        param = f"messages.{index}.tool_calls"
        if len(message.tool_calls or []) > 1 and template.takes_one_call:
            raise unsupported(
                f"This model's chat template writes one call of a message, and `{param}` has more. Send a message for "
                "each call, followed by its result.",
                param,
            )
        if message.tool_calls and not template.writes_calls:
            raise unsupported(f"{_NO_PLACE} `{param}`. Say in `content` what was called.", param)
    known = template.switches
    can_turn, has_levels = "enable_thinking" in known, "reasoning_effort" in known
    levels = (*(["none"] if can_turn else []), *_LEVELS)
    if has_levels and body.reasoning_effort not in (None, *levels):
        raise unsupported(
            f"This model's chat template knows `reasoning_effort` {', '.join(levels)}, and not "
            f"{body.reasoning_effort}. Send one of these.",
            "reasoning_effort",
        )
    if not isinstance((body.chat_template_kwargs or {}).get("enable_thinking"), bool | None):
        param = "chat_template_kwargs.enable_thinking"
        raise bad_request(f"`{param}` must be true or false: to a template any text is true.", param)
    if not can_turn and (off := _fields_that_turn(body, False)) and _thinks(services, template):
        why = f"This model's chat template cannot turn thinking off (`enable_thinking`). Leave `{off[0]}` out."
        raise unsupported(why, off[0])


def _thinks(services: Services, template: ChatTemplate) -> bool:
    return (services.reasoning_parser or reasoning_for("auto", template.source)) is not None


def _warn_of_switches(body: TemplatedRequest, services: Services) -> list[AnswerWarning]:
    """Return warnings about thinking that is asked for where a template cannot switch it, and about names in
    `chat_template_kwargs` that the template does not know. What asks for nothing, like null and false, has none."""
    template, warnings = services.tokenizer.template_for(body.offers_tools), list[AnswerWarning]()
    known = template.switches
    for field in _fields_that_turn(body, True):
        if "enable_thinking" not in known and (field != "reasoning_effort" or field not in known):
            cannot = "'s chat template cannot switch thinking" if _thinks(services, template) else " does not think"
            warnings.append(_warning("thinking_not_switched", field, f"This model{cannot}: nothing changed."))
    listed = ", ".join(f"`{switch}`" for switch in known) or "none"
    for name, value in (body.chat_template_kwargs or {}).items():
        if name in (*known, "enable_thinking") or value is None or value is False:
            continue
        shown = clip(name)
        why = f"This model's chat template does not know `{shown}`, which changed nothing. What it knows: {listed}."
        warnings.append(_warning("unknown_template_kwarg", f"chat_template_kwargs.{shown}", why))
        if len(warnings) == _MAX_UNKNOWN:
            break
    return warnings


def clamp(body: SamplingRequest) -> list[AnswerWarning]:
    """Clamp the fields of `body` that vLLM clamps, and return a warning for each."""
    warnings = []
    biases = body.logit_bias or {}
    if beyond := [token for token, bias in biases.items() if abs(bias) > MAX_BIAS]:
        body.logit_bias = {token: max(-MAX_BIAS, min(bias, MAX_BIAS)) for token, bias in biases.items()}
        why = f"Biases are at most {MAX_BIAS:g} and at least -{MAX_BIAS:g}: {len(beyond)} of them became one of these."
        warnings.append(_warning("value_clamped", f"logit_bias.{beyond[0]}", why))
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        body.temperature = MAX_TEMPERATURE
        why = f"The temperature became {MAX_TEMPERATURE:g}, above which all tokens are equally likely."
        warnings.append(_warning("value_clamped", "temperature", why))
    return warnings


def warn_of_unknown_fields(body: Body, metrics: Metrics) -> list[AnswerWarning]:
    """Return warnings of LEFT_OUT, and of unknown fields in all objects, with the name that one may be meant for. All
    unknown fields are counted. Raises ApiError for one that asks for log probabilities or a grammar."""
    known = _GENERATING | LABELS | LEFT_OUT.keys() | {refusal.field for refusal in REFUSED[type(body)]}
    warnings, count = list[AnswerWarning](), 0
    for row in LEFT_OUT.values():
        value = reduce(lambda found, name: getattr(found, name, None), row.field.split("."), cast("Any", body))
        if value is not None and not row.harmless(value):
            warnings.append(_warning("field_left_out", row.field, row.why))
    for model, where, name, value in _extras(body):
        if (path := f"{where}{name}") in known:
            continue
        _refuse_output(where[:-1], {name: value}, metrics)
        count += 1
        if len(warnings) < _MAX_UNKNOWN:
            near = get_close_matches(clip(name), type(model).model_fields, n=1, cutoff=0.75)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            shown = clip(path, _MAX_PATH)
            why = f"`{shown}` is not known here and changed nothing.{hint}"
            warnings.append(_warning("unknown_field", shown, why))
    metrics.count("unknown_fields", count)
    return warnings


def _extras(model: BaseModel, where: str = "") -> Iterator[tuple[BaseModel, str, str, Any]]:
    """Yield (object, its path with a dot, name, value) of the unknown fields that ask for something, the top level
    first."""
    for name, value in (model.model_extra or {}).items():
        if asks(value):
            yield model, where, name, value
    for field in type(model).model_fields:
        value = getattr(model, field)
        has_models = isinstance(value, list) and value and isinstance(value[0], BaseModel)  # Token ids are many.
        for index, item in enumerate(value) if has_models else [(None, value)]:
            if isinstance(item, BaseModel):
                yield from _extras(item, f"{where}{field}." if index is None else f"{where}{field}.{index}.")


def _refuse_output(where: str, unknown: dict[str, Any], metrics: Metrics) -> None:
    """Raise ApiError if an `unknown` field of the object at `where`, at any depth, asks for what NESTED has."""
    waiting: list[tuple[str, Any]] = [(where, unknown)]
    while waiting:
        where, value = waiting.pop()
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            refusal = NESTED.get(name) if isinstance(name, str) else None
            param = clip(f"{where}.{name}".lstrip("."), _MAX_PATH)
            if refusal is not None and not refusal.harmless(inner):
                metrics.count("request_refused", label=refusal.field)
                raise unsupported(refusal.why.replace(f"`{name}`", f"`{param}`"), param)
            if isinstance(inner, dict | list) and name not in _DATA:
                waiting.append((param, inner))


def warn_of_prompt(body: TemplatedRequest, services: Services, is_joined: bool) -> list[AnswerWarning]:
    """Return warnings about tools, names, reasoning, images and switches that are not in the prompt, about thinking
    before a forced call, and about system messages that were joined.

    The name of a tool's message may repeat the function of an earlier call, because the prompt has that.
    """
    template = services.tokenizer.template_for(body.offers_tools)
    names, thoughts, media, cut = [], [], [], []
    called: set[str] = set()
    for index, message in enumerate(body.messages):
        called.update(call.function.name for call in message.tool_calls or [])
        if message.name and not (message.role == "tool" and message.name in called):
            names.append(f"messages.{index}.name")
        reasoning = {"reasoning_content": message.reasoning_content, "reasoning": message.reasoning}
        thoughts += [
            f"messages.{index}.{field}" for field, text in [*reasoning.items(), ("content", message.thinking)] if text
        ][:1]
        parts = enumerate(message.content if isinstance(message.content, list) else ())
        media += [f"messages.{index}.content.{i}" for i, part in parts if isinstance(part, MediaPart)]
        where = f"messages.{index}.tool_calls"
        cut += [
            f"{where}.{i}.function.arguments" for i, call in enumerate(message.tool_calls or []) if call.function.is_cut
        ]
    others = [(f"tools.{i}", tool.type) for i, tool in enumerate(body.tools or []) if isinstance(tool, OtherTool)]
    why = "A tool of the type `{}` was left out: only functions are offered to this model."
    warnings = [_warning("tool_left_out", path, why.format(clip(kind))) for path, kind in others[:_MAX_UNKNOWN]]
    warnings += _warn_of_switches(body, services)
    if cut:
        why = "These arguments were cut, so they are no JSON: the model reads their text."
        warnings.append(_warning("arguments_cut", cut[0], why))
    if media:
        why = "This model reads text only: the prompt says in place of an image, sound or file that there was one."
        warnings.append(_warning("media_left_out", media[0], why))
    if names and not template.writes_names:
        what = "this one is" if len(names) == 1 else f"the names of {len(names)} messages are"
        why = f"This model's chat template writes no such `name`: {what} not in the prompt."
        warnings.append(_warning("name_left_out", names[0], why))
    if thoughts and not template.writes_reasoning:
        why = f"{_NO_PLACE} reasoning: it is not in the prompt."
        warnings.append(_warning("reasoning_left_out", thoughts[0], why))
    if is_joined:
        moved = next((i for i, one in enumerate(body.messages) if i and one.role in ("system", "developer")), 0)
        why = "This model's chat template takes one system message, at the beginning: this one is a part of that now."
        warnings.append(_warning("system_messages_joined", f"messages.{moved}", why))
    if body.forces_call and (on := _fields_that_turn(body, True)):
        why = "`tool_choice` forces a call, and the answer begins with it."
        warnings.append(_warning("reasoning_skipped", on[0], why))
    return warnings


def _warning(code: str, param: str, message: str) -> AnswerWarning:
    return {"code": code, "param": param, "message": message}
