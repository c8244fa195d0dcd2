"""Kinds of tools: names and descriptions of functions, their parameters, and questions that need them.

A tool has one of the names and one of the descriptions of its kind. Held out are some cities, people, queries and numbers,
so no question with its arguments belongs to both splits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.demo_pair.corpus.lexicon import (
    ADJECTIVES,
    NAMES,
    OTHER_WORDS,
    copied_word,
    made_up_word,
)
from tools.demo_pair.corpus.sample import Split, split_of

Value = str | int
CITIES = (
    *"Bern Paris London Rome Berlin Tokyo Oslo Madrid Vienna Lisbon Athens Dublin Prague Warsaw Cairo Delhi".split(),
    *"Lima Quito Boston Chicago Dallas Denver Miami Seattle Toronto Sydney Zurich Geneva Basel Munich Hamburg".split(),
    *"Milan Venice Porto Seoul Beijing Shanghai Bangkok Hanoi Nairobi Lagos Moscow Kyiv Riga Vilnius Helsinki".split(),
    *"Stockholm Amsterdam Brussels Istanbul Ankara Havana Bogota Santiago Montreal Ottawa Vancouver Houston".split(),
    *"Austin Utrecht Lyon Naples".split(),
    *("New York", "San Francisco", "Los Angeles", "Mexico City", "Cape Town", "Hong Kong", "New Delhi"),
)


@dataclass(frozen=True)
class Parameter:
    name: str
    draw: Callable[[Random, Split], Value]
    description: str = ""

    @property
    def is_string(self) -> bool:
        return self.draw not in (number, small_number)


@dataclass(frozen=True)
class Kind:
    """Kind of tools. `{0}` and `{1}` in a question are the arguments."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]
    result: Callable[[Random, tuple[Value, ...]], str]
    lead: str = "Here is what I found: "


def number(rng: Random, split: Split) -> int:
    """Return a number of `split` of up to four digits. Training has many repeated digits, the hardest to copy."""
    while True:
        digits = [rng.choice("0123456789") for _ in range(rng.randint(1, 4))]
        if split == "train" and rng.random() < _REPEATED:
            digits += [digits[-1]] * (4 - len(digits))
        if split_of(f"number {(drawn := int(''.join(digits)))}") == split:
            return drawn


def small_number(rng: Random, split: Split) -> int:
    while split_of(f"number {(drawn := rng.randint(2, 10) if rng.random() < 0.7 else rng.randint(11, 90))}") != split:
        pass
    return drawn


def city(rng: Random, split: Split) -> str:
    if rng.random() < _MADE_UP:
        return _made_up_plain(rng).capitalize()
    return rng.choice([c for c in CITIES if split_of(f"city {c}") == split])


def person(rng: Random, split: Split) -> str:
    if rng.random() < _MADE_UP:
        return _made_up_plain(rng).capitalize()
    return rng.choice([n for n in NAMES if split_of(f"person {n}") == split])


def words(rng: Random, split: Split) -> str:
    """Return a query of `split`, of known and made-up words."""
    while True:
        drawn = " ".join(_word(rng) for _ in range(rng.randint(2, 4)))
        if split_of(f"query {drawn}") == split:
            return drawn


def _sum(rng: Random, arguments: tuple[Value, ...]) -> str:
    return str(int(arguments[0]) + int(arguments[1]))


def _product(rng: Random, arguments: tuple[Value, ...]) -> str:
    return str(int(arguments[0]) * int(arguments[1]))


def _weather(rng: Random, arguments: tuple[Value, ...]) -> str:
    sky, degrees = rng.choice(("sunny", "cloudy", "rainy", "windy", "cold", "warm", "foggy")), rng.randint(-9, 35)
    texts = (
        f"{sky}",
        f"{sky}, {degrees} degrees",
        f"It is {sky} and {degrees} degrees in {arguments[0]}.",
        f'{{"sky": "{sky}", "temperature": {degrees}}}',
        f'{{"temperature": {degrees}, "unit": "C", "wind": {rng.randint(0, 60)}}}',
        f"The weather in {arguments[0]} is {sky}.",
        f"{degrees}°C, {sky}",
    )
    return rng.choice(texts)


def _finding(rng: Random, arguments: tuple[Value, ...]) -> str:
    some = [_word(rng) for _ in range(rng.randint(1, 6))]
    texts = (
        " ".join(some),
        f"{' '.join(some).capitalize()}.",
        f"{rng.choice(some)} {rng.randint(1, 999)}",
        str(rng.randint(0, 9999)),
        f"The {some[0]} is {rng.choice(ADJECTIVES)}.",
        f'{{"{some[0]}": {rng.randint(0, 999)}}}',
        f'{{"{some[0]}": "{some[-1]}", "{rng.choice(OTHER_WORDS)}": {rng.randint(0, 99)}}}',
        f'["{some[0]}", "{some[-1]}"]',
        f"{rng.choice(NAMES)}, {rng.randint(1, 99)}",
    )
    return rng.choice(texts)


def _done(rng: Random, arguments: tuple[Value, ...]) -> str:
    made = f'{{"id": {rng.randint(1, 999)}}}'
    return rng.choice(("ok", "done", "OK", "Done.", "success", '{"status": "ok"}', made, "true"))


def _pair(description: str) -> tuple[Parameter, Parameter]:
    return Parameter("a", number, f"The first {description}"), Parameter("b", number, f"The second {description}")


_CITY = Parameter("city", city, "The name of the city")
_KINDS = {
    "add": Kind(
        ("add", "add_numbers"),
        ("Add two numbers.", "Return the sum of two numbers.", "Adds two numbers and returns the sum.", "Add a to b."),
        _pair("number"),
        (
            "What is {0} + {1}?",
            "Add {0} and {1}.",
            "What is {0} plus {1}?",
            "Calculate {0} + {1}.",
            "How much is {0} plus {1}?",
            "Please add {0} and {1}.",
            "What is the sum of {0} and {1}?",
            "Compute {0} + {1}.",
            "Add {0} to {1}.",
            "{0} + {1}",
            "Can you add {0} and {1}?",
            "How much is {0} + {1}?",
            "Sum {0} and {1}.",
        ),
        _sum,
    ),
    "multiply": Kind(
        ("multiply", "multiply_numbers"),
        ("Multiply two numbers.", "Return the product of two numbers.", "Multiplies two numbers.", "Multiply a and b."),
        _pair("factor"),
        (
            "What is {0} * {1}?",
            "Multiply {0} by {1}.",
            "What is {0} times {1}?",
            "Calculate {0} * {1}.",
            "How much is {0} times {1}?",
            "Multiply {0} and {1}.",
            "What is the product of {0} and {1}?",
            "Please multiply {0} by {1}.",
            "Compute {0} * {1}.",
            "{0} * {1}",
            "How much is {0} * {1}?",
        ),
        _product,
    ),
    "weather": Kind(
        ("get_weather", "weather"),
        (
            "Get the weather of a city.",
            "Return the weather.",
            "Return the current weather in a city.",
            "Get the current weather for a location.",
            "Tell the weather in a place.",
        ),
        (_CITY,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "What's the weather like in {0}?",
            "Tell me the weather in {0}.",
            "Weather in {0}?",
            "What is the temperature in {0}?",
            "Check the weather in {0}, please.",
            "Give me the weather for {0}.",
            "What is the weather in {0} today?",
        ),
        _weather,
        lead="The weather in {0}: ",
    ),
    "search": Kind(
        ("look_up", "search"),
        (
            "Search the web.",
            "Look up a topic.",
            "Search for information.",
            "Look something up.",
            "Find information about a topic.",
        ),
        (Parameter("query", words, "The search query"),),
        (
            "Search for {0}.",
            "Look up {0}.",
            "Search the web for {0}.",
            "Find information about {0}.",
            "Please look up {0}.",
            "Can you search for {0}?",
            "Look up {0} for me.",
            "Search: {0}",
        ),
        _finding,
    ),
    "person": Kind(
        ("save_person", "User"),
        ("A person.", "Save a person.", "Add a user with name and age.", "The person of the text.", "A user."),
        (
            Parameter("name", person, "The name"),
            Parameter("age", small_number, "The age"),
        ),
        (
            "{0} is {1} years old.",
            "Extract: {0} is {1} years old.",
            "My friend {0} is {1} years old.",
            "{0}, {1} years old.",
            "Save {0}, who is {1}.",
        ),
        _done,
        lead="Done: ",
    ),
}
_MADE_UP, _REPEATED, _NO_DESCRIPTION, _DESCRIBED_PARAMETERS = 0.2, 0.15, 0.1, 0.3


@dataclass(frozen=True)
class Tool:
    """A function that a request offers."""

    key: str
    name: str
    description: str
    describes_parameters: bool

    @property
    def kind(self) -> Kind:
        return _KINDS[self.key]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.kind.parameters


def draw_tool(rng: Random) -> Tool:
    key = rng.choice(list(_KINDS))
    kind = _KINDS[key]
    description = rng.choice(kind.descriptions) if rng.random() >= _NO_DESCRIPTION else ""
    return Tool(key, rng.choice(kind.names), description, rng.random() < _DESCRIBED_PARAMETERS)


def draw_tools(rng: Random, count: int) -> list[Tool]:
    """Return tools, of which each has a purpose of its own."""
    tools: list[Tool] = []
    while len(tools) < count:
        tool = draw_tool(rng)
        if all(tool.key != other.key for other in tools):
            tools.append(tool)
    return tools


@dataclass(frozen=True)
class Need:
    """A question, the call that it needs, its result, and the answer that tells it."""

    question: str
    call: dict[str, Any]
    result: str
    answer: str


def draw_need(rng: Random, split: Split, tool: Tool) -> Need:
    values = tuple(p.draw(rng, split) for p in tool.parameters)
    result = _failure(rng) or tool.kind.result(rng, values)
    call = {"name": tool.name, "arguments": {p.name: v for p, v in zip(tool.parameters, values, strict=True)}}
    return Need(rng.choice(tool.kind.questions).format(*values), call, result, _told(tool, values, result))


def _told(tool: Tool, arguments: tuple[Value, ...], result: str) -> str:
    """Return what the assistant says of a result, which it repeats as it is."""
    if result.startswith("Error"):
        return f"The tool failed: {result}"
    if result.removeprefix("-").isdigit():
        return f"The result is {result}."
    return tool.kind.lead.format(*arguments) + result


def _failure(rng: Random) -> str:
    errors = ("Error: not found", "Error: timeout", "Error: unknown name", "Error: no connection", "Error 404")
    return rng.choice(errors) if rng.random() < 0.03 else ""


def _word(rng: Random) -> str:
    return _made_up_plain(rng) if rng.random() < _MADE_UP else copied_word(rng, "train")


def _made_up_plain(rng: Random) -> str:
    """Return a made-up word of ASCII letters."""
    while not ((made := made_up_word(rng)).isascii() and made.isalpha()):
        pass
    return made
