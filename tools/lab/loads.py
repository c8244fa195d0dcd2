"""Held-out prompts of the demo pair as requests of token ids, by domain."""

from functools import cache

from app import demo
from app.engine.checkpoint.files import DEMO
from app.messages import Request, SamplingParams
from app.text.tokenizer import Tokenizer

MAX_TOKENS = 128
HOPELESS_TEMPERATURE = 3.0
"""At this temperature no draft can know the next token."""
HOPELESS = f"prose at T = {HOPELESS_TEMPERATURE:g}"
LOADS = (*demo.held_out(), HOPELESS)


def requests(load: str, count: int) -> list[Request]:
    """Return the first `count` requests of one of LOADS, greedy but for HOPELESS, each with its own seed."""
    hopeless = load == HOPELESS
    return [
        Request(
            sampling=SamplingParams(temperature=HOPELESS_TEMPERATURE if hopeless else 0.0, seed=index),
            request_id=f"{load} {index}",
            token_ids=_token_ids("prose" if hopeless else load, index),
            max_tokens=MAX_TOKENS,
            stop_token_ids=frozenset(demo.stop_token_ids()),
        )
        for index in range(count)
    ]


@cache
def _token_ids(domain: str, index: int) -> tuple[int, ...]:
    prompts = demo.held_out()[domain]
    text = _tokenizer().chat_template.render(prompts[index % len(prompts)]["messages"])
    return tuple(_tokenizer().encode(text, add_special_tokens=False))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "target")
