"""Steps that all generating endpoints share: receive a request, submit its prompts, answer it."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from fastapi import Request, Response

from app import messages
from app.api import prompts
from app.api.answers import Answers, json_response
from app.api.body import parse, read_json
from app.api.errors import bad_request
from app.api.prompts import Prompt
from app.api.sampling import check_min_tokens, sampling_of, seed_of_choice
from app.api.schemas import ChatCompletionRequest, GenerationRequest, SamplingRequest
from app.api.services import Services, services_of
from app.api.stream import Choice, Choices, EventStream, events, unless_gone
from app.api.validation import warn_of_unknown_fields
from app.engine_client.admission import Permits
from app.engine_client.request_stream import RequestStream
from app.engine_client.timeline import Timeline
from app.engine_config import EngineInfo
from app.text.detokenizer import Detokenizer
from app.text.parsers import OutputParser

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=SamplingRequest)
BodyT_co = TypeVar("BodyT_co", bound=SamplingRequest, covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[BodyT_co]):
    """One generation request whose body is valid.

    `arrived` and `deadline` are seconds of time.monotonic(). `info` is the engine that was ready on arrival. `warnings`
    are about the body, and go into the answer.
    """

    request: Request
    services: Services
    body: BodyT_co
    model_name: str
    info: EngineInfo
    arrived: float
    deadline: float | None
    warnings: Sequence[dict[str, Any]]

    def acquire(self) -> Permits:
        """Acquire a permit for every choice. Raises Busy or EngineUnavailable."""
        return self.services.engine.acquire(self.services.client_id(self.request), self.body.num_sequences)

    def with_body(self, body: BodyT) -> "Call[BodyT]":
        """Return this call with the body that its own was translated to."""
        return cast("Call[BodyT]", replace(self, body=body))  # type: ignore[arg-type]


async def receive(request: Request, model: type[BodyT]) -> Call[BodyT]:
    """Read and check the body of a request that would be admitted now. Raises ApiError, Busy or EngineUnavailable."""
    arrived = time.monotonic()
    services = services_of(request)
    info = services.engine.check(services.client_id(request))
    deadline = services.deadline(request, arrived)
    body = parse(await read_json(request), model, services.metrics)
    name = services.served_name(body.model)
    prompts.check_ids("stop_token_ids", body.stop_token_ids, info)
    _check_num_choices(body, services.engine.admission.max_at_once(info.max_num_seqs))
    warnings = warn_of_unknown_fields(body, services.metrics)
    return Call(request, services, body, name, info, arrived, deadline, warnings)


async def receive_to_render(request: Request, model: type[BodyT]) -> tuple[Services, BodyT, EngineInfo, str]:
    """Read and check the body of a request whose prompt is wanted alone. Return it with the name of the model.

    Raises ApiError or EngineUnavailable. A full queue refuses none, because routers ask for prompts of requests that
    they send elsewhere.
    """
    services = services_of(request)
    info = services.engine.ready_info()
    body = parse(await read_json(request), model, services.metrics)
    return services, body, info, services.served_name(body.model)


def _check_num_choices(body: SamplingRequest, maximum: int) -> None:
    """Raise ApiError 400 if the request has more choices than the server ever admits at once."""
    if body.num_prompts > maximum:
        raise bad_request(
            f"`prompt` has {body.num_prompts} prompts; at most {maximum} may come in one request.", "prompt"
        )
    if body.num_sequences > maximum:
        raise bad_request(
            f"`n` is {body.num_choices}, which makes {body.num_sequences} choices in all; at most {maximum} may come "
            "in one request.",
            "n",
        )


def submit(call: Call[GenerationRequest], given: Sequence[Prompt], budgets: Sequence[int], permits: Permits) -> Choices:
    """Submit every choice of every prompt, or none. `budgets` are the maximum numbers of new tokens, one for a prompt.

    Raises ApiError 400 or EngineUnavailable.
    """
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in given)
    warnings = [*call.warnings, *(warning for prompt in given for warning in prompt.warnings)]
    choices = Choices(num_prompt_tokens, call.body.num_choices, warnings)
    try:
        for index, (prompt, request) in enumerate(_requests(call, given, budgets)):
            deltas = call.services.engine.submit(request, arrived=call.arrived, deadline=call.deadline, permits=permits)
            choices.append(_choice(call, prompt, deltas, index))
            if (tracer := call.services.tracer) is not None:
                deltas.timeline = Timeline(call.arrived)
                if choices.on_close is None:
                    traced = call.model_name, call.body.num_choices, request, choices
                    choices.on_close = tracer.begin(call.request.headers, *traced)
    except Exception:
        choices.close()
        raise
    return choices


def _requests(
    call: Call[GenerationRequest], given: Sequence[Prompt], budgets: Sequence[int]
) -> Iterator[tuple[Prompt, messages.Request]]:
    """Yield the engine's request for every choice. The choices of a prompt are neighbours."""
    body, tokenizer = call.body, call.services.tokenizer
    for max_tokens in budgets:
        check_min_tokens(body, max_tokens)
    sampling = sampling_of(body, tokenizer.defaults, call.info)
    eos_ids = [] if body.ignore_eos else tokenizer.eos_ids
    stop_token_ids = sorted({*(body.stop_token_ids or []), *eos_ids})
    request_id = secrets.token_hex(16)
    for index, (prompt, max_tokens) in enumerate(zip(given, budgets, strict=True)):
        if call.services.config.log_prompts:
            logger.info("prompt: %r", tokenizer.decode(prompt.token_ids, skip_special_tokens=False))
        seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
        for number in range(body.num_choices):
            request = messages.Request(
                request_id=f"{request_id}-{index * body.num_choices + number}",
                token_ids=prompt.token_ids,
                sampling=replace(sampling, seed=seed_of_choice(seed, number)),
                stop_token_ids=stop_token_ids,
                max_tokens=max_tokens,
                speculate=body.speculate is not False,
                cache_salt=body.cache_salt or "",
            )
            yield prompt, request


def _choice(call: Call[GenerationRequest], prompt: Prompt, deltas: RequestStream, index: int) -> Choice:
    """Return the reader of one choice. A bare completion is text and nothing else, so that nothing is parsed."""
    body = call.body
    detokenizer = Detokenizer(
        call.services.tokenizer.backend,
        body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )
    parser = OutputParser()
    max_calls = None
    if isinstance(body, ChatCompletionRequest):
        reasons = call.services.reasoning and body.separate_reasoning is not False
        family = call.services.tool_family if body.offered_tools else None
        parser = OutputParser(
            call.services.reasoning_parser(prompt.in_reasoning) if reasons else None,
            family.parser() if family else None,
            shows_reasoning=body.include_reasoning is not False,
        )
        max_calls = 1 if body.parallel_tool_calls is False or body.forced_function is not None else None
        if prompt.begun_call:
            parser.push(prompt.begun_call)
    with_steps = bool(body.streaming.include_speculation)
    return Choice(
        index,
        deltas,
        detokenizer,
        parser,
        call.services.engine,
        with_steps,
        max_calls,
        eos_ids=() if body.ignore_eos else call.services.tokenizer.eos_ids,
    )


async def answer(call: Call[GenerationRequest], choices: Choices, answers: Answers) -> Response:
    """Return the whole answer, or a stream of its events. The choices are closed in any case."""
    if call.body.stream:
        return EventStream(events(choices, answers), choices.close)
    try:
        return json_response(answers.whole(await unless_gone(call.request.receive, choices.whole())))
    finally:
        choices.close()
