"""The common part of chat.py and completions.py: receive a request, submit its prompts, answer it."""

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from fastapi import Request, Response

from app.api import prompts
from app.api.answers import Answers, json_response
from app.api.body import parse, read_json
from app.api.errors import bad_request
from app.api.prompts import Prompt
from app.api.sampling import check_min_tokens, sampling_of, seed_of_choice
from app.api.schemas import ChatCompletionRequest, GenerationRequest
from app.api.services import Services, services_of
from app.api.stream import EventStream, TextStream, collect, events, unless_gone, usage_of
from app.client.admission import Permits
from app.messages import EngineInfo, Submit
from app.text.detokenizer import Detokenizer
from app.text.parsers.qwen3 import OutputParser
from app.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Call(Generic[BodyT]):
    """One generation request whose body is valid.

    `arrived` and `deadline` are seconds of time.monotonic(). `info` is the engine that was ready on arrival.
    """

    request: Request
    services: Services
    body: BodyT
    model_name: str
    info: EngineInfo
    arrived: float
    deadline: float | None

    def acquire(self) -> Permits:
        """Acquire a permit for every choice. Raises Busy or EngineUnavailable."""
        return self.services.engine.acquire(self.services.client_id(self.request), self.body.num_sequences)


async def receive(request: Request, model: type[BodyT]) -> Call[BodyT]:
    """Read and check the body. Raises ApiError; a busy server refuses before it reads the body."""
    arrived = time.monotonic()
    services = services_of(request)
    info = services.engine.check(services.client_id(request))
    deadline = services.deadline(request, arrived)
    body = parse(await read_json(request), model, services.metrics)
    name = services.served_name(body.model)
    prompts.check_ids("stop_token_ids", body.stop_token_ids, info)
    _check_num_choices(body, services.engine.admission.max_at_once(info.max_num_seqs))
    return Call(request, services, body, name, info, arrived, deadline)


def _check_num_choices(body: GenerationRequest, maximum: int) -> None:
    """Raise ApiError 400 if the request has more choices than the server ever admits at once."""
    if body.num_prompts > maximum:
        raise bad_request(
            f"`prompt` has {body.num_prompts} prompts; at most {maximum} may come in one request.", "prompt"
        )
    if body.num_sequences > maximum:
        raise bad_request(
            f"`n` is {body.choices}, which makes {body.num_sequences} choices in all; at most {maximum} may come in "
            "one request.",
            "n",
        )


def submit(call: Call[BodyT], given: Sequence[Prompt], budgets: Sequence[int], permits: Permits) -> list[TextStream]:
    """Submit every choice of every prompt, or none.

    The choices of a prompt are neighbours in the result and in `index`. Raises ApiError 400 or EngineUnavailable.
    """
    body, services, tokenizer = call.body, call.services, call.services.tokenizer
    for max_tokens in budgets:
        check_min_tokens(body, max_tokens)
    sampling = sampling_of(body, tokenizer.defaults, call.info)
    stop_token_ids = _stop_token_ids(body, tokenizer)
    request_id = secrets.token_hex(16)
    streams: list[TextStream] = []
    try:
        for prompt, max_tokens in zip(given, budgets, strict=True):
            if services.log_prompts:
                logger.info("prompt: %r", tokenizer.decode(prompt.token_ids, skip_special_tokens=False))
            seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
            for choice in range(body.choices):
                request = Submit(
                    request_id=f"{request_id}-{len(streams)}",
                    epoch=0,
                    token_ids=prompt.token_ids,
                    sampling=msgspec.structs.replace(sampling, seed=seed_of_choice(seed, choice)),
                    stop_token_ids=stop_token_ids,
                    max_tokens=max_tokens,
                    speculate=body.speculate is not False,
                    cache_salt=body.cache_salt or "",
                )
                deltas = services.engine.submit(request, arrived=call.arrived, deadline=call.deadline, permits=permits)
                parser, most_calls = _parser(services, body, prompt)
                by_step = bool(body.streaming.include_speculation)
                detokenizer = _detokenizer(body, tokenizer)
                streams.append(TextStream(len(streams), deltas, detokenizer, parser, services, by_step, most_calls))
    except Exception:
        for stream in streams:
            stream.close()
        raise
    return streams


def _stop_token_ids(body: GenerationRequest, tokenizer: Tokenizer) -> list[int]:
    eos_ids = [] if body.ignore_eos else tokenizer.eos_ids
    return sorted({*(body.stop_token_ids or []), *eos_ids})


def _detokenizer(body: GenerationRequest, tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(
        tokenizer.backend,
        body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def _parser(services: Services, body: GenerationRequest, prompt: Prompt) -> tuple[OutputParser, int | None]:
    """Return the parser of an answer, and the maximum of its tool calls. A bare completion is text and nothing else."""
    if not isinstance(body, ChatCompletionRequest):
        return OutputParser(reasoning=False, tools=False), None
    reasoning = services.reasoning and body.separate_reasoning is not False
    tools = services.tool_calls and bool(body.offered_tools)
    return OutputParser(reasoning, tools, prompt.in_reasoning), 1 if body.parallel_tool_calls is False else None


async def answer(call: Call[BodyT], streams: list[TextStream], answers: Answers, given: Sequence[Prompt]) -> Response:
    """Return the whole answer, or its first event and a stream of the rest. All streams are closed in any case."""
    body = call.body
    prompt_tokens = sum(len(prompt.token_ids) for prompt in given)
    try:
        if body.stream:
            rest = events(streams, answers, prompt_tokens, body.choices)
            first = await unless_gone(call.request, anext(rest))
            streams = []  # The response closes them now.
            return EventStream(first, rest)
        pieces = await unless_gone(call.request, collect(streams))
        return json_response(answers.whole(pieces, usage_of(prompt_tokens, streams, body.choices)))
    finally:
        for stream in streams:
            stream.close()
