"""Word problems of other kinds: shopping, journeys, groups, ages, shapes, two people together. Numbers stay small."""

from collections.abc import Callable
from random import Random

from tools.demo_pair.corpus.math_chains import ASKS, LESS, MORE, OPENINGS
from tools.demo_pair.corpus.math_problem import Problem, people, problem


def _shopping(rng: Random) -> Problem:
    v = people(rng) | {"k": rng.randint(2, 9), "p": rng.randint(2, 9), "q": rng.randint(2, 9)}
    cost = int(v["k"]) * int(v["p"])
    total = cost + int(v["q"])
    more = rng.random() < 0.65
    v |= {"c": cost, "t": total, "m": (total if more else cost) + rng.randint(1, 9)}
    first = rng.choice(
        (
            "{name} buys {k} {item} for {p} dollars each.",
            "At the shop {name} takes {k} {item} that cost {p} dollars each.",
            "One of the {item} costs {p} dollars and {name} buys {k}.",
            "{name} pays {p} dollars for each of {k} {item}.",
        )
    )
    steps = ["The {item} cost {k} * {p} = {c} dollars."]
    wordings, result = [first], cost
    if more:
        wordings.append(
            rng.choice(
                (
                    "{name} also buys a {thing} for {q} dollars.",
                    "A {thing} costs {q} dollars more.",
                    "Then {name} pays {q} dollars for a {thing}.",
                    "There is also a {thing} for {q} dollars.",
                )
            )
        )
        steps.append("With the {thing}: {c} + {q} = {t} dollars.")
        result = total
    if rng.random() < 0.5:
        wordings.append(
            rng.choice(
                (
                    "{name} pays with {m} dollars. What is the change?",
                    "How much is left from {m} dollars?",
                    "{name} had {m} dollars. How many dollars remain?",
                )
            )
        )
        result = int(v["m"]) - result
        steps.append("The rest is {m} - " + ("{t}" if len(steps) == 2 else "{c}") + f" = {result} dollars.")
    else:
        wordings.append(
            rng.choice(
                (
                    "How much does {name} pay?",
                    "What is the total cost?",
                    "How many dollars does {name} spend?",
                    "What does it cost in all?",
                )
            )
        )
    return problem(wordings, v, steps, result)


def _journey(rng: Random) -> Problem:
    v = people(rng) | {"k": rng.randint(2, 9), "h": rng.randint(2, 9), "b": rng.randint(2, 9)}
    way = int(v["k"]) * int(v["h"])
    v |= {"w": way, "t": way + int(v["b"])}
    how = rng.choice(("walks", "rides", "rows", "runs", "travels", "sails"))
    wordings = [
        "{name} "
        + how
        + rng.choice((" {k} miles an hour for {h} hours", " for {h} hours at {k} miles an hour"))
        + rng.choice((".", " and then rests.")),
    ]
    steps, result = ["In {h} hours: {k} * {h} = {w} miles."], way
    if rng.random() < 0.6:
        wordings.append(
            rng.choice(
                (
                    "Then {name} goes {b} miles more.",
                    "The next day it is {b} miles more.",
                    "A bus takes {name} {b} miles further.",
                )
            )
        )
        steps.append("With {b} more: {w} + {b} = {t} miles.")
        result = int(v["t"])
    wordings.append(
        rng.choice(
            (
                "How far does {name} get?",
                "How many miles is that?",
                "What is the whole distance?",
                "How long is the way in miles?",
            )
        )
    )
    return problem(wordings, v, steps, result)


def _groups(rng: Random) -> Problem:
    k, n = rng.randint(2, 9), rng.randint(2, 9)
    b = rng.randint(1, min(k * n - 1, 9))
    v = people(rng) | {"k": k, "n": n, "b": b, "c": k * n}
    box = rng.choice(("boxes", "bags", "rows", "shelves", "baskets"))
    wordings = [
        rng.choice(
            (
                "There are {k} " + box + " with {n} {item} in each.",
                "{name} has {k} " + box + " of {n} {item}.",
                "{name} fills {k} " + box + " with {n} {item} each.",
                "Each of {k} " + box + " holds {n} {item}.",
            )
        )
    ]
    steps, result = ["In all: {k} * {n} = {c} {item}."], k * n
    if rng.random() < 0.7:
        wording, lead = rng.choice(MORE + LESS)
        sign = "+" if (wording, lead) in MORE else "-"
        result = k * n + b if sign == "+" else k * n - b
        wordings.append(wording)
        steps.append(f"{lead}: {{c}} {sign} {{b}} = {result}.")
    wordings.append(rng.choice(ASKS))
    return problem(wordings, v, steps, result)


def _ages(rng: Random) -> Problem:
    a, b, c = rng.randint(4, 40), rng.randint(2, 9), rng.randint(2, 9)
    v = people(rng) | {"a": a, "b": b, "c": c}
    wordings = [rng.choice(("{name} is {a} years old.", "{name} has just turned {a}.", "Today {name} is {a}."))]
    if rng.random() < 0.3 and a <= 9:
        wordings.append(rng.choice(("{friend} is {b} times as old.", "{friend} is {b} times as old as {name}.")))
        v["b"] = b = rng.randint(2, 5)
        other, sign = a * b, "*"
    elif rng.random() < 0.6 or b >= a:
        wordings.append(
            rng.choice(
                (
                    "{friend} is {b} years older.",
                    "{friend} was born {b} years before {name}.",
                    "{friend} is older by {b} years.",
                )
            )
        )
        other, sign = a + b, "+"
    else:
        wordings.append(
            rng.choice(
                (
                    "{friend} is {b} years younger.",
                    "{friend} was born {b} years after {name}.",
                    "{friend} is younger by {b} years.",
                )
            )
        )
        other, sign = a - b, "-"
    steps, result = [f"{{friend}} is {{a}} {sign} {{b}} = {other} years old."], other
    match rng.randrange(3 if max(a, other) <= 9 else 2):
        case 0:
            wordings.append(
                rng.choice(("How old is {friend}?", "What is the age of {friend}?", "How many years old is {friend}?"))
            )
        case 1:
            wordings.append(
                rng.choice(("How old will {friend} be in {c} years?", "What will be the age of {friend} in {c} years?"))
            )
            result = other + c
            steps.append(f"In {{c}} years: {other} + {{c}} = {result}.")
        case _:
            wordings.append(
                rng.choice(
                    (
                        "How old are they together?",
                        "What is the sum of their ages?",
                        "How many years are they together?",
                    )
                )
            )
            result = a + other
            steps.append(f"Together: {{a}} + {other} = {result}.")
    return problem(wordings, v, steps, result)


def _shapes(rng: Random) -> Problem:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    v = people(rng) | {"a": a, "b": b}
    what = rng.choice(("garden", "field", "room", "wall", "table", "park"))
    wordings = [
        rng.choice(
            (
                "A " + what + " is {a} feet long and {b} feet wide.",
                "{name} has a " + what + " of {a} by {b} feet.",
                "The sides of a " + what + " are {a} feet and {b} feet.",
                "{name} measures a " + what + ": {a} feet by {b} feet.",
            )
        )
    ]
    if rng.random() < 0.5:
        wordings.append(
            rng.choice(("What is its area?", "How many square feet is that?", "Find the area.", "How big is the area?"))
        )
        return problem(wordings, v, [f"The area is {{a}} * {{b}} = {a * b} square feet."], a * b)
    wordings.append(
        rng.choice(
            (
                "What is its perimeter?",
                "How long is a fence around it?",
                "Find the perimeter.",
                "How far is it all the way around?",
            )
        )
    )
    return problem(
        wordings,
        v,
        [f"Two sides: {{a}} + {{b}} = {a + b} feet.", f"All sides: 2 * {a + b} = {2 * (a + b)} feet."],
        2 * (a + b),
    )


def _together(rng: Random) -> Problem:
    n, b = rng.randint(2, 9) if rng.random() < 0.5 else rng.randint(5, 40), rng.randint(2, 9)
    v = people(rng) | {"n": n, "b": b}
    wordings = [rng.choice(OPENINGS)]
    if rng.random() < 0.5 or b >= n:
        wordings.append(
            rng.choice(
                (
                    "{friend} has {b} more {item} than {name}.",
                    "{friend} has {b} {item} more.",
                    "That is {b} fewer than {friend} has.",
                )
            )
        )
        other, sign = n + b, "+"
    else:
        wordings.append(
            rng.choice(
                (
                    "{friend} has {b} fewer {item} than {name}.",
                    "{friend} has {b} {item} less.",
                    "That is {b} more than {friend} has.",
                )
            )
        )
        other, sign = n - b, "-"
    steps, result = [f"{{friend}} has {{n}} {sign} {{b}} = {other} {{item}}."], other
    if min(n, other) <= 9:
        wordings.append(
            rng.choice(
                (
                    "How many {item} do they have together?",
                    "How many {item} do both have?",
                    "What is the total number of {item}?",
                )
            )
        )
        result = n + other
        steps.append(f"Together: {{n}} + {other} = {result}.")
    else:
        wordings.append(
            rng.choice(
                (
                    "How many {item} does {friend} have?",
                    "What is the number {friend} has?",
                    "Find how many {item} {friend} has.",
                )
            )
        )
    return problem(wordings, v, steps, result)


FAMILIES: tuple[Callable[[Random], Problem], ...] = (_shopping, _journey, _groups, _ages, _shapes, _together)
