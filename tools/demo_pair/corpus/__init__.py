"""Generated conversations in six domains and with tools, with held-out templates. Pure Python, no torch.

for sample in itertools.islice(samples("math", "heldout", seed=0), 200):
    text = ask(sample.messages)
    right += is_right(sample, text)
"""

import random
from collections.abc import Iterator

from tools.demo_pair.corpus import code, copying, first, math, prose, talk, tools
from tools.demo_pair.corpus.sample import Drawn, Sample, Split

__all__ = ["DOMAINS", "FIRST", "TOOLS", "Drawn", "Sample", "Split", "drawn", "is_right", "samples"]

_DRAW = {
    "math": math.draw,
    "prose": prose.draw,
    "code": code.draw,
    "copy": copying.draw_known,
    "jumble": copying.draw_jumble,
    "talk": talk.draw,
}
DOMAINS: tuple[str, ...] = tuple(_DRAW)
TOOLS, FIRST = "tools", "first"
"""Domains too. Samples of TOOLS have `tools`, and those of FIRST are what people type first."""
_DRAW |= {TOOLS: tools.draw, FIRST: first.draw}


def drawn(domain: str, split: Split, seed: int) -> Iterator[Drawn]:
    """Endless samples with the template each was made from. A template belongs to one split only."""
    if domain not in _DRAW:
        raise ValueError(f"unknown domain {domain!r}; the domains are {', '.join(_DRAW)}")
    if split not in ("train", "heldout"):
        raise ValueError(f"unknown split {split!r}; use 'train' or 'heldout'")
    rng = random.Random(f"{domain}/{split}/{seed}")
    draw = _DRAW[domain]
    while True:
        yield draw(rng, split)


def samples(domain: str, split: Split, seed: int) -> Iterator[Sample]:
    """Endless samples of one domain, the same for the same seed. Raises ValueError for an unknown domain or split."""
    return (d.sample for d in drawn(domain, split, seed))


def is_right(sample: Sample, text: str) -> bool:
    """Whether `text` answers the sample.

    Math is judged by its final number, calls by what they are parsed to, and everything else by its exact stripped text.

    Prose and talk have many good answers, so only math, copy and (strictly) code are worth counting.
    """
    if sample.domain == "math" or (sample.domain == FIRST and "####" in sample.answer):
        return math.final_number(text) == math.final_number(sample.answer)
    if calls := tools.calls_in(sample.answer):
        return tools.calls_in(text) == calls
    return text.strip() == sample.answer.strip()
