"""Table of the fields that are refused.

No field is ignored in silence. It is honoured (schemas.py), or refused here unless its value changes nothing. An
unknown field at the top level leads to a warning in the answer, unless it is a label that SDKs and gateways add.
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


def _number(*neutral: float) -> Harmless:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value in neutral


def _is(*neutral: object) -> Harmless:
    return lambda value: any(type(value) is type(item) and value == item for item in neutral)


def _not_above_one(value: Any) -> bool:
    """Return True also for a value that is not a count, because schemas.py refuses that."""
    return not isinstance(value, int) or value <= 1


def empty(value: Any) -> bool:
    return isinstance(value, list | dict | str) and not value


def _is_known_choice(value: Any) -> bool:
    """Return True also for a named function without a name, because schemas.py refuses that."""
    named = isinstance(value, dict) and value.get("type") == "function"
    return named or (isinstance(value, str) and value in ("none", "auto", "required"))


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
_OUTPUT = "`{}`: not supported. Leave it out or send the default."
_TEMPLATE = "`{}`: not supported, the model's own chat template is used. Leave it out."
_THINKING = "`{}`: not supported. Use `reasoning_effort` or `enable_thinking`."
_MODALITY = "This model reads and writes text only. Leave `{}` out."
_ENGINE = "`{}`: no meaning for this engine. Leave it out."


def _table(*rows: tuple[str, Harmless, str]) -> tuple[Refusal, ...]:
    """Return the refusals of rows. The fields of a row stand in one string."""
    return tuple(
        Refusal(field, harmless, why.format(field)) for fields, harmless, why in rows for field in fields.split()
    )


REFUSALS = _table(
    ("logprobs return_logprob", _is(False), _LOGPROBS),
    ("top_logprobs n_probs top_logprobs_num", _number(0), _LOGPROBS),
    ("prompt_logprobs", _never, _LOGPROBS),
    ("response_format", _is({"type": "text"}), GRAMMAR),
    ("structured_outputs", empty, GRAMMAR),
    ("guided_json guided_regex guided_choice guided_grammar guided_decoding_backend", _never, GRAMMAR),
    ("guided_whitespace_pattern json_schema regex grammar ebnf structural_tag", _never, GRAMMAR),
    ("tool_choice", _is_known_choice, _CHOICE),
    ("functions", empty, _TOOLS),
    ("function_call", _is("none", "auto"), _TOOLS),
    ("best_of", _not_above_one, _BEST_OF),
    ("use_beam_search", _is(False), "Beam search is not supported: DFlash verifies one sequence. Leave `{}` out."),
    ("length_penalty typical_p", _number(1), _SAMPLING),
    ("logits_processors", empty, _SAMPLING),
    ("custom_logit_processor thinking_token_budget", _never, _SAMPLING),
    ("allowed_token_ids", _never, _CANDIDATES),
    ("bad_words", empty, _CANDIDATES),
    ("mirostat dry_multiplier xtc_probability", _number(0), _SAMPLING),
    ("top_n_sigma", _number(-1, 0), _SAMPLING),
    ("max_new_tokens n_predict max_output_tokens", _never, _OTHER_NAME),
    ("min_new_tokens", _number(0), "`{}`: not this API's name for it. Use `min_tokens`."),
    ("repeat_penalty", _number(1), "`{}`: not this API's name for it. Use `repetition_penalty`."),
    ("stop_sequences", empty, "`{}`: not this API's name for it. Use `stop`."),
    ("input_ids", _never, "`{}`: not this API's name for it. Send token ids as `prompt` to /v1/completions."),
    ("extra_body", empty, "`{}`: the SDK's argument, not a field. Send what is in it at the top level."),
    ("sampling_params", empty, "`{}`: not this API's form. Send what is in it at the top level."),
    ("suffix", empty, "`{}` is not supported: this is no fill-in-the-middle model. Leave it out."),
    ("no_stop_trim return_tokens_as_token_ids return_token_ids return_hidden_states", _is(False), _OUTPUT),
    ("stream_options.include_obfuscation", _is(False), _OUTPUT),
    ("stop_regex", empty, "`{}` is not supported. Use `stop` with plain strings."),
    ("spaces_between_special_tokens", _is(True, False), _OUTPUT),
    ("chat_template verbosity", _never, _TEMPLATE),
    ("thinking reasoning thinking_budget", _never, _THINKING),
    ("stream_reasoning", _is(True), _THINKING),
    ("documents", empty, _TEMPLATE),
    ("truncate_prompt_tokens", _never, "`{}` is not supported: a prompt is never cut in silence. Shorten it."),
    ("modalities", _is(["text"]), _MODALITY),
    ("audio", _never, _MODALITY),
    ("mm_processor_kwargs", empty, _MODALITY),
    ("web_search_options", _never, "This server searches nothing. Leave `{}` out."),
    ("prompt_embeds input_embeds", _never, "Prompts are text or token ids here. Leave `{}` out."),
    ("priority", _number(0), "Requests are served in the order of their arrival. Leave `{}` out."),
    ("prediction", _never, "The DFlash draft predicts the output here. Leave `{}` out."),
    ("lora_path lora_request kv_transfer_params", _never, _ENGINE),
    ("session_params custom_params vllm_xargs", empty, _ENGINE),
)

_CHAT_ONLY = "`{}` belongs to /v1/chat/completions. Leave it out."
_FOR_CHAT = _table(
    ("max_completion_tokens", _never, "`{}` belongs to /v1/chat/completions. Use `max_tokens` here."),
    ("tools", empty, _CHAT_ONLY),
    ("tool_choice", _is("none", "auto"), _CHAT_ONLY),
    ("parallel_tool_calls", _is(True, False), _CHAT_ONLY),
    ("add_generation_prompt", _is(True), _CHAT_ONLY),
    ("continue_final_message", _is(False), _CHAT_ONLY),
    ("chat_template_kwargs", empty, _CHAT_ONLY),
    ("separate_reasoning", _is(True, False), _CHAT_ONLY),
    ("enable_thinking reasoning_effort", _never, _CHAT_ONLY),
    ("include_reasoning", _is(True), _CHAT_ONLY),
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
    ("text.format", _is({"type": "text"}), GRAMMAR),
    ("text.verbosity", _never, _TEMPLATE),
    ("truncation", _is("disabled"), _UNCUT),
    ("context_management", empty, _UNCUT),
    ("max_tool_calls", _never, "`{}` counts calls of built-in tools, and there are none here. Leave it out."),
    ("moderation", _never, "`{}`: this server moderates nothing. Leave it out."),
    (
        "include",
        lambda value: isinstance(value, list) and all(item == "reasoning.encrypted_content" for item in value),
        '`{}` may have only "reasoning.encrypted_content": there are no log probabilities and no built-in tools.',
    ),
    ("reasoning.summary", _is("auto"), '`{}`: reasoning comes whole, not summarised. Send "auto" or leave it out.'),
    ("tool_choice", _is_known_choice, _CHOICE),
    ("n", _number(1), "`{}`: a response is one answer. Leave it out."),
    ("messages", _never, "`{}` belongs to /v1/chat/completions. Send `input` here."),
)
"""Fields of /v1/responses. Those of chat are refused too, unless `ResponsesRequest` has them."""


def _for_responses() -> tuple[Refusal, ...]:
    known = ResponsesRequest.model_fields.keys() | {refusal.field for refusal in RESPONSES}
    others = tuple(refusal for refusal in REFUSALS if refusal.field not in known)
    chat = ChatCompletionRequest.model_fields.keys() - known - {refusal.field for refusal in REFUSALS}
    return RESPONSES + others + _table((" ".join(sorted(chat)), _never, _CHAT_ONLY))


REFUSED: dict[type[Body], tuple[Refusal, ...]] = defaultdict(
    lambda: REFUSALS,
    {model: REFUSALS + refusals for model, refusals in ELSEWHERE.items()} | {ResponsesRequest: _for_responses()},
)
"""The refusals for bodies of a model."""

LABELS = frozenset(("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"))
"""Fields that mean nothing here, and pass without a warning."""


def asks(value: Any) -> bool:
    """Return True unless the value of an unknown field is null, false or empty, which asks for nothing."""
    return value is not None and value is not False and not empty(value)
