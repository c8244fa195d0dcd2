"""What a word problem is.

A template is the wording with `{n}`, `{name}`, ... in place of what varies. The split is decided on it, so a held-out
problem is a combination of sentences that training never showed together.
"""

from dataclasses import dataclass
from random import Random

from tools.demo_pair.corpus.lexicon import ITEMS, NAMES, OBJECTS
from tools.demo_pair.corpus.sample import one_of_words

Value = int | str


@dataclass(frozen=True)
class Problem:
    template: str
    question: str
    answer: str


def problem(wordings: list[str], values: dict[str, Value], steps: list[str], result: int) -> Problem:
    """A problem in `wordings`, worked in `steps`, both with gaps for `values`."""
    template = " ".join(wordings)
    return Problem(template, template.format(**values), worked([s.format(**values) for s in steps], result))


def worked(steps: list[str], result: int) -> str:
    return "\n".join([*steps, f"The answer is {result}.", f"#### {result}"])


def people(rng: Random) -> dict[str, Value]:
    """Two people and two kinds of things to talk about."""
    name = rng.choice(NAMES)
    return {
        "name": name,
        "friend": one_of_words(rng, NAMES, name),
        "item": rng.choice(ITEMS),
        "thing": rng.choice(OBJECTS),
    }
