"""Prompts of requests, as token ids."""

import asyncio
import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.api.errors import ApiError, bad_request, clip, context_length_exceeded
from app.api.forced_call import Prefix
from app.api.schemas import TemplatedRequest
from app.api.services import Services
from app.api.validation import check_strict, check_template, warn_of_names, warn_of_reasoning
from app.engine_config import EngineInfo
from app.text.chat_template import ChatTemplateError
from app.text.parsers import END_THINK, THINK
from app.text.tokenizer import PromptTooLong

_MAX_TEMPLATE_ERROR = 300
_BEHIND_REASONING = "\n\n"
"""Text that templates and models write between the end of the reasoning and the rest."""
_END_LENGTH = 2 * len(_BEHIND_REASONING) + len(END_THINK)
"""Characters at the end of a prompt in which a template's own mark of reasoning stands."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt. `in_reasoning` if its end opens a reasoning block for the model to continue.

    `prefix` begins a forced call. It is a part of the prompt, unless it follows reasoning. `warnings` go into
    the answer.
    """

    token_ids: list[int]
    in_reasoning: bool = False
    prefix: Prefix | None = None
    warnings: Sequence[dict[str, Any]] = ()

    @property
    def max_length(self) -> int:
        """The number of tokens, with those of a prefix that is still to come."""
        prefix = self.prefix
        return len(self.token_ids) + (len(prefix.behind_reasoning) if prefix else 0)


async def render_and_encode(
    services: Services, body: TemplatedRequest, info: EngineInfo, *, must_fit: bool = True
) -> Prompt:
    """Return the prompt of a conversation, rendered and encoded in a thread. Raises ApiError that names the field."""
    template = services.tokenizer.chat_template
    if services.refuse_strict:
        check_strict(body)
    check_template(body, template, services.tool_family)

    conversation = [message.for_template() for message in body.messages]
    render = functools.partial(
        template.render,
        tools=body.offered_tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        switches={**services.template_kwargs, **body.switches(template.switches)},
    )
    warnings = [] if template.writes_reasoning else warn_of_reasoning(body)
    try:
        text = await asyncio.to_thread(render, conversation)
        if any(message.name for message in body.messages):
            marked, marks = _with_marked_names(conversation)
            shown = await asyncio.to_thread(render, marked)
            warnings += warn_of_names(body, lambda index: marks[index] in shown)
    except ChatTemplateError as error:
        raise bad_request(clip(str(error), _MAX_TEMPLATE_ERROR), "messages") from None
    end = body.messages[-1].text if body.continue_final_message else text[-_END_LENGTH:]
    in_reasoning = end.rfind(THINK) > end.rfind(END_THINK)
    prefix = None
    if body.forces_call and services.tool_family is not None:
        begun = services.tool_family.prefix(body.forced_function)
        may_reason = in_reasoning or (THINK in (template.source or "") and END_THINK not in end)
        openings = (begun, _BEHIND_REASONING + begun) if may_reason else ()
        encoded = [
            await encode_text(services, opening, "tool_choice", info, add_special_tokens=False, must_fit=must_fit)
            for opening in openings
        ]
        prefix = Prefix(begun, *encoded)
        text += "" if may_reason else begun
    special = bool(body.add_special_tokens)
    token_ids = await encode_text(services, text, "messages", info, add_special_tokens=special, must_fit=must_fit)
    return Prompt(token_ids, in_reasoning, prefix, warnings)


def _with_marked_names(conversation: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the conversation with a mark of its own in each name, and the marks, which show if a name is written."""
    mark = secrets.token_hex(8)
    marks = [f"{mark}-{index}-" for index in range(len(conversation))]
    named = [
        message | {"name": message["name"] + own} if message.get("name") else message
        for message, own in zip(conversation, marks, strict=True)
    ]
    return named, marks


async def encode_text(
    services: Services, text: str, param: str, info: EngineInfo, *, add_special_tokens: bool, must_fit: bool = True
) -> list[int]:
    """Return the token ids of `text`, encoded in a thread.

    Raises ApiError for a token that the model does not have. With `must_fit` also, and before the work, for a text that
    is certainly longer than the context.
    """
    max_tokens = info.max_model_len if must_fit else None
    encode = services.tokenizer.encode
    try:
        token_ids = await asyncio.to_thread(encode, text, max_tokens, add_special_tokens=add_special_tokens)
    except PromptTooLong as error:
        raise context_length_exceeded(param, info.max_model_len, error.at_least, at_least=True) from None
    if (max_id := max(token_ids, default=0)) >= info.vocab_size:
        raise bad_request(
            f"The tokenizer makes the token id {max_id} of `{param}`, but this model's vocabulary ends at "
            f"{info.vocab_size - 1}: its tokenizer.json is another model's. Tell those who run this server.",
            param,
        )
    return token_ids


async def encode_prompt(
    services: Services, prompt: str | list[int], param: str, info: EngineInfo, *, add_special_tokens: bool
) -> Prompt:
    """Return a bare prompt. `param` is its field. Raises ApiError if it is empty, too long, or has unknown ids."""
    if isinstance(prompt, str):
        token_ids = await encode_text(services, prompt, param, info, add_special_tokens=add_special_tokens)
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
