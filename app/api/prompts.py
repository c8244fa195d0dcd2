"""From what a request says to the token ids of its prompt."""

import asyncio
from dataclasses import dataclass

from app.api.errors import ApiError, bad_request, clip, context_length_exceeded
from app.api.schemas import TemplatedRequest
from app.api.services import Services
from app.api.validation import check_template
from app.messages import EngineInfo
from app.text.chat_template import ChatTemplateError
from app.text.parsers.qwen3 import END_THINK, THINK
from app.text.tokenizer import PromptTooLong

_LONGEST_TEMPLATE_ERROR = 300
_END = len("\n\n") + len(END_THINK) + len("\n\n")  # where a template's own opening mark stands, if it has one


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens. `in_reasoning`: its end has opened a reasoning block for the model to go on with."""

    token_ids: list[int]
    in_reasoning: bool = False


async def render_and_encode(
    services: Services, asked: TemplatedRequest, info: EngineInfo, *, must_fit: bool = True
) -> Prompt:
    """The messages through the chat template, in a thread. Raises ApiError naming the field at fault."""
    template = services.tokenizer.chat_template
    check_template(asked, template)
    special = bool(asked.add_special_tokens)

    def made() -> tuple[str, list[int]]:
        text = template.render(
            [message.for_template() for message in asked.messages],
            tools=asked.offered_tools or None,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            switches={**services.template_kwargs, **asked.switches(template.switches)},
        )
        return text, _encode(services, text, "messages", info, add_special_tokens=special, must_fit=must_fit)

    try:
        text, token_ids = await asyncio.to_thread(made)
    except ChatTemplateError as error:
        raise bad_request(clip(str(error), _LONGEST_TEMPLATE_ERROR), "messages") from None
    begun = asked.messages[-1].text if asked.continue_final_message else text[-_END:]
    return Prompt(token_ids, begun.rfind(THINK) > begun.rfind(END_THINK))


async def of_text(
    services: Services,
    text: str,
    param: str,
    info: EngineInfo,
    *,
    add_special_tokens: bool = True,
    must_fit: bool = True,
) -> list[int]:
    """`text` in tokens, made in a thread. Raises ApiError as `_encode` does."""
    return await asyncio.to_thread(
        _encode, services, text, param, info, add_special_tokens=add_special_tokens, must_fit=must_fit
    )


def _encode(
    services: Services, text: str, param: str, info: EngineInfo, *, add_special_tokens: bool, must_fit: bool
) -> list[int]:
    """`text` in tokens. Raises ApiError if it has tokens the model does not know, and, without the work of making them,
    if there must be more than fit (`must_fit`)."""
    most = info.max_model_len if must_fit else None
    try:
        token_ids = services.tokenizer.encode(text, most, add_special_tokens=add_special_tokens)
    except PromptTooLong as error:
        raise context_length_exceeded(param, info.max_model_len, error.at_least, at_least=True) from None
    if (largest := max(token_ids, default=0)) >= info.vocab_size:
        raise bad_request(
            f"The tokenizer makes the token id {largest} of `{param}`, but this model's vocabulary ends at "
            f"{info.vocab_size - 1}: its tokenizer.json is another model's. Tell those who run this server.",
            param,
        )
    return token_ids


async def of_prompt(
    services: Services, prompt: str | list[int], param: str, info: EngineInfo, *, add_special_tokens: bool = True
) -> Prompt:
    """A bare prompt, text or token ids, which came as `param`. Raises ApiError if it is empty, too long, or has unknown
    ids."""
    if isinstance(prompt, str):
        token_ids = await of_text(services, prompt, param, info, add_special_tokens=add_special_tokens)
    else:
        check_ids(param, prompt, info)
        token_ids = prompt
    if not token_ids:
        raise bad_request(f"`{param}` is empty. Send at least one token.", param)
    return Prompt(token_ids)


def check_ids(param: str, token_ids: list[int] | None, info: EngineInfo) -> None:
    """Raises ApiError for the first id that is beyond the model's vocabulary."""
    if token_ids and max(token_ids) >= info.vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= info.vocab_size)
        raise no_such_id(f"{param}.{index}", token_ids[index], info)


def no_such_id(param: str, token_id: int, info: EngineInfo) -> ApiError:
    """The error for a token id beyond the model's vocabulary."""
    return bad_request(
        f"`{param}` has the token id {token_id}, but this model's vocabulary ends at {info.vocab_size - 1}.", param
    )
