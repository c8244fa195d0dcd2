"""What every domain hands out, and how templates are divided between training and held-out."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeVar
from zlib import crc32

Split = Literal["train", "heldout"]
Message = dict[str, Any]
HELDOUT_ONE_IN = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """A conversation and its answer. `messages` are OpenAI style and end with the user's turn, or a tool's."""

    domain: str
    messages: list[Message]
    answer: str
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A sample and the template it was made from: its wording with the variable parts left out."""

    sample: Sample
    template: str


def split_of(template: str) -> Split:
    """The one split a template belongs to, by a stable hash."""
    return "heldout" if crc32(template.encode()) % HELDOUT_ONE_IN == 0 else "train"


def until_in_split(split: Split, pick: Callable[[], T], template: Callable[[T], str]) -> T:
    """Pick again until the template of the pick belongs to `split`."""
    while True:
        picked = pick()
        if split_of(template(picked)) == split:
            return picked


def wording_of(rng: Random, wordings: tuple[str, ...], split: Split) -> str:
    """One wording of a short list, of which a sixth (at least one) is held out, by a stable hash."""
    ranked = sorted(wordings, key=lambda w: crc32(w.encode()))
    held_out = max(1, len(ranked) // 6)
    return rng.choice(ranked[:held_out] if split == "heldout" else ranked[held_out:])


def ask(question: str) -> list[Message]:
    return [{"role": "user", "content": question}]


def turns(*contents: str) -> list[Message]:
    """User, assistant, user, ... in order."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def one_of_words(rng: Random, words: tuple[str, ...], other_than: str = "") -> str:
    while (word := rng.choice(words)) == other_than:
        pass
    return word
