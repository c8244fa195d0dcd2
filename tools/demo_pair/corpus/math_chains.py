"""Word problems about one quantity that changes a few times: an opening, changes, a question."""

from random import Random

from tools.demo_pair.corpus.math_problem import Problem, Value, people, worked

OPENINGS = (
    "{name} has {n} {item}.",
    "{name} starts with {n} {item}.",
    "There are {n} {item} on {name}'s table.",
    "In the morning {name} has {n} {item}.",
    "{name} owns {n} {item}.",
    "{name} puts {n} {item} in a box.",
    "At first {name} has {n} {item}.",
    "{name} collects {n} {item}.",
)
MORE = (
    ("{name} buys {b} more {item}.", "Buying {b} more"),
    ("{friend} gives {name} {b} {item}.", "{friend} gives {b}"),
    ("{name} finds {b} more {item}.", "Finding {b} more"),
    ("{name} wins {b} {item} at the fair.", "Winning {b}"),
    ("A neighbour brings {b} {item}.", "The neighbour brings {b}"),
    ("Then {b} more {item} arrive.", "Then {b} arrive"),
    ("{name} gets {b} {item} as a present.", "The present adds {b}"),
    ("{friend} adds {b} {item}.", "{friend} adds {b}"),
)
LESS = (
    ("{name} gives {b} {item} to {friend}.", "Giving away {b}"),
    ("{name} loses {b} {item}.", "Losing {b}"),
    ("{name} sells {b} of them.", "Selling {b}"),
    ("Then {b} {item} break.", "Then {b} break"),
    ("{friend} takes {b} {item}.", "{friend} takes {b}"),
    ("{name} uses {b} {item} at school.", "Using {b}"),
    ("{name} throws away {b} {item}.", "Throwing away {b}"),
    ("{b} {item} are stolen.", "Then {b} are stolen"),
)
_TIMES = (
    ("Then {name} doubles the number of {item}.", "Doubling", 2),
    ("Then the number of {item} triples.", "Tripling", 3),
    ("{name} works hard and ends up with {k} times as many.", "Having {k} times as many", 0),
    ("Soon there are {k} times as many {item}.", "Growing {k} times", 0),
)
_SHARES = (
    ("{name} splits the {item} equally into {k} bags and keeps one bag.", "One of {k} bags is"),
    ("{name} shares them equally among {k} children, and you look at one child.", "One of {k} children gets"),
)
ASKS = (
    "How many {item} are there now?",
    "How many {item} does {name} have in the end?",
    "What is the number of {item} now?",
    "How many {item} are left?",
    "Find the final number of {item}.",
    "How many {item} is that?",
)


def chain_problem(rng: Random) -> Problem:
    """An opening, two or three changes, a question."""
    values = people(rng)
    start = value = rng.randint(4, 9) if rng.random() < 0.4 else rng.randint(5, 40)
    wordings = [rng.choice(OPENINGS)]
    steps = [f"We start with {start} {{item}}."]
    question = wordings[0].format(n=start, **values)
    for _ in range(rng.choice((1, 2, 2, 3, 3))):
        wording, sentence, lead, sum_, value = _change(rng, values, value)
        wordings.append(wording)
        question += " " + sentence
        steps.append(f"{lead}: {sum_} = {value}.")
    wordings.append(rng.choice(ASKS))
    question += " " + wordings[-1].format(**values)
    return Problem(" ".join(wordings), question, worked([s.format(**values) for s in steps], value))


def _change(rng: Random, values: dict[str, Value], value: int) -> tuple[str, str, str, str, int]:
    """One change to a quantity: wording, sentence, lead of its step, the sum, the new value."""
    divisors = [k for k in range(2, 10) if value % k == 0 and value // k <= 10 and value > k]
    kinds = (
        ["more"] * (value < 50) * 3
        + ["less"] * (value > 4) * 3
        + ["times"] * (2 <= value <= 9)
        + ["share"] * bool(divisors)
    )
    match rng.choice(kinds):
        case "more":
            wording, lead = rng.choice(MORE)
            b = rng.randint(2, 9)
            sum_, new = f"{value} + {b}", value + b
        case "less":
            wording, lead = rng.choice(LESS)
            b = rng.randint(1, min(value - 1, 9))
            sum_, new = f"{value} - {b}", value - b
        case "times":
            wording, lead, b = rng.choice(_TIMES)
            b = b or rng.randint(2, 5)
            sum_, new = f"{value} * {b}", value * b
        case _:
            wording, lead = rng.choice(_SHARES)
            b = rng.choice(divisors)
            sum_, new = f"{value} / {b}", value // b
    numbers = {"b": b, "k": b}
    return wording, wording.format(**numbers, **values), lead.format(**numbers, **values), sum_, new
