"""What a request may not ask: one table of refusals, and the reading of bodies.

Nothing a client sends is silently ignored: a field is honoured (protocol.py), refused by name here unless its value
changes nothing, or unknown and at the top level, which is tolerated because SDKs and gateways add their own
bookkeeping ("user", "metadata", "store", "service_tier", ...).
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.api.errors import ApiError, bad_request, body_too_large, clip, context_length_exceeded
from app.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from app.metrics import Metrics

MAX_BODY_BYTES = 8 * 2**20
_MOST_ERRORS = 16

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Harmless = Callable[[Any], bool]


class Refusal(NamedTuple):
    """`field` is refused, with `why` as the message, unless it is absent, null, or `harmless(value)`."""

    field: str
    harmless: Harmless
    why: str


def _number(*neutral: float) -> Harmless:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value in neutral


def _is(*neutral: bool | str) -> Harmless:
    return lambda value: any(type(value) is type(item) and value == item for item in neutral)


def _not_above_one(value: Any) -> bool:
    """What is no count at all is left to protocol.py, which says so."""
    return not isinstance(value, int) or value <= 1


def _empty(value: Any) -> bool:
    return isinstance(value, list | dict | str) and not value


def _never(value: Any) -> bool:
    return False


def _text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_LOGPROBS = (
    "Log probabilities are not available: speculative verification here hands out tokens, not distributions. "
    "Leave `{}` out."
)
_GRAMMAR = (
    "Output cannot be held to a grammar, schema or pattern: a draft block is verified against the model's own choice "
    "alone. Leave `{}` out, describe the format in the prompt and check the answer."
)
_TOOLS = "Tools are not supported yet. Leave `{}` out, or describe the functions in the prompt."
_SAMPLING = "`{}` is not supported yet: `temperature` and `seed` are. Leave it out or send its neutral value."
_OUTPUT = "`{}` is not supported yet. Leave it out or send its default."
_TEMPLATE = "`{}` is not supported yet: the model's own chat template is used as it stands. Leave it out."
_MODALITY = "This model reads and writes text only. Leave `{}` out."
_ENGINE = "`{}` has no meaning for this engine. Leave it out."

REFUSALS = tuple(
    Refusal(field, harmless, why.format(field))
    for field, harmless, why in (
        ("logprobs", _is(False), _LOGPROBS),
        ("top_logprobs", _number(0), _LOGPROBS),
        ("prompt_logprobs", _never, _LOGPROBS),
        ("return_logprob", _is(False), _LOGPROBS),
        ("response_format", _text_format, _GRAMMAR),
        ("structured_outputs", _empty, _GRAMMAR),
        ("guided_json", _never, _GRAMMAR),
        ("guided_regex", _never, _GRAMMAR),
        ("guided_choice", _never, _GRAMMAR),
        ("guided_grammar", _never, _GRAMMAR),
        ("guided_decoding_backend", _never, _GRAMMAR),
        ("guided_whitespace_pattern", _never, _GRAMMAR),
        ("json_schema", _never, _GRAMMAR),
        ("regex", _never, _GRAMMAR),
        ("grammar", _never, _GRAMMAR),
        ("ebnf", _never, _GRAMMAR),
        ("structural_tag", _never, _GRAMMAR),
        ("tools", _empty, _TOOLS),
        ("tool_choice", _is("none", "auto"), _GRAMMAR.replace("Leave `{}` out", 'Use `{}` "auto" or "none"')),
        ("parallel_tool_calls", _is(True, False), _TOOLS),
        ("functions", _empty, _TOOLS),
        ("function_call", _is("none", "auto"), _TOOLS),
        (
            "n",
            _not_above_one,
            "`{}` above 1 is not supported yet. Send the request several times with different seeds.",
        ),
        ("best_of", _not_above_one, "`{}` above 1 is not supported: it ranks by log probabilities. Leave it out."),
        ("use_beam_search", _is(False), "Beam search is not supported: DFlash verifies one sequence. Leave `{}` out."),
        ("top_p", _number(1), _SAMPLING),
        ("top_k", _number(0, -1), _SAMPLING),
        ("min_p", _number(0), _SAMPLING),
        ("presence_penalty", _number(0), _SAMPLING),
        ("frequency_penalty", _number(0), _SAMPLING),
        ("repetition_penalty", _number(1), _SAMPLING),
        ("length_penalty", _number(1), _SAMPLING),
        ("logit_bias", _empty, _SAMPLING),
        ("logits_processors", _empty, _SAMPLING),
        ("custom_logit_processor", _never, _SAMPLING),
        ("allowed_token_ids", _never, _SAMPLING),
        ("bad_words", _empty, _SAMPLING),
        ("min_tokens", _number(0), _SAMPLING),
        ("thinking_token_budget", _never, _SAMPLING),
        ("max_new_tokens", _never, "`{}` is not this API's name for it. Use `max_tokens`."),
        ("echo", _is(False), _OUTPUT),
        ("suffix", _empty, "`{}` is not supported: this is no fill-in-the-middle model. Leave it out."),
        ("include_stop_str_in_output", _is(False), _OUTPUT),
        ("no_stop_trim", _is(False), _OUTPUT),
        ("stop_regex", _empty, "`{}` is not supported. Use `stop` with plain strings."),
        ("skip_special_tokens", _is(True), _OUTPUT),
        ("spaces_between_special_tokens", _is(True, False), _OUTPUT),
        ("return_tokens_as_token_ids", _is(False), _OUTPUT),
        ("return_token_ids", _is(False), _OUTPUT),
        ("return_hidden_states", _is(False), _OUTPUT),
        ("stream_options.include_usage", _is(True, False), _OUTPUT),
        ("stream_options.continuous_usage_stats", _is(False), _OUTPUT),
        ("stream_options.include_obfuscation", _is(False), _OUTPUT),
        ("stream_options.include_speculation", _is(False), _OUTPUT),
        ("add_generation_prompt", _is(True), _TEMPLATE),
        ("continue_final_message", _is(False), _TEMPLATE),
        ("chat_template", _never, _TEMPLATE),
        ("chat_template_kwargs", _empty, _TEMPLATE),
        ("reasoning_effort", _never, _TEMPLATE),
        ("verbosity", _never, _TEMPLATE),
        ("documents", _empty, _TEMPLATE),
        ("truncate_prompt_tokens", _never, "`{}` is not supported: a prompt is never cut in silence. Shorten it."),
        ("modalities", lambda value: value == ["text"], _MODALITY),
        ("audio", _never, _MODALITY),
        ("mm_processor_kwargs", _empty, _MODALITY),
        ("web_search_options", _never, "This server searches nothing. Leave `{}` out."),
        ("prompt_embeds", _never, "Prompts are text or token ids here. Leave `{}` out."),
        ("input_embeds", _never, "Prompts are text or token ids here. Leave `{}` out."),
        ("priority", _number(0), "Requests are served in the order of their arrival. Leave `{}` out."),
        ("prediction", _never, "The DFlash draft predicts the output here. Leave `{}` out."),
        ("lora_path", _never, _ENGINE),
        ("kv_transfer_params", _never, _ENGINE),
        ("vllm_xargs", _empty, _ENGINE),
    )
)

ELSEWHERE: dict[type[GenerationRequest], tuple[Refusal, ...]] = {
    ChatCompletionRequest: (Refusal("prompt", _never, "`prompt` belongs to /v1/completions. Send `messages` here."),),
    CompletionRequest: (
        Refusal("messages", _never, "`messages` belongs to /v1/chat/completions. Send `prompt` here."),
        Refusal("max_completion_tokens", _never, "`max_completion_tokens` belongs to chat. Use `max_tokens` here."),
    ),
}
"""Fields of the other endpoint."""


async def read_request(request: Request, model: type[RequestT], metrics: Metrics) -> RequestT:
    """The body as a `model`. Raises ApiError: 413 for a body above MAX_BODY_BYTES, else 400 naming the field at fault.

    A refusal is counted in `metrics`.
    """
    body = await _read_body(request)
    try:
        raw = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is not valid JSON: it is nested too deeply.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    refusal = find_refusal(raw, REFUSALS + ELSEWHERE[model])
    if refusal is not None:
        metrics.request_refused(refusal.field)
        raise bad_request(refusal.why, refusal.field, "unsupported_parameter")
    try:
        parsed = model.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, raw) from None
    _check_together(parsed)
    return parsed


async def _read_body(request: Request) -> bytes:
    """At most MAX_BODY_BYTES, whether the client says how much is coming or not. Raises ApiError 413."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise body_too_large(MAX_BODY_BYTES)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise body_too_large(MAX_BODY_BYTES)
    return bytes(body)


def _decode(body: bytes) -> Any:
    """JSON to objects. They hold no cycles, and millions of them would keep the collector busy for seconds."""
    gc.disable()
    try:
        return msgspec.json.decode(body)
    finally:
        gc.enable()


def find_refusal(raw: dict[str, Any], table: Sequence[Refusal]) -> Refusal | None:
    """The first row of the table that this body runs into."""
    for refusal in table:
        value: Any = raw
        for name in refusal.field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and not refusal.harmless(value):
            return refusal
    return None


def token_budget(param: str, prompt: int, asked: int | None, default: int | None, limit: int) -> int:
    """How many tokens a request may make so that prompt and answer fit `limit` together.

    `asked` is the client's number and must fit as it stands; without it, `default` or all that fits, whichever is
    less. Raises ApiError `context_length_exceeded`; `param` is the field that holds the prompt.
    """
    room = limit - prompt
    if room < 1:
        raise context_length_exceeded(param, limit, prompt)
    if asked is not None and asked > room:
        raise context_length_exceeded(param, limit, prompt, asked)
    return asked or min(room, default or room)


def _check_together(parsed: GenerationRequest) -> None:
    """What no single field can tell."""
    if parsed.stream_options is not None and not parsed.stream:
        raise bad_request("`stream_options` is only allowed when `stream` is true.", "stream_options")
    if parsed.stream_options is not None:
        _refuse_extra("stream_options", parsed.stream_options.model_extra)
    if isinstance(parsed, ChatCompletionRequest):
        for index, message in enumerate(parsed.messages):
            _refuse_extra(f"messages.{index}", message.model_extra)
            for part, content in enumerate([] if isinstance(message.content, str) else message.content):
                _refuse_extra(f"messages.{index}.content.{part}", content.model_extra)


def _refuse_extra(where: str, extra: dict[str, Any] | None) -> None:
    """Below the top level an unknown field passes only while it says nothing."""
    for name, value in (extra or {}).items():
        if value is not None and value is not False and not _empty(value):
            param = f"{where}.{clip(name)}"
            raise bad_request(f"`{param}` is not supported. Leave it out.", param, "unsupported_parameter")


def _explain(error: ValidationError, raw: dict[str, Any]) -> ApiError:
    """The error deepest in the body: of a union's branches, the one that the client most likely meant."""
    found = [(_param(details, raw), details) for details in error.errors(include_url=False)[:_MOST_ERRORS]]
    param, details = max(found, key=lambda item: item[0].count("."))
    branches = dict.fromkeys(_complaint(other) for name, other in found if name == param)
    message = f"`{param}` {' or '.join(branches)}." if param else f"The body is wrong: {details['msg']}."
    return bad_request(message, param or None, "missing_parameter" if details["type"] == "missing" else "invalid_value")


def _param(details: ErrorDetails, raw: Any) -> str:
    """The dotted path of an error in the body, without the names of union branches that pydantic puts in."""
    path: list[str] = []
    value = raw
    loc = details["loc"]
    for depth, step in enumerate(loc):
        absent = details["type"] == "missing" and depth == len(loc) - 1
        if isinstance(value, dict) and (step in value or absent):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        path.append(clip(str(step)))
    return ".".join(path)


def _complaint(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return "is required"
    if details["type"] in ("too_long", "too_short"):
        return details["msg"].partition(" after validation")[0].replace("List should have", "must have")
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("Input should have", "must have").replace("Extra inputs are not permitted", "is unknown")
    shown = details["input"]
    scalar = isinstance(shown, str | int | float) and len(str(shown)) <= 40
    return f"{message}, not {msgspec.json.encode(shown).decode()}" if scalar else message
