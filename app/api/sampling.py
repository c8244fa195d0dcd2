"""Sampling parameters of a request. Its absent fields come from the model's generation_config.json."""

from dataclasses import asdict, fields, replace

from app.api.errors import bad_request
from app.api.prompts import unknown_id
from app.api.schemas import GenerationRequest
from app.messages import MIN_TEMPERATURE, EngineInfo, SamplingParams
from app.text.tokenizer import GenerationDefaults

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def sampling_of(body: GenerationRequest, defaults: GenerationDefaults, info: EngineInfo) -> SamplingParams:
    """Return the request's parameters without its seed. Raises ApiError for a bias of an unknown token.

    Greedy decoding has no filters, like vLLM's, because every filter keeps the most likely token.
    """
    given = body.model_dump(include={field.name for field in fields(defaults)}, exclude_none=True)
    chosen = replace(defaults, **given)
    if chosen.temperature < MIN_TEMPERATURE:
        chosen = GenerationDefaults(temperature=0.0, repetition_penalty=chosen.repetition_penalty)
    return SamplingParams(
        **asdict(chosen),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_biases(body, info),
        min_tokens=body.min_tokens or 0,
    )


def seed_of_choice(seed: int, choice: int) -> int:
    """Return the unsigned 64-bit seed of a choice: `seed` for choice 0, else the n-th number of splitmix64 behind it.

    With seed + n, requests with neighbouring seeds would share choices.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * _GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def check_min_tokens(body: GenerationRequest, budget: int) -> None:
    """Raise ApiError if the request demands more tokens than its `budget`."""
    if body.min_tokens is not None and body.min_tokens > budget:
        raise bad_request(
            f"`min_tokens` is {body.min_tokens}, but `max_tokens`, its default or the model's context length allow "
            f"for {budget} tokens. Ask for fewer.",
            "min_tokens",
        )


def _biases(body: GenerationRequest, info: EngineInfo) -> list[tuple[int, float]]:
    biases = [(int(token), bias) for token, bias in (body.logit_bias or {}).items()]
    for token_id, _ in biases:
        if token_id >= info.vocab_size:
            raise unknown_id(f"logit_bias.{token_id}", token_id, info)
    return biases
