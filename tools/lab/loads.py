"""Requests of the laboratories: held-out prompts of the demo pair as token ids, by domain."""

import itertools
from functools import cache

from app.engine.checkpoint.files import DEMO
from app.messages import Request, SamplingParams
from app.text.tokenizer import Tokenizer
from tools.demo_pair.corpus import DOMAINS, samples

MAX_TOKENS = 128
HOPELESS_TEMPERATURE = 3.0
"""At this temperature no draft can know the next token."""
HOPELESS = f"prose at T = {HOPELESS_TEMPERATURE:g}"
MIXED = "half math and half hopeless"
LOADS = (*DOMAINS, HOPELESS, MIXED)


def requests(load: str, count: int, temperature: float = 0.0) -> list[Request]:
    """Return the first `count` requests of one of LOADS, each with its own seed."""
    if load == MIXED:
        halves = zip(requests("math", -(-count // 2)), requests(HOPELESS, -(-count // 2)), strict=True)
        return list(itertools.chain.from_iterable(halves))[:count]
    hopeless = load == HOPELESS
    return [
        Request(
            sampling=SamplingParams(temperature=HOPELESS_TEMPERATURE if hopeless else temperature, seed=index),
            request_id=f"{load} {index}",
            token_ids=prompt,
            max_tokens=MAX_TOKENS,
            stop_token_ids=frozenset(_tokenizer().eos_ids),
        )
        for index, prompt in enumerate(_prompts("prose" if hopeless else load, count))
    ]


@cache
def _prompts(domain: str, count: int) -> list[tuple[int, ...]]:
    texts = [
        _tokenizer().chat_template.render(list(sample.messages))
        for sample in itertools.islice(samples(domain, "heldout", 0), count)
    ]
    return [tuple(_tokenizer().encode(text, add_special_tokens=False)) for text in texts]


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "target")
