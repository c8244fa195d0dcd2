"""What a request may not ask: one table of refusals, and what no single field can tell.

Nothing a client sends is silently ignored: a field is honoured (protocol.py), refused by name here unless its value
changes nothing, or unknown and at the top level, which is tolerated because SDKs and gateways add their own
bookkeeping ("user", "metadata", "store", "service_tier", ...).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from app.api.errors import bad_request, clip, context_length_exceeded
from app.api.protocol import (
    Body,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    TemplatedRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from app.text.chat_template import ChatTemplate

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
_TOOLS = "`{}`: the older form of function calling, which is not supported. Use `tools`."
_SAMPLING = "`{}`: not supported yet; `temperature` and `seed` are. Leave it out, or send what changes nothing."
_OTHER_NAME = "`{}`: not this API's name for it. Use `max_tokens`."
_OUTPUT = "`{}`: not supported. Leave it out or send the default."
_TEMPLATE = "`{}`: not supported, the model's own chat template is used. Leave it out."
_THINKING = "`{}`: not supported. `chat_template_kwargs` sets what the model's chat template knows (`enable_thinking`)."
_MODALITY = "This model reads and writes text only. Leave `{}` out."
_ENGINE = "`{}`: no meaning for this engine. Leave it out."

REFUSALS = tuple(
    Refusal(field, harmless, why.format(field))
    for field, harmless, why in (
        ("logprobs", _is(False), _LOGPROBS),
        ("top_logprobs", _number(0), _LOGPROBS),
        ("prompt_logprobs", _never, _LOGPROBS),
        ("return_logprob", _is(False), _LOGPROBS),
        ("n_probs", _number(0), _LOGPROBS),
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
        ("tool_choice", _is("none", "auto"), _GRAMMAR.replace("Leave `{}` out", 'Use `{}` "auto" or "none"')),
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
        ("min_new_tokens", _number(0), _SAMPLING),
        ("repeat_penalty", _number(1), _SAMPLING),
        ("typical_p", _number(1), _SAMPLING),
        ("mirostat", _number(0), _SAMPLING),
        ("dry_multiplier", _number(0), _SAMPLING),
        ("xtc_probability", _number(0), _SAMPLING),
        ("top_n_sigma", _number(-1, 0), _SAMPLING),
        ("thinking_token_budget", _never, _SAMPLING),
        ("max_new_tokens", _never, _OTHER_NAME),
        ("n_predict", _never, _OTHER_NAME),
        ("suffix", _empty, "`{}` is not supported: this is no fill-in-the-middle model. Leave it out."),
        ("no_stop_trim", _is(False), _OUTPUT),
        ("stop_regex", _empty, "`{}` is not supported. Use `stop` with plain strings."),
        ("spaces_between_special_tokens", _is(True, False), _OUTPUT),
        ("return_tokens_as_token_ids", _is(False), _OUTPUT),
        ("return_token_ids", _is(False), _OUTPUT),
        ("return_hidden_states", _is(False), _OUTPUT),
        ("stream_options.include_obfuscation", _is(False), _OUTPUT),
        ("chat_template", _never, _TEMPLATE),
        (
            "include_reasoning",
            _is(True),
            "`{}` is not supported: leave `reasoning_content` unread, or see `chat_template_kwargs`.",
        ),
        ("reasoning_effort", _never, _THINKING),
        ("enable_thinking", _never, _THINKING),
        ("thinking", _never, _THINKING),
        ("reasoning", _never, _THINKING),
        ("stream_reasoning", _is(True), _THINKING),
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

_CHAT_ONLY = "`{}` belongs to /v1/chat/completions. Leave it out."
_FOR_CHAT = (
    ("max_completion_tokens", _never, "`{}` belongs to /v1/chat/completions. Use `max_tokens` here."),
    ("tools", _empty, _CHAT_ONLY),
    ("parallel_tool_calls", _is(True, False), _CHAT_ONLY),
    ("add_generation_prompt", _is(True), _CHAT_ONLY),
    ("continue_final_message", _is(False), _CHAT_ONLY),
    ("chat_template_kwargs", _empty, _CHAT_ONLY),
    ("separate_reasoning", _is(True, False), _CHAT_ONLY),
)
_CHATS_PROMPT = Refusal("prompt", _never, "`prompt` belongs to bare completions. Leave it out beside `messages`.")
_PROMPTS_CHAT = Refusal("messages", _never, "`messages` belongs to chat. Leave it out beside `prompt`.")
ELSEWHERE: dict[type[Body], tuple[Refusal, ...]] = {
    ChatCompletionRequest: (
        Refusal("prompt", _never, "`prompt` belongs to /v1/completions. Send `messages` here."),
        Refusal("echo", _is(False), "`echo` belongs to /v1/completions. Leave it out."),
    ),
    CompletionRequest: (
        Refusal("messages", _never, "`messages` belongs to /v1/chat/completions. Send `prompt` here."),
        *(Refusal(field, harmless, why.format(field)) for field, harmless, why in _FOR_CHAT),
    ),
    TokenizeChatRequest: (_CHATS_PROMPT,),
    TokenizeRequest: (_PROMPTS_CHAT,),
}
"""Fields of the other endpoint."""


def refusals_of(model: type[Body]) -> tuple[Refusal, ...]:
    """What a body for `model` may not say."""
    return (REFUSALS if issubclass(model, GenerationRequest) else ()) + ELSEWHERE.get(model, ())


def field_table() -> list[tuple[str, str]]:
    """Rows (fields, what happens to them) for the README: what is honoured, then what is refused and why."""
    never = {"n", "best_of"}  # Parsed, so that a wrong value is named; 1 is all they may be.
    both = set(ChatCompletionRequest.model_fields) & set(CompletionRequest.model_fields) - never
    rows = [(_named(both), "honoured")]
    for path, model in (("/v1/chat/completions", ChatCompletionRequest), ("/v1/completions", CompletionRequest)):
        rows.append((_named(set(model.model_fields) - both - never), f"honoured by {path}"))
    refused: dict[str, list[Refusal]] = {}
    for refusal in REFUSALS:
        refused.setdefault(
            refusal.why.removeprefix(f"`{refusal.field}`: ").replace(f"`{refusal.field}`", "them"), []
        ).append(refusal)
    for why, refusals in refused.items():
        told = refusals[0].why if len(refusals) == 1 else why[0].upper() + why[1:]
        rows.append((_named([refusal.field for refusal in refusals]), told))
    return rows


def _named(fields: Sequence[str] | set[str]) -> str:
    return ", ".join(f"`{field}`" for field in (sorted(fields) if isinstance(fields, set) else fields))


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


def check_together(parsed: Body) -> None:
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
            raise bad_request(f"`{param}` may not be true. {_GRAMMAR.format('it')}", param, "unsupported_parameter")
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
    if asked.offered_tools and "tools" not in template.knows:
        raise bad_request(
            "This model's chat template has no place for `tools`. Leave them out, or describe them in a message.",
            "tools",
            "unsupported_parameter",
        )
    for name, value in (asked.chat_template_kwargs or {}).items():
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
        if value is not None and value is not False and not _empty(value):
            param = f"{where}.{clip(name)}"
            raise bad_request(f"`{param}` is not supported. Leave it out.", param, "unsupported_parameter")
