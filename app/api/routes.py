"""The OpenAI endpoints. Each reads top-down: parse, refuse, template and encode, submit, answer."""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from app.api import openapi, prompts
from app.api.answers import Answers, ChatAnswers, CompletionAnswers
from app.api.body import parse, read_json
from app.api.errors import bad_request
from app.api.prompts import Prompt
from app.api.sampling import check_min_tokens, sampling_of, seed_of_choice
from app.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from app.api.services import Services, services_of
from app.api.stream import EventStream, TextStream, collect, events, unless_gone, usage_of
from app.api.validation import token_budget
from app.client.admission import Places
from app.client.client import EngineUnavailable
from app.messages import EngineInfo
from app.text.detokenizer import Detokenizer
from app.text.parsers.qwen3 import OutputParser

logger = logging.getLogger(__name__)

router = APIRouter()

DEFAULT_COMPLETION_TOKENS = 16


@router.post("/v1/chat/completions", **openapi.CHAT)
async def chat_completions(request: Request) -> Response:
    arrived = time.monotonic()
    services = services_of(request)
    services.check_door(request)
    deadline = services.deadline(request, arrived)
    asked = parse(await read_json(request), ChatCompletionRequest, services.metrics)
    name = services.served_name(asked.model)
    info = services.ready_engine()
    prompts.check_ids("stop_token_ids", asked.stop_token_ids, info)
    _check_count(services, asked, 1, info)
    with closing(services.admit(request, asked.choices)) as places:
        prompt = await prompts.of_conversation(services, asked, info)
        limit = asked.max_completion_tokens or asked.max_tokens
        limit_param = "max_completion_tokens" if asked.max_completion_tokens else "max_tokens"
        budget = token_budget("messages", len(prompt.token_ids), limit, None, info.max_model_len, limit_param)
        streams = _submit(services, asked, [prompt], [budget], info, arrived, deadline, places)
    return await _answer(request, asked, streams, ChatAnswers(name, asked.stream_options), [prompt])


@router.post("/v1/completions", **openapi.COMPLETIONS)
async def completions(request: Request) -> Response:
    arrived = time.monotonic()
    services = services_of(request)
    services.check_door(request)
    deadline = services.deadline(request, arrived)
    asked = parse(await read_json(request), CompletionRequest, services.metrics)
    name = services.served_name(asked.model)
    info = services.ready_engine()
    prompts.check_ids("stop_token_ids", asked.stop_token_ids, info)
    _check_count(services, asked, len(asked.prompts), info)
    special = asked.add_special_tokens is not False
    names = ["prompt"] if asked.prompt_is_one else [f"prompt.{i}" for i in range(len(asked.prompts))]
    with closing(services.admit(request, len(asked.prompts) * asked.choices)) as places:
        given = [
            await prompts.of_prompt(services, prompt, name, info, add_special_tokens=special)
            for prompt, name in zip(asked.prompts, names, strict=True)
        ]
        budgets = [
            token_budget(name, len(p.token_ids), asked.max_tokens, DEFAULT_COMPLETION_TOKENS, info.max_model_len)
            for p, name in zip(given, names, strict=True)
        ]
        streams = _submit(services, asked, given, budgets, info, arrived, deadline, places)
    answers = CompletionAnswers(name, asked.stream_options, _echoed(services, asked) if asked.echo else ())
    return await _answer(request, asked, streams, answers, given)


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", **openapi.MODELS)
async def models(request: Request) -> Response:
    services = services_of(request)
    return _json({"object": "list", "data": [_card(services, name) for name in services.model_names]})


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}", **openapi.MODEL)
async def model(request: Request, name: str) -> Response:
    services = services_of(request)
    return _json(_card(services, services.served_name(name)))


@router.post("/tokenize", **openapi.TOKENIZE)
async def tokenize(request: Request) -> Response:
    """The tokens of a bare prompt, or of a conversation as the chat template writes it."""
    services = services_of(request)
    raw = await read_json(request)
    if raw.get("messages") is not None:
        chat = parse(raw, TokenizeChatRequest, services.metrics)
        services.served_name(chat.model)
        info = services.ready_engine()
        token_ids = (await prompts.of_conversation(services, chat, info, must_fit=False)).token_ids
        named = chat.return_token_strs
    else:
        bare = parse(raw, TokenizeRequest, services.metrics)
        services.served_name(bare.model)
        info = services.ready_engine()
        special = bare.add_special_tokens is not False
        token_ids = await prompts.of_text(
            services, bare.prompt, "prompt", info, add_special_tokens=special, must_fit=False
        )
        named = bare.return_token_strs
    strings = services.tokenizer.token_strings(token_ids) if named else None
    return _json(
        {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids, "token_strs": strings}
    )


@router.post("/detokenize", **openapi.DETOKENIZE)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    services = services_of(request)
    asked = parse(await read_json(request), DetokenizeRequest, services.metrics)
    services.served_name(asked.model)
    prompts.check_ids("tokens", asked.tokens, services.ready_engine())
    return _json({"prompt": services.tokenizer.decode(asked.tokens, skip_special_tokens=False)})


@router.head("/version", include_in_schema=False)
@router.get("/version", **openapi.VERSION)
async def server_version() -> Response:
    return _json({"version": version("dflash-server")})


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _card(services: Services, name: str) -> dict[str, Any]:
    info = services.engine.state.info
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "dflash-server",
        "root": services.model_names[0],
        "max_model_len": info.max_model_len if info else None,
    }


def _echoed(services: Services, asked: CompletionRequest) -> list[str]:
    """The prompt of every choice."""
    decode = services.tokenizer.decode
    texts = [p if isinstance(p, str) else decode(p, skip_special_tokens=False) for p in asked.prompts]
    return [text for text in texts for _ in range(asked.choices)]


def _check_count(services: Services, asked: GenerationRequest, prompts: int, info: EngineInfo) -> None:
    """Raises ApiError if the request has more choices than the server ever takes at once."""
    most = services.engine.most_at_once(info)
    if prompts > most:
        raise bad_request(f"`prompt` has {prompts} prompts; at most {most} may come in one request.", "prompt")
    if prompts * asked.choices > most:
        raise bad_request(
            f"`n` is {asked.choices}, which makes {prompts * asked.choices} choices in all; at most {most} may come in "
            "one request.",
            "n",
        )


def _submit(
    services: Services,
    asked: GenerationRequest,
    given: Sequence[Prompt],
    budgets: Sequence[int],
    info: EngineInfo,
    arrived: float,
    deadline: float | None,
    places: Places,
) -> list[TextStream]:
    """Hand every choice of every prompt to the engine, or none. The choices of a prompt come one behind another, in
    the streams and in their `index`. Raises ApiError 400 or 503."""
    tokenizer = services.tokenizer
    for max_tokens in budgets:
        check_min_tokens(asked, max_tokens)
    sampling = sampling_of(asked, tokenizer.defaults, info)
    stop_token_ids = set(asked.stop_token_ids or [])
    if not asked.ignore_eos:
        stop_token_ids.update(tokenizer.eos_ids)
    request_id = secrets.token_hex(16)
    streams: list[TextStream] = []
    try:
        for prompt, max_tokens in zip(given, budgets, strict=True):
            if services.log_prompts:
                logger.info("prompt: %r", tokenizer.decode(prompt.token_ids, skip_special_tokens=False))
            seed = secrets.randbits(64) if asked.seed is None else asked.seed % 2**64
            for choice in range(asked.choices):
                detokenizer = Detokenizer(
                    tokenizer.backend,
                    asked.stop_strings,
                    include_stop=bool(asked.include_stop_str_in_output),
                    skip_special_tokens=asked.skip_special_tokens is not False,
                    min_tokens=sampling.min_tokens,
                )
                generation = services.engine.generate(
                    request_id=f"{request_id}-{len(streams)}",
                    token_ids=prompt.token_ids,
                    sampling=msgspec.structs.replace(sampling, seed=seed_of_choice(seed, choice)),
                    stop_token_ids=sorted(stop_token_ids),
                    max_tokens=max_tokens,
                    speculate=asked.speculate is not False,
                    cache_salt=asked.cache_salt or "",
                    arrived=arrived,
                    deadline=deadline,
                    places=places,
                )
                parser, most_calls = _parser(services, asked, prompt)
                by_step = bool(asked.streaming.include_speculation)
                index = len(streams)
                streams.append(TextStream(index, generation, detokenizer, parser, services, by_step, most_calls))
    except Exception as error:
        for stream in streams:
            stream.close()
        if isinstance(error, EngineUnavailable):
            raise services.unavailable(str(error)) from None
        raise
    return streams


def _parser(services: Services, asked: GenerationRequest, prompt: Prompt) -> tuple[OutputParser, int | None]:
    """What reads an answer, and how many tool calls it may have. Bare completions are text and nothing else."""
    if not isinstance(asked, ChatCompletionRequest):
        return OutputParser(reasoning=False, tools=False), None
    reasoning = services.reasoning and asked.separate_reasoning is not False
    tools = services.tool_calls and bool(asked.offered_tools)
    return OutputParser(reasoning, tools, prompt.in_reasoning), 1 if asked.parallel_tool_calls is False else None


async def _first(rest: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(rest)


async def _answer(
    request: Request, asked: GenerationRequest, streams: list[TextStream], answers: Answers, given: Sequence[Prompt]
) -> Response:
    """The whole answer, or its first event and a stream of the rest. Whatever happens, the engine is freed."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in given)
    try:
        if asked.stream:
            rest = events(streams, answers, prompt_tokens, asked.choices)
            first = await unless_gone(request, _first(rest))
            streams = []  # The response closes them now.
            return EventStream(first, rest)
        pieces = await unless_gone(request, collect(streams))
        return _json(answers.whole(pieces, usage_of(prompt_tokens, streams, asked.choices)))
    finally:
        for stream in streams:
            stream.close()
