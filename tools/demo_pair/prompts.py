"""Held-out prompts of the demo pair as token ids.

`python -m tools.demo_pair.prompts COUNT` prints one line of JSON: `{"prompts", "stop_token_ids"}`.
"""

import itertools
import json
import sys
from functools import cache

from app.config.checkpoint import DEMO
from app.text.tokenizer import Tokenizer
from tools.demo_pair.corpus import samples

_DOMAINS = ("math", "copy", "code", "prose", "talk", "jumble")


@cache
def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Of all domains in turn."""
    tokenizer = _tokenizer()
    chosen = zip(*(itertools.islice(samples(domain, "heldout", seed), count) for domain in _DOMAINS), strict=True)
    texts = [tokenizer.chat_template.render(list(sample.messages)) for row in chosen for sample in row]
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts[:count]]


def stop_token_ids() -> list[int]:
    return _tokenizer().eos_ids


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "target")


if __name__ == "__main__":
    print(json.dumps({"prompts": prompts(int(sys.argv[1])), "stop_token_ids": stop_token_ids()}))
