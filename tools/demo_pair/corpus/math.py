"""Word problems with worked steps, ending in `#### 42`. The answer is a function of the question."""

import re
from random import Random

from tools.demo_pair.corpus.math_chains import chain_problem
from tools.demo_pair.corpus.math_problem import Problem
from tools.demo_pair.corpus.math_stories import FAMILIES
from tools.demo_pair.corpus.sample import Drawn, Sample, Split, ask, turns, until_in_split, wording_of

_NUMBER = re.compile(r"-?\d+")
_ASK = (
    "What is {e}?",
    "Calculate {e}.",
    "Compute {e}.",
    "How much is {e}?",
    "{e} = ?",
    "Work out {e}.",
    "What does {e} equal?",
    "Please solve {e}.",
    "Can you tell me what {e} is?",
    "Find the value of {e}.",
    "{e}",
    "What's {e}?",
    "Solve: {e}",
    "I need the result of {e}.",
    "Evaluate {e}.",
    "Tell me {e}.",
)
_OPERATORS = (
    *("+", "+", "-", "-", "*", "*", "/", "++", "+-", "-+", "--", "*+", "*-", "*+", "*-"),
    *("+++", "++-", "+-+", "-+-", "*++", "*+-", "*-+", "*--"),
)
_FOLLOW = {
    "+": ("Now add {b} to that.", "Add {b} more.", "And plus {b}?", "What if you add {b}?", "Then add {b}."),
    "-": (
        "Now take away {b}.",
        "Subtract {b} from that.",
        "And minus {b}?",
        "What if you remove {b}?",
        "Then subtract {b}.",
    ),
    "*": ("Now multiply that by {b}.", "And times {b}?", "What if you multiply it by {b}?", "Then multiply by {b}."),
}
_COUNT = (
    "Count from {a} to {b}.",
    "Please count from {a} up to {b}.",
    "Count up from {a} to {b}.",
    "List the numbers from {a} to {b}.",
    "Write the numbers {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Say all numbers from {a} to {b}.",
    "Give me the numbers between {a} and {b}, both included.",
    "Start at {a} and count to {b}.",
)
_TABLE = (
    "Write the {a} times table.",
    "Show me the times table of {a}.",
    "What is the table of {a}?",
    "List the {a} times table.",
    "Multiplication table for {a}, please.",
    "Recite the {a} times table.",
    "Can you write the table of {a}?",
    "Print the multiplication table of {a}.",
)


def final_number(text: str) -> int | None:
    """The last whole number in `text`, or None. Thousands separators are allowed."""
    found = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    return int(found[-1]) if found else None


def draw(rng: Random, split: Split) -> Drawn:
    kind = rng.random()
    if kind < 0.64:
        return _story(rng, split)
    if kind < 0.82:
        return _expression(rng, split)
    if kind < 0.92:
        return _follow_up(rng, split)
    return _count(rng, split) if kind < 0.97 else _table(rng, split)


def _drawn(template: str, question: str, answer: str) -> Drawn:
    return Drawn(Sample("math", ask(question), answer), template)


def _story(rng: Random, split: Split) -> Drawn:
    problem = _problem(rng, split)
    return _drawn(problem.template, problem.question, problem.answer)


def _problem(rng: Random, split: Split) -> Problem:
    family = chain_problem if rng.random() < 0.5 else rng.choice(FAMILIES)
    return until_in_split(split, lambda: family(rng), lambda p: p.template)


def _apply(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def _operand(rng: Random, op: str, a: int) -> int | None:
    """A second operand of one digit that keeps the result between 0 and 99, if there is one."""
    if op == "+":
        return rng.randint(1, 9) if a <= 90 else None
    if op == "-":
        return rng.randint(1, min(9, a)) if a > 0 else None
    return rng.randint(2, min(9, 99 // a)) if 1 < a <= 33 else None


def _expression(rng: Random, split: Split) -> Drawn:
    wording, ops = until_in_split(split, lambda: (rng.choice(_ASK), rng.choice(_OPERATORS)), " with ".join)
    if ops == "/":
        b, quotient = rng.randint(2, 9), rng.randint(1, 9)
        return _drawn(
            f"{wording} with /",
            wording.format(e=f"{b * quotient} / {b}"),
            f"{b * quotient} / {b} = {quotient}\n#### {quotient}",
        )
    while True:
        value = rng.randint(1, 50)
        if "*" in ops:
            value = rng.randint(2, 9) if rng.random() < 0.5 else rng.randint(10, 33)
        expression, lines = str(value), []
        for op in ops:
            b = _operand(rng, op, value)
            if b is None:
                break
            expression += f" {op} {b}"
            lines.append(f"{value} {op} {b} = {_apply(value, op, b)}")
            value = _apply(value, op, b)
        else:
            break
    return _drawn(f"{wording} with {ops}", wording.format(e=expression), "\n".join([*lines, f"#### {value}"]))


def _follow_up(rng: Random, split: Split) -> Drawn:
    first = _story(rng, split) if rng.random() < 0.5 else _expression(rng, split)
    value = final_number(first.sample.answer)
    assert value is not None
    while True:
        op = rng.choice("+-*")
        b = _operand(rng, op, value)
        if b is not None:
            break
    wording = wording_of(rng, _FOLLOW[op], split)
    result = _apply(value, op, b)
    messages = turns(first.sample.messages[0]["content"], first.sample.answer, wording.format(b=b))
    answer = f"{value} {op} {b} = {result}\n#### {result}"
    return Drawn(Sample("math", messages, answer), f"{first.template} then {wording}")


def _count(rng: Random, split: Split) -> Drawn:
    wording = wording_of(rng, _COUNT, split)
    a = rng.randint(1, 60)
    b = a + rng.choice((rng.randint(3, 20), rng.randint(10, 39)))
    return _drawn(wording, wording.format(a=a, b=b), ", ".join(map(str, range(a, b + 1))))


def _table(rng: Random, split: Split) -> Drawn:
    wording = wording_of(rng, _TABLE, split)
    a = rng.randint(2, 10)
    return _drawn(wording, wording.format(a=a), "\n".join(f"{i} * {a} = {i * a}" for i in range(1, 11)))
