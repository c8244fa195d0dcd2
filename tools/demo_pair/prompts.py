"""Writes app/demo/prompts.json: held-out prompts of the demo pair, which the server's package has as data.

`python -m tools.demo_pair.prompts` writes the file. With COUNT it prints `{"prompts", "stop_token_ids"}` as one line.
"""

import json
import sys
from itertools import islice
from typing import Any

from app import demo
from app.engine.checkpoint.files import DEMO
from app.text.tokenizer import Tokenizer
from tools.demo_pair.corpus import DOMAINS, Sample, samples
from tools.demo_pair.corpus.lexicon import OTHER_WORDS
from tools.demo_pair.corpus.math import final_number

PER_DOMAIN = 200
"""The figures of `bench eval` in docs/performance.md have 200 problems."""
WITH_TOKEN_IDS = 24
"""The soak's long prompts need 2,400 tokens in all, which 24 prompts of each domain have twice over."""


def contents() -> str:
    """Return the file's text, one prompt a line."""
    tokenizer = Tokenizer(DEMO / "target")
    domains = []
    for domain in DOMAINS:
        chosen = islice(samples(domain, "heldout", 0), PER_DOMAIN)
        lines = [json.dumps(_prompt(sample, index, tokenizer)) for index, sample in enumerate(chosen)]
        domains.append(f"{json.dumps(domain)}: [\n" + ",\n".join(lines) + "\n]")
    head = f'"stop_token_ids": {tokenizer.eos_ids},\n"words": {json.dumps(" ".join(OTHER_WORDS))},\n'
    return "{\n" + head + '"prompts": {\n' + ",\n".join(domains) + "\n}\n}\n"


def _prompt(sample: Sample, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": sample.messages}
    if sample.domain == "math":
        prompt["answer"] = str(final_number(sample.answer))
    elif sample.domain in ("code", "copy"):
        prompt["answer"] = sample.answer
    if index < WITH_TOKEN_IDS:
        text = tokenizer.chat_template.render(list(sample.messages))
        prompt["token_ids"] = tokenizer.encode(text, add_special_tokens=False)
    return prompt


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps({"prompts": demo.token_ids(int(sys.argv[1])), "stop_token_ids": demo.stop_token_ids()}))
    else:
        demo.PROMPTS.write_text(contents(), encoding="utf-8")
