"""Steps of all generating endpoints: receive a request, submit its prompts, answer it."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Generic, TypeVar

from fastapi import Request, Response

from app import log, messages
from app.api import prompts
from app.api.answers import json_response
from app.api.body import read_body
from app.api.errors import AnswerWarning, bad_request
from app.api.prompts import Prompt, unknown_id
from app.api.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest, NamedTool, SamplingRequest
from app.api.services import Services, services_of
from app.api.shares import Held
from app.api.stream import Answers, Choice, Choices, EventStream, events, unless_gone
from app.engine_client.admission import Permits
from app.engine_client.request_stream import RequestStream
from app.messages import MIN_TEMPERATURE, EngineInfo, SamplingParams
from app.text.detokenizer import Detokenizer
from app.text.parsers import OutputParser
from app.text.tokenizer import GenerationDefaults

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=SamplingRequest)
BodyT_co = TypeVar("BodyT_co", bound=SamplingRequest, covariant=True)


@dataclass(frozen=True, slots=True)
class Received(Generic[BodyT_co]):
    """One generation request whose body is valid. Times are seconds of time.monotonic()."""

    request: Request
    services: Services
    body: BodyT_co
    model_name: str
    info: EngineInfo  # of the engine that was ready on arrival
    arrived: float
    deadline: float | None
    warnings: Sequence[AnswerWarning]  # about the body, for the answer
    num_sequences: int  # choices of all prompts
    held: Held

    def acquire(self) -> Permits:
        """Acquire a permit for every choice, in place of the one that is held. Raises Busy."""
        self.held.permit.close()
        admission = self.services.engine.admission
        return admission.acquire(self.held.client_id, self.num_sequences, self.info.max_num_seqs)


async def receive(request: Request, model: type[BodyT], held: Held, *, is_admitted: bool = True) -> Received[BodyT]:
    """Read and check the body of a request, which `held` counts. Raises ApiError, Busy or EngineUnavailable.

    Unless `is_admitted` only the prompt is wanted, for which a full queue refuses nobody: routers ask for prompts of
    requests that they send elsewhere.
    """
    arrived = time.monotonic()
    services = services_of(request)
    engine = services.engine
    info = engine.check() if is_admitted else engine.ready_info()
    deadline = services.deadline(request, arrived)
    body = await read_body(request, model, held)
    name = services.served_name(body.model)
    log.request.get({})["model"] = name
    num_prompts = len(body.prompts) if isinstance(body, CompletionRequest) else 1
    num_sequences = num_prompts * body.num_choices
    if is_admitted:
        prompts.check_ids("stop_token_ids", body.stop_token_ids, info)
        maximum = engine.admission.max_at_once(info.max_num_seqs)
        if num_sequences > maximum:
            given, param = f"`n` is {body.num_choices}, which makes {num_sequences} choices in all", "n"
            if num_prompts > maximum:
                given, param = f"`prompt` has {num_prompts} prompts", "prompt"
            raise bad_request(f"{given}; at most {maximum} may come in one request.", param)
    return Received(request, services, body, name, info, arrived, deadline, body.warnings, num_sequences, held)


def submit(
    received: Received[GenerationRequest], given: Sequence[Prompt], budgets: Sequence[int], permits: Permits
) -> Choices:
    """Submit every choice of every prompt, or none. `budgets` are the maximum numbers of new tokens, one for a prompt.

    Raises ApiError 400 or EngineUnavailable.
    """
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in given)
    warnings = [*received.warnings, *(warning for prompt in given for warning in prompt.warnings)]
    field, asked = received.body.token_limit
    if asked is not None and asked > min(budgets):
        why = f"{asked} tokens do not fit beside the prompt. The answer may have {min(budgets)}."
        warnings.append({"code": "value_clamped", "param": field, "message": why})
    choices = Choices(num_prompt_tokens, received.body.num_choices, warnings)
    try:
        for index, (prompt, request) in enumerate(_requests(received, given, budgets)):
            deltas = received.services.engine.submit(
                request, arrived=received.arrived, deadline=received.deadline, permits=permits
            )
            choices.append(_choice(received, prompt, deltas, index))
            if (tracer := received.services.tracer) is not None:
                choices.on_close = choices.on_close or tracer.begin(
                    received.request.headers, received.model_name, received.body.num_choices, request, choices
                )
    except Exception:
        choices.close()
        raise
    return choices


def _requests(
    received: Received[GenerationRequest], given: Sequence[Prompt], budgets: Sequence[int]
) -> Iterator[tuple[Prompt, messages.Request]]:
    """Yield the engine's request for every choice. The choices of a prompt are neighbours."""
    body, tokenizer = received.body, received.services.tokenizer
    if body.min_tokens is not None and body.min_tokens > (budget := min(budgets)):
        raise bad_request(
            f"`min_tokens` is {body.min_tokens}, but `max_tokens`, its default or the model's context length allow "
            f"for {budget} tokens. Ask for fewer.",
            "min_tokens",
        )
    sampling = sampling_of(body, tokenizer.defaults, received.info)
    eos_ids = [] if body.ignore_eos else tokenizer.eos_ids
    stop_token_ids = sorted({*(body.stop_token_ids or []), *eos_ids})
    request_id = secrets.token_hex(16)
    for index, (prompt, max_tokens) in enumerate(zip(given, budgets, strict=True)):
        if received.services.config.log_prompts:
            logger.info("prompt: %r", tokenizer.decode(prompt.token_ids, skip_special_tokens=False))
        seed = received.services.next_seed() if body.seed is None or body.seed == -1 else body.seed % 2**64
        for number in range(body.num_choices):
            request = messages.Request(
                request_id=f"{request_id}-{index * body.num_choices + number}",
                token_ids=prompt.token_ids,
                sampling=replace(sampling, seed=seed_of_choice(seed, number)),
                stop_token_ids=stop_token_ids,
                max_tokens=max_tokens,
                speculate=True if body.speculate is None else body.speculate,
                cache_salt=body.cache_salt or "",
            )
            yield prompt, request


def sampling_of(body: GenerationRequest, defaults: GenerationDefaults, info: EngineInfo) -> SamplingParams:
    """Return the request's sampling parameters without its seed. Absent fields come from `defaults`.

    Raises ApiError for a bias of an unknown token.

    Greedy decoding has no filters, like vLLM's, because every filter keeps the most likely token.
    """
    biases = [(int(token), bias) for token, bias in (body.logit_bias or {}).items()]
    for token_id, _ in biases:
        if token_id >= info.vocab_size:
            raise unknown_id(f"logit_bias.{token_id}", token_id, info)
    given = body.model_dump(include={field.name for field in fields(defaults)}, exclude_none=True)
    chosen = replace(defaults, **given)
    if chosen.temperature < MIN_TEMPERATURE:
        chosen = GenerationDefaults(temperature=0.0, repetition_penalty=chosen.repetition_penalty)
    return SamplingParams(
        **asdict(chosen),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=biases,
        min_tokens=body.min_tokens or 0,
    )


def seed_of_choice(seed: int, choice: int) -> int:
    """Return the unsigned 64-bit seed of a choice: `seed` for choice 0, else the n-th number of splitmix64 after it.

    With seed + n, requests with neighbouring seeds would share choices.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return mixed ^ (mixed >> 31)


def _choice(received: Received[GenerationRequest], prompt: Prompt, deltas: RequestStream, index: int) -> Choice:
    """Return the reader of one choice. A bare completion is text and nothing else, so that nothing is parsed."""
    body = received.body
    detokenizer = Detokenizer(
        received.services.tokenizer.backend,
        [body.stop] if isinstance(body.stop, str) else body.stop or [],
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )
    parser = OutputParser()
    if isinstance(body, ChatCompletionRequest):
        reasoning = received.services.reasoning_parser if body.separate_reasoning is not False else None
        call_format = received.services.call_format if body.offers_tools else None
        parser = OutputParser(
            reasoning(prompt.in_reasoning) if reasoning else None,
            call_format.parser(body.offered_tools) if call_format else None,
            shows_reasoning=body.include_reasoning is not False,
            max_calls=1 if body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool) else None,
            begun_call=prompt.begun_call,
        )
    return Choice(
        index,
        deltas,
        detokenizer,
        parser,
        received.services.engine,
        with_steps=bool(body.streaming.include_speculation),
        eos_ids=() if body.ignore_eos else received.services.tokenizer.eos_ids,
    )


async def answer(received: Received[GenerationRequest], choices: Choices, answers: Answers) -> Response:
    """Return the whole answer, or a stream of its events. The choices are closed in any case."""
    if received.body.stream:
        return EventStream(events(choices, answers), choices.close)
    try:
        return json_response(answers.whole(await unless_gone(received.request.receive, choices.whole())))
    finally:
        choices.close()
