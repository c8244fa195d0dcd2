"""Prompts of requests, as token ids. This is work for the threads of `Services.in_thread`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from app.api.errors import AnswerWarning, ApiError, bad_request, clip, context_length_exceeded
from app.api.schemas import TemplatedRequest
from app.api.services import Services
from app.api.validation import check_template, warn_of_prompt
from app.messages import EngineInfo
from app.text.chat_template import ChatTemplateError
from app.text.parsers import END_THINK, THINK
from app.text.tokenizer import PromptTooLong

MAX_COUNTED_BYTES = 2**20
"""Length in UTF-8 of a text whose tokens /tokenize counts, whatever the context. A byte may be a token of 300 bytes."""

logger = logging.getLogger(__name__)

_NO_REASONING = f"\n{END_THINK}\n\n"
"""Text that ends reasoning which a prompt has opened, as templates write it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt. `in_reasoning` if its end opens a reasoning block for the model to continue.

    `begun_call` is the beginning of a forced call, with which the prompt ends. `warnings` go into the answer.
    """

    token_ids: list[int]
    in_reasoning: bool = False
    begun_call: str = ""
    warnings: Sequence[AnswerWarning] = ()


def of_conversation(services: Services, body: TemplatedRequest, info: EngineInfo, *, must_fit: bool = True) -> Prompt:
    """Return the prompt of a conversation. Raises ApiError that names the field.

    A forced call begins the answer, so that the model does not reason before it.
    """
    template, call_format = services.tokenizer.template_for(body.offers_tools), services.call_format
    check_template(body, services)
    if num_strict := sum(bool(tool.function.strict) for tool in body.functions):
        logger.info("tools with strict: %d; it is a wish here, and their calls are not checked", num_strict)
    switches = {**services.config.default_chat_template_kwargs, **body.switches(template.switches)}
    if body.forces_call and "enable_thinking" in template.switches:
        switches["enable_thinking"] = False
    try:
        text, mark, is_joined = services.tokenizer.render(
            [message.for_template() for message in body.messages],
            tools=body.offered_tools or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            switches=switches,
        )
    except ChatTemplateError as error:
        raise bad_request(clip(str(error), 300), "messages") from None
    end = body.messages[-1].text if body.continue_final_message else services.tokenizer.end_of(text)
    in_reasoning = end.rfind(THINK) > end.rfind(END_THINK)
    begun_call = call_format.prefix(body.forced_function) if body.forces_call and call_format else ""
    if begun_call:
        text += _NO_REASONING + begun_call if in_reasoning else begun_call
        in_reasoning = False
    special = bool(body.add_special_tokens)
    token_ids = encode(services, text, "messages", info, add_special_tokens=special, must_fit=must_fit, mark=mark)
    return Prompt(token_ids, in_reasoning, begun_call, warn_of_prompt(body, services, is_joined))


def encode(
    services: Services,
    text: str,
    param: str,
    info: EngineInfo,
    *,
    add_special_tokens: bool,
    must_fit: bool = True,
    mark: str = "",
) -> list[int]:
    """Return the token ids of `text`. `mark` is that of `Tokenizer.render`.

    Raises ApiError for a token that the model does not have, and before most of the work for a text that is longer
    than the context. Without `must_fit` that is raised only above MAX_COUNTED_BYTES.
    """
    limit = info.max_model_len if must_fit or len(text.encode()) > MAX_COUNTED_BYTES else None
    try:
        token_ids = services.tokenizer.encode(text, limit, add_special_tokens=add_special_tokens, mark=mark)
    except PromptTooLong as error:
        raise context_length_exceeded(param, info.max_model_len, error.at_least, at_least=True) from None
    if (max_id := max(token_ids, default=0)) >= info.vocab_size:
        raise bad_request(
            f"The tokenizer makes the token id {max_id} of `{param}`, but this model's vocabulary ends at "
            f"{info.vocab_size - 1}: its tokenizer.json is another model's. Tell those who run this server.",
            param,
        )
    return token_ids


def bare(
    services: Services, prompt: str | list[int], param: str, info: EngineInfo, *, add_special_tokens: bool
) -> Prompt:
    """Return a bare prompt. `param` is its field. Raises ApiError if it is empty, too long, or has unknown ids."""
    if isinstance(prompt, str):
        token_ids = encode(services, prompt, param, info, add_special_tokens=add_special_tokens)
    else:
        check_ids(param, prompt, info)
        token_ids = prompt
    if not token_ids:
        raise bad_request(f"`{param}` is empty. Send at least one token.", param)
    return Prompt(token_ids)


def check_ids(param: str, token_ids: list[int] | None, info: EngineInfo) -> None:
    """Raise ApiError for the first id beyond the model's vocabulary."""
    if token_ids and max(token_ids) >= info.vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= info.vocab_size)
        raise unknown_id(f"{param}.{index}", token_ids[index], info)


def unknown_id(param: str, token_id: int, info: EngineInfo) -> ApiError:
    """Return the error for a token id beyond the model's vocabulary."""
    return bad_request(
        f"`{param}` has the token id {token_id}, but this model's vocabulary ends at {info.vocab_size - 1}.", param
    )
