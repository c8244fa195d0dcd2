"""Short stories from a grammar. Many words fit at every place, so no model can know the next one."""

import itertools
from random import Random

from tools.demo_pair.corpus.lexicon import ADJECTIVES, ANIMALS, NAMES, OBJECTS, PLACES
from tools.demo_pair.corpus.sample import Drawn, Sample, Split, ask, until_in_split

_ASKS = (
    "Tell me a short story about a {hero} and a {thing}.",
    "Write a short story about a {hero} and a {thing}.",
    "Tell a story with a {hero} and a {thing} in it.",
    "Can you write a story about a {hero} who finds a {thing}?",
    "I would like a story about a {hero} and a {thing}.",
    "Story time: a {hero}, a {thing}.",
    "Make up a story about a {hero} and a {thing}.",
    "Please tell me about a {hero} and a {thing}.",
    "Give me a little tale of a {hero} and a {thing}.",
    "Write something about a {hero} and a {thing}.",
    "Invent a story: a {hero} and a {thing}.",
    "A story about a {hero} and a {thing}, please.",
    "Tell me a story about a {hero}.",
    "Write a short story about a {hero}.",
    "Tell me a story.",
    "Write a tale about a {thing}.",
)
_WHEN = (
    "Once",
    "Long ago",
    "One morning",
    "Last winter",
    "In early spring",
    "On a rainy day",
    "Before the harvest",
    "Years ago",
    "One evening",
    "At the end of summer",
    "On the first day of school",
    "After a storm",
    "Late at night",
)
_VERBS = (
    "walked",
    "ran",
    "wandered",
    "hurried",
    "crept",
    "climbed",
    "travelled",
    "danced",
    "sailed",
    "marched",
    "limped",
    "rolled",
)
_SAW = ("saw", "met", "heard", "noticed", "followed", "found", "greeted", "remembered", "dreamed of", "looked for")
_FELT = (
    "happy",
    "afraid",
    "hungry",
    "calm",
    "cold",
    "certain",
    "ashamed",
    "surprised",
    "sleepy",
    "angry",
    "free",
    "hopeful",
)
_SAID = ("said", "whispered", "asked", "shouted", "sang", "answered", "muttered", "laughed")
_WORDS = (
    "Nobody owns the {place}",
    "We should wait for {name}",
    "I have lost my {other}",
    "This {thing} is {adj}",
    "Come with me to the {place}",
    "Winter is near",
    "I know a {adj} way",
    "You are too {adj}",
    "The {animal} was here first",
    "Look behind the {other}",
    "I never liked the {place}",
    "Give it to {name}",
    "The {other} can wait",
    "Listen to the {animal}",
)
_OPEN = (
    "{when} a {adj} {hero} lived near a {place}.",
    "{when} there was a {hero} with a {adj} {other}.",
    "{when} a {hero} {verb} to the {place}.",
    "{when} {name} the {hero} {saw} a {adj} {animal}.",
    "A {adj} {hero} {verb} over the {place} without a {other}.",
    "Nobody in the {place} knew the {adj} {hero}.",
    "The {hero} of this story was {adj} and {felt}.",
    "There was a {place} where a {hero} kept a {adj} {other}.",
)
_MIDDLE: dict[str, tuple[str, ...]] = {
    "Soon": (
        "So the {hero} {verb} to the {place}.",
        "It {verb} past the {place} and {saw} a {other}.",
        "All day the {hero} {saw} nothing but the {place}.",
        "The {hero} {verb} and {verb} until it {saw} a {place}.",
    ),
    "Then": (
        "There it {saw} a {thing}.",
        "Behind the {place} stood a {adj} {animal}.",
        "Under the {thing} lay a {other}.",
        "Not far away a {animal} {verb} with a {other}.",
    ),
    "A little later": (
        '"{words}," {said} the {animal}.',
        '"{words}," {said} {name}.',
        '"{words}," {said} the {hero}, and it {verb} away.',
    ),
    "After that": (
        "The wind took the {other} away.",
        "Snow fell on the {place}.",
        "For {count} days the {hero} waited.",
        "{name} came by with a {adj} {other}.",
    ),
    "Before long": (
        "The {thing} was {adj}, and the {hero} felt {felt}.",
        "It felt {felt}, but it {verb} on.",
        "The {place} was {adj} and {adj}.",
    ),
    "Meanwhile": (
        "A {animal} {saw} the {thing} and felt {felt}.",
        "The {hero} hid the {thing} in the {place}.",
        "The {animal} wanted the {thing} for a {other}.",
    ),
}
"""Sentences between opening and close. The words before each say how far the story is, and each place has its own
kinds of sentence, so that greedy text does not go in circles."""
_ALL_MIDDLE = tuple(wording for wordings in _MIDDLE.values() for wording in wordings)
_CLOSE = (
    "At last the {hero} {verb} home and felt {felt}.",
    "In the end the {thing} stayed in the {place}.",
    "Since then the {hero} and the {animal} share the {other}.",
    "And the {thing} is still {adj}.",
    "That night the {hero} slept {adj} and {felt}.",
    "The {animal} never {saw} the {hero} again.",
    "From that day on {name} kept the {thing}.",
    "And nobody {saw} the {other} again.",
)
_COUNTS = ("two", "three", "five", "seven", "nine", "eleven", "many")


def draw(rng: Random, split: Split) -> Drawn:
    """A story of three to eight sentences. Its template is the request and the first two kinds of sentence."""
    places = [place for place in _MIDDLE if place == "Soon" or rng.random() < 0.6]
    asked, opening, second = until_in_split(
        split,
        lambda: (rng.choice(_ASKS), rng.choice(_OPEN), rng.choice(_MIDDLE["Soon"])),
        lambda parts: " ".join(parts),
    )
    hero, thing = rng.choice(ANIMALS), rng.choice(OBJECTS)
    middle = [second, *(rng.choice(_MIDDLE[place]) for place in places[1:])]
    told = [f"{place}: {sentence(rng, s, hero, thing)}" for place, s in zip(places, middle, strict=True)]
    ends = [sentence(rng, s, hero, thing) for s in (opening, rng.choice(_CLOSE))]
    story = " ".join((ends[0], *told, ends[1]))
    return Drawn(Sample("prose", ask(asked.format(hero=hero, thing=thing)), story), f"{asked} {opening} {second}")


def sentence(rng: Random, wording: str, hero: str, thing: str) -> str:
    """Fill a wording, drawing anew for every gap; "a owl" becomes "an owl"."""
    while "{" in wording:
        gap = wording[wording.index("{") : wording.index("}") + 1]
        wording = wording.replace(gap, _fill(rng, gap[1:-1], hero, thing), 1)
    words = wording.split(" ")
    for i, (word, following) in enumerate(itertools.pairwise(words)):
        if word in ("a", "A") and following[0] in "aeiou":
            words[i] += "n"
    return " ".join(words)


def any_sentence(rng: Random) -> str:
    """One sentence of a story about anything."""
    return sentence(rng, rng.choice(_OPEN + _ALL_MIDDLE + _CLOSE), rng.choice(ANIMALS), rng.choice(OBJECTS))


def _fill(rng: Random, gap: str, hero: str, thing: str) -> str:
    choices = {
        "when": _WHEN,
        "adj": ADJECTIVES,
        "place": PLACES,
        "other": OBJECTS,
        "animal": ANIMALS,
        "name": NAMES,
        "verb": _VERBS,
        "saw": _SAW,
        "felt": _FELT,
        "said": _SAID,
        "words": _WORDS,
        "count": _COUNTS,
        "hero": (hero,),
        "thing": (thing,),
    }
    return rng.choice(choices[gap])
