"""Table of the fields that are refused.

No field is ignored in silence. It is honoured (schemas.py), or refused here unless its value changes nothing. LEFT_OUT
and unknown fields lead to a warning in the answer, unless these are labels that SDKs and gateways add.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from app.api.responses_schemas import ResponsesRequest
from app.api.schemas import Body, ChatCompletionRequest, CompletionRequest, TokenizeChatRequest, TokenizeRequest

Harmless = Callable[[Any], bool]


class Refusal(NamedTuple):
    """A refused field. `why` is the message, unless the field is absent, null, or `harmless(value)`."""

    field: str
    harmless: Harmless
    why: str


def empty(value: Any) -> bool:
    return isinstance(value, list | dict | str) and not value


def asks(value: Any) -> bool:
    """Return True unless a value is null, false or empty, which asks for nothing."""
    return value is not None and value is not False and not empty(value)


def _number(*neutral: float) -> Harmless:
    """Return a check for one of these numbers, or for what asks for nothing."""
    return lambda value: not asks(value) or (type(value) in (int, float) and value in neutral)


def _only(*neutral: object) -> Harmless:
    """Return a check for one of these values, where false or an empty one asks for something."""
    return lambda value: any(type(value) is type(item) and value == item for item in neutral)


def _is(*neutral: object) -> Harmless:
    """Return a check for one of these values, or for what asks for nothing."""
    return lambda value: not asks(value) or _only(*neutral)(value)


def _asks_nowhere(value: Any) -> bool:
    """Return True also for an object whose values ask for nothing."""
    return not (any(map(asks, value.values())) if isinstance(value, dict) else asks(value))


def _is_text(value: Any) -> bool:
    """Return True also for the format of plain text, if nothing else is asked for beside it."""
    return _asks_nowhere(value | {"type": None} if isinstance(value, dict) and value.get("type") == "text" else value)


def _not_above_one(value: Any) -> bool:
    """Return True also for a value that is not a count, because schemas.py refuses that."""
    return not isinstance(value, int) or value <= 1


def _is_known_choice(value: Any) -> bool:
    """Return True also for a named function without a name, because schemas.py refuses that."""
    named = isinstance(value, dict) and value.get("type") == "function"
    return named or (isinstance(value, str) and value in ("none", "auto", "required"))


def _is_no_schema(value: Any) -> bool:
    return not isinstance(value, dict) or value.get("type") not in ("grammar", "json_schema", "json_object")


def _or_record(refusal: "Refusal") -> Harmless:
    """Return a check that passes log probabilities of an earlier answer too, which are objects and lists."""
    return lambda value: refusal.harmless(value) or ("logprob" in refusal.field and isinstance(value, dict | list))


_never = _is()

_LOGPROBS = (
    "Log probabilities are not available: speculative verification here hands out tokens, not distributions. "
    "Leave `{}` out."
)
GRAMMAR = (
    "Output cannot be held to a grammar, schema or pattern. Leave `{}` out. For data in a schema, offer it as the "
    "parameters of one tool, with a named `tool_choice`, and check the answer: docs/structured-output.md."
)
_CHOICE = (
    '`{}` is "none", "auto", "required" or a named function. Other forms, like "allowed_tools" or a tool that is no '
    "function, are not supported. Offer fewer `tools` instead."
)
_TOOLS = "`{}`: the older form of function calling, which is not supported. Use `tools`."
_BEST_OF = "`{}` above 1 is not supported: it ranks by log probabilities. Use `n`, and choose yourself."
_SAMPLING = "`{}`: not supported. Leave it out, or send what changes nothing."
_CANDIDATES = "`{}`: not supported. `logit_bias` makes single tokens likely or unlikely."
_OTHER_NAME = "`{}`: not this API's name for it. Use `max_tokens`."
_DEFAULT = "`{}`: not supported. Leave it out or send the default."
_TEMPLATE = "`{}`: not supported, the model's own chat template is used. Leave it out."
_THINKING = "`{}`: not supported. Use `reasoning_effort` or `enable_thinking`."
_MODALITY = "This model reads and writes text only. Leave `{}` out."
_ENGINE = "`{}`: no meaning for this engine. Leave it out."


def _table(*rows: tuple[str, Harmless, str]) -> tuple[Refusal, ...]:
    """Return the refusals of rows. The fields of a row stand in one string."""
    return tuple(
        Refusal(field, harmless, why.format(field)) for fields, harmless, why in rows for field in fields.split()
    )


_OUTPUT = _table(
    ("logprobs return_logprob", _never, _LOGPROBS),
    ("top_logprobs n_probs top_logprobs_num", _number(0), _LOGPROBS),
    ("prompt_logprobs", _never, _LOGPROBS),
    ("response_format", _is_text, GRAMMAR),
    ("structured_outputs guided_regex guided_choice guided_grammar guided_decoding_backend", _never, GRAMMAR),
    ("guided_json json_schema", _only(False, ""), GRAMMAR),  # {} is a schema, of any JSON
    ("guided_whitespace_pattern regex grammar ebnf structural_tag", _never, GRAMMAR),
)
REFUSALS = _OUTPUT + _table(
    ("tool_choice", _is_known_choice, _CHOICE),
    ("functions", _never, _TOOLS),
    ("function_call", _is("none", "auto"), _TOOLS),
    ("best_of", _not_above_one, _BEST_OF),
    ("use_beam_search", _never, "Beam search is not supported: DFlash verifies one sequence. Leave `{}` out."),
    ("length_penalty typical_p", _number(1), _SAMPLING),
    ("logits_processors custom_logit_processor thinking_token_budget", _never, _SAMPLING),
    ("allowed_token_ids bad_words", _never, _CANDIDATES),
    ("mirostat dry_multiplier xtc_probability", _number(0), _SAMPLING),
    ("top_n_sigma", _number(-1, 0), _SAMPLING),
    ("max_new_tokens n_predict max_output_tokens", _never, _OTHER_NAME),
    ("min_new_tokens", _number(0), "`{}`: not this API's name for it. Use `min_tokens`."),
    ("repeat_penalty", _number(1), "`{}`: not this API's name for it. Use `repetition_penalty`."),
    ("stop_sequences", _never, "`{}`: not this API's name for it. Use `stop`."),
    ("input_ids", _never, "`{}`: not this API's name for it. Send token ids as `prompt` to /v1/completions."),
    ("extra_body", _never, "`{}`: the SDK's argument, not a field. Send what is in it at the top level."),
    ("sampling_params", _never, "`{}`: not this API's form. Send what is in it at the top level."),
    ("suffix", _never, "`{}` is not supported: this is no fill-in-the-middle model. Leave it out."),
    ("no_stop_trim return_tokens_as_token_ids return_token_ids return_hidden_states", _never, _DEFAULT),
    ("stream_options.include_obfuscation", _never, _DEFAULT),
    ("stop_regex", _never, "`{}` is not supported. Use `stop` with plain strings."),
    ("spaces_between_special_tokens", _is(True), _DEFAULT),
    ("chat_template documents", _never, _TEMPLATE),
    ("thinking reasoning thinking_budget", _only({}, "", []), _THINKING),  # false turns it off
    ("stream_reasoning", _only(True), _THINKING),
    ("truncate_prompt_tokens", _never, "`{}` is not supported: a prompt is never cut in silence. Shorten it."),
    ("modalities", _is(["text"]), _MODALITY),
    ("audio", _never, _MODALITY),
    ("mm_processor_kwargs", _never, _MODALITY),
    ("web_search_options", _never, "This server searches nothing. Leave `{}` out."),
    ("prompt_embeds input_embeds", _never, "Prompts are text or token ids here. Leave `{}` out."),
    ("priority", _number(0), "Requests are served in the order of their arrival. Leave `{}` out."),
    ("prediction", _never, "The DFlash draft predicts the output here. Leave `{}` out."),
    ("lora_path lora_request kv_transfer_params", _never, _ENGINE),
    ("session_params custom_params vllm_xargs", _never, _ENGINE),
)

_CHAT_ONLY = "`{}` belongs to /v1/chat/completions. Leave it out."
_FOR_CHAT = _table(
    ("max_completion_tokens", _never, "`{}` belongs to /v1/chat/completions. Use `max_tokens` here."),
    ("tools continue_final_message enable_thinking", _never, _CHAT_ONLY),
    ("tool_choice", _is("none", "auto"), _CHAT_ONLY),
    ("parallel_tool_calls add_generation_prompt separate_reasoning", _is(True), _CHAT_ONLY),
    ("chat_template_kwargs", _asks_nowhere, _CHAT_ONLY),
    ("reasoning_effort", _is("none"), _CHAT_ONLY),
    ("include_reasoning", _only(True), _CHAT_ONLY),  # false would leave out text
)
ELSEWHERE: dict[type[Body], tuple[Refusal, ...]] = {
    ChatCompletionRequest: (
        Refusal("prompt", _never, "`prompt` belongs to /v1/completions. Send `messages` here."),
        Refusal("echo", _is(False), "`echo` belongs to /v1/completions. Leave it out."),
    ),
    CompletionRequest: (
        Refusal("messages", _never, "`messages` belongs to /v1/chat/completions. Send `prompt` here."),
        *_FOR_CHAT,
    ),
    TokenizeChatRequest: (
        Refusal("prompt", _never, "`prompt` belongs to bare completions. Leave it out when you send `messages`."),
    ),
    TokenizeRequest: _FOR_CHAT,
}
"""Fields of other endpoints."""


_ONE_NAME = "`{}`: not this API's name for it. Use `max_output_tokens`."
_UNCUT = "`{}`: a prompt is never cut in silence. Shorten it, and leave this out."
RESPONSES = _table(
    ("max_tokens max_completion_tokens max_new_tokens n_predict", _never, _ONE_NAME),
    ("conversation", _never, "`{}`: no conversations are kept here. Send `previous_response_id`, or all as `input`."),
    ("background", _is(False), "`{}`: an answer comes with its request here. Leave it out."),
    ("prompt", _never, "`{}`: no templates of prompts are stored here. Send `instructions` and `input`."),
    ("text.format", _is_text, GRAMMAR),
    ("truncation", _is("disabled"), _UNCUT),
    ("context_management", _never, _UNCUT),
    ("max_tool_calls", _never, "`{}` counts calls of built-in tools, and there are none here. Leave it out."),
    ("moderation", _never, "`{}`: this server moderates nothing. Leave it out."),
    (
        "include",
        lambda value: isinstance(value, list) and all(item == "reasoning.encrypted_content" for item in value),
        '`{}` may have only "reasoning.encrypted_content": there are no log probabilities and no built-in tools.',
    ),
    ("tool_choice", _is_known_choice, _CHOICE),
    ("n", _number(1), "`{}`: a response is one answer. Leave it out."),
    ("messages", _never, "`{}` belongs to /v1/chat/completions. Send `input` here."),
    ("enable_thinking reasoning_effort", _only(), "`{}`: a field of chat. Use `reasoning.effort` here."),
)
"""Fields of /v1/responses. Those of chat are refused too, unless `ResponsesRequest` has them."""


def _for_responses() -> tuple[Refusal, ...]:
    known = ResponsesRequest.model_fields.keys() | {refusal.field for refusal in RESPONSES}
    others = tuple(refusal for refusal in REFUSALS if refusal.field not in known)
    chat = ChatCompletionRequest.model_fields.keys() - known - {refusal.field for refusal in REFUSALS}
    neutral = {row.field: row.harmless for row in _FOR_CHAT}
    return RESPONSES + others + _table(*((field, neutral.get(field, _never), _CHAT_ONLY) for field in sorted(chat)))


REFUSED: dict[type[Body], tuple[Refusal, ...]] = defaultdict(
    lambda: REFUSALS,
    {model: REFUSALS + refusals for model, refusals in ELSEWHERE.items()} | {ResponsesRequest: _for_responses()},
)
"""The refusals for bodies of a model."""

LEFT_OUT = {
    row.field: row
    for row in _table(
        ("verbosity text.verbosity", _never, "`{}`: it changed nothing, because chat templates know no such wish."),
        ("reasoning.summary", _is("auto"), "`{}`: it changed nothing, because reasoning comes whole, not summarised."),
    )
}
"""Fields that pass with a warning, because clients send them whatever the model."""

NESTED = {row.field: row._replace(harmless=_or_record(row)) for row in _OUTPUT} | {
    "format": Refusal("format", _is_no_schema, GRAMMAR.format("format"))
}
"""What an unknown field at any depth may not ask for."""

LABELS = frozenset(("user", "metadata", "client_metadata", "service_tier", "safety_identifier", "prompt_cache_key"))
"""Fields that mean nothing here, and pass without a warning."""
