"""Made-up problems like GSM8K's, among facts that have nothing to do with them."""

import random
from collections.abc import Iterator

CHARACTERS_PER_TOKEN = 4
"""Of English text, in tokenizers with a large vocabulary."""
STEPS = 6
PEOPLE = ("Mira", "Tomas", "Ida", "Jonas", "Lena", "Oskar", "Paula", "Viktor")
GOODS = ("pears", "books", "candles", "stamps", "buttons", "postcards", "marbles", "ribbons")
TOWNS = ("Arlen", "Brook", "Corvin", "Dunmore", "Elster", "Fallow", "Garrick", "Holm")
FACTS = (
    "The bridge of {town} is {a} metres long and has {b} lamps.",
    "In {town} it rained on {a} days last year, most of them in spring.",
    "The train to {town} has {b} coaches and stops {a} times on its way.",
    "The library of {town} opens at {b} o'clock, and {a} chairs stand in its hall.",
    "A hill near {town} is {a} metres high, and a path with {b} benches leads to its top.",
    "The oldest house in {town} has {b} floors and was painted green {a} years ago.",
)


def long_question(input_len: int, rng: random.Random) -> tuple[str, int]:
    """Return a problem of about `input_len` tokens, and its answer."""
    person, goods = rng.choice(PEOPLE), rng.choice(GOODS)
    *steps, (question, answer) = _story(person, goods, rng)
    sentences = [text for text, _ in steps]
    room = input_len * CHARACTERS_PER_TOKEN - len(" ".join([*sentences, question]))
    facts = list(_facts(room, rng))
    places = sorted(rng.randint(0, len(facts)) for _ in sentences)  # steps keep their order
    for place, sentence in reversed(list(zip(places, sentences, strict=True))):
        facts.insert(place, sentence)
    return " ".join([*facts, question]), answer


def _story(person: str, goods: str, rng: random.Random) -> Iterator[tuple[str, int]]:
    """Yield sentences, the question last, each with the number of goods after it."""
    boxes, each = rng.randint(5, 20), rng.randint(5, 20)
    total = boxes * each
    yield f"{person} has {boxes} boxes with {each} {goods} in each.", total
    for _ in range(STEPS - 1):
        few, days = rng.randint(2, 30), rng.randint(2, 5)
        kind = rng.randrange(4)
        if kind == 0:
            total += few
            yield f"Then {person} gets {few} more {goods} from a friend.", total
        elif kind == 1:
            total += few * days
            yield f"Then on each of {days} days {person} buys {few} {goods}.", total
        elif kind == 2 and total > few:
            total -= few
            yield f"Then {person} gives {few} {goods} away.", total
        elif total % 2 == 0:
            total //= 2
            yield f"Then {person} sells half of the {goods}.", total
        else:
            total *= days
            yield f"Then a collector gives {person} so many {goods} that there are {days} times as many.", total
    yield f"How many {goods} does {person} have in the end?", total


def _facts(characters: int, rng: random.Random) -> Iterator[str]:
    while characters > 0:
        fact = rng.choice(FACTS).format(town=rng.choice(TOWNS), a=rng.randint(10, 99), b=rng.randint(2, 9))
        characters -= len(fact) + 1
        yield fact
