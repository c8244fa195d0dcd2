"""How a request is sampled: what it says, and of what it leaves open, what the model's generation_config.json says."""

from app.api.errors import bad_request
from app.api.prompts import no_such_id
from app.api.schemas import GenerationRequest
from app.messages import EngineInfo, Sampling
from app.text.tokenizer import GenerationDefaults

_GREEDY_BELOW = 1e-5
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def sampling_of(asked: GenerationRequest, defaults: GenerationDefaults, info: EngineInfo) -> Sampling:
    """The request's Sampling but for its seed. Raises ApiError for a bias of a token that the model does not know.

    Greedy decoding has no filters, as at vLLM: they would leave the most likely token anyway.
    """
    temperature = defaults.temperature if asked.temperature is None else asked.temperature
    # Below this, the noise is less than float32 can tell from argmax, and dividing by it overflows.
    greedy = temperature < _GREEDY_BELOW
    top_k = defaults.top_k if asked.top_k is None else asked.top_k
    top_p = defaults.top_p if asked.top_p is None else asked.top_p
    min_p = defaults.min_p if asked.min_p is None else asked.min_p
    repetition = defaults.repetition_penalty if asked.repetition_penalty is None else asked.repetition_penalty
    return Sampling(
        temperature=0.0 if greedy else temperature,
        top_k=0 if greedy else max(0, top_k),
        top_p=1.0 if greedy else top_p,
        min_p=0.0 if greedy else min_p,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        repetition_penalty=repetition,
        logit_bias=_biases(asked, info),
        min_tokens=asked.min_tokens or 0,
    )


def seed_of_choice(seed: int, choice: int) -> int:
    """Choice 0 has the request's `seed` itself, choice i the i-th number of splitmix64 from there.

    Unlike seed + i, the choices of neighbouring seeds have no number in common. Unsigned, 64 bits.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * _GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def check_min_tokens(asked: GenerationRequest, budget: int) -> None:
    """Raises ApiError if the request wants more tokens than the `budget` it gets."""
    if asked.min_tokens is not None and asked.min_tokens > budget:
        raise bad_request(
            f"`min_tokens` is {asked.min_tokens}, but `max_tokens`, its default or the model's context length allow "
            f"for {budget} tokens. Ask for fewer.",
            "min_tokens",
        )


def _biases(asked: GenerationRequest, info: EngineInfo) -> list[tuple[int, float]]:
    biases = [(int(token), bias) for token, bias in (asked.logit_bias or {}).items()]
    for token_id, _ in biases:
        if token_id >= info.vocab_size:
            raise no_such_id(f"logit_bias.{token_id}", token_id, info)
    return biases
