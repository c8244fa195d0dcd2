"""The OpenAI endpoints. Each reads top-down: parse, refuse, template and encode, submit, answer."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from app.api.errors import ApiError, bad_request, busy, clip, context_length_exceeded
from app.api.protocol import (
    Answers,
    ChatAnswers,
    ChatCompletionRequest,
    CompletionAnswers,
    CompletionRequest,
    GenerationRequest,
)
from app.api.services import Services, services_of
from app.api.stream import EventStream, TextStream, collect, events, unless_gone, usage_of
from app.api.validation import read_request, token_budget
from app.async_engine import EngineBusy, EngineUnavailable, requests_allowed
from app.text.chat_template import ChatTemplateError
from app.text.detokenizer import Detokenizer
from app.text.tokenizer import PromptTooLong
from app.types import EngineInfo, Sampling

router = APIRouter()
T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16
_GREEDY_BELOW = 1e-5
_LONGEST_TEMPLATE_ERROR = 300


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in tokens, and how many it may make."""

    token_ids: list[int]
    max_tokens: int


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    arrived = time.monotonic()
    services = services_of(request)
    asked = await read_request(request, ChatCompletionRequest, services.metrics)
    name = services.served_name(asked.model)
    info = services.ready_engine()
    _check_stop_ids(asked, info)
    messages = [message.for_template() for message in asked.messages]
    try:
        token_ids = await _encoded(services.tokenizer.apply_chat_template, messages, "messages", info)
    except ChatTemplateError as error:
        raise bad_request(clip(str(error), _LONGEST_TEMPLATE_ERROR), "messages") from None
    limit = asked.max_completion_tokens or asked.max_tokens
    prompt = Prompt(token_ids, token_budget("messages", len(token_ids), limit, None, info.max_model_len))
    streams = _submit(services, asked, [prompt], arrived)
    return await _answer(request, asked, streams, ChatAnswers(name, asked.include_usage), [prompt])


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    arrived = time.monotonic()
    services = services_of(request)
    asked = await read_request(request, CompletionRequest, services.metrics)
    name = services.served_name(asked.model)
    info = services.ready_engine()
    _check_stop_ids(asked, info)
    if len(asked.prompt) > requests_allowed(info):
        raise bad_request(
            f"`prompt` has {len(asked.prompt)} prompts; at most {requests_allowed(info)} may come in one request.",
            "prompt",
        )
    prompts = []
    for prompt in asked.prompt:
        token_ids = await _token_ids(services, prompt, info)
        budget = token_budget("prompt", len(token_ids), asked.max_tokens, DEFAULT_COMPLETION_TOKENS, info.max_model_len)
        prompts.append(Prompt(token_ids, budget))
    streams = _submit(services, asked, prompts, arrived)
    return await _answer(request, asked, streams, CompletionAnswers(name, asked.include_usage), prompts)


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def models(request: Request) -> Response:
    services = services_of(request)
    info = services.engine.state.info
    cards = [
        {
            "id": name,
            "object": "model",
            "created": services.created,
            "owned_by": "dflash-server",
            "root": services.model_names[0],
            "max_model_len": info.max_model_len if info else None,
        }
        for name in services.model_names
    ]
    return Response(msgspec.json.encode({"object": "list", "data": cards}), media_type="application/json")


async def _token_ids(services: Services, prompt: str | list[int], info: EngineInfo) -> list[int]:
    if isinstance(prompt, str):
        token_ids = await _encoded(services.tokenizer.encode, prompt, "prompt", info)
    else:
        token_ids = prompt
        if (largest := max(token_ids, default=0)) >= info.vocab_size:
            raise _no_such_id("prompt", largest, info)
    if not token_ids:
        raise bad_request("`prompt` is empty. Send at least one token.", "prompt")
    return token_ids


async def _encoded(encode: Callable[[T, int], list[int]], given: T, param: str, info: EngineInfo) -> list[int]:
    """`given` in tokens, made in a thread. Raises ApiError if it is too long or has tokens the model does not know."""
    try:
        token_ids = await asyncio.to_thread(encode, given, info.max_model_len)
    except PromptTooLong as error:
        raise context_length_exceeded(param, info.max_model_len, error.at_least, at_least=True) from None
    if (largest := max(token_ids, default=0)) >= info.vocab_size:
        raise bad_request(
            f"The tokenizer makes the token id {largest} of `{param}`, but this model's vocabulary ends at "
            f"{info.vocab_size - 1}: its tokenizer.json is another model's. Tell those who run this server.",
            param,
        )
    return token_ids


def _check_stop_ids(asked: GenerationRequest, info: EngineInfo) -> None:
    for index, token_id in enumerate(asked.stop_token_ids or []):
        if token_id >= info.vocab_size:
            raise _no_such_id(f"stop_token_ids.{index}", token_id, info)


def _no_such_id(param: str, token_id: int, info: EngineInfo) -> ApiError:
    return bad_request(
        f"`{param}` has the token id {token_id}, but this model's vocabulary ends at {info.vocab_size - 1}.", param
    )


def _submit(
    services: Services, asked: GenerationRequest, prompts: Sequence[Prompt], arrived: float
) -> list[TextStream]:
    """Hand every prompt to the engine, or none. Raises ApiError 503 or 429."""
    tokenizer = services.tokenizer
    temperature = tokenizer.defaults.temperature if asked.temperature is None else asked.temperature
    stop_token_ids = set(asked.stop_token_ids or [])
    if not asked.ignore_eos:
        stop_token_ids.update(tokenizer.eos_ids)
    streams: list[TextStream] = []
    try:
        for index, prompt in enumerate(prompts):
            seed = secrets.randbits(64) if asked.seed is None else asked.seed % 2**64
            detokenizer = Detokenizer(tokenizer.backend, asked.stop_strings)
            generation = services.engine.generate(
                request_id=secrets.token_hex(16),
                token_ids=prompt.token_ids,
                # Below this, the noise is less than float32 can tell from argmax, and dividing by it overflows.
                sampling=Sampling(temperature if temperature >= _GREEDY_BELOW else 0.0, seed),
                stop_token_ids=sorted(stop_token_ids),
                max_tokens=prompt.max_tokens,
                speculate=asked.speculate is not False,
                arrived=arrived,
            )
            streams.append(TextStream(index, generation, detokenizer, services))
    except Exception as error:
        for stream in streams:
            stream.close()
        if isinstance(error, EngineBusy):
            raise busy(str(error)) from None
        if isinstance(error, EngineUnavailable):
            raise services.unavailable(str(error)) from None
        raise
    return streams


async def _first(rest: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(rest)


async def _answer(
    request: Request,
    asked: GenerationRequest,
    streams: list[TextStream],
    answers: Answers,
    prompts: Sequence[Prompt],
) -> Response:
    """The whole answer, or its first event and a stream of the rest. Whatever happens, the engine is freed."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    try:
        if asked.stream:
            rest = events(streams, answers, prompt_tokens, asked.include_usage)
            first = await unless_gone(request, _first(rest))
            streams = []  # The response closes them now.
            return EventStream(first, rest)
        texts = await unless_gone(request, collect(streams))
        whole = answers.whole(texts, usage_of(prompt_tokens, streams))
        return Response(msgspec.json.encode(whole), media_type="application/json")
    finally:
        for stream in streams:
            stream.close()
