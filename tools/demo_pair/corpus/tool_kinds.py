"""Kinds of tools: names and descriptions of functions, their parameters, and questions that need them.

A tool has one of the names and one of the descriptions. Some names say nothing or do not exist, so that a call can only
be copied from the tools section. Held out are some cities, people and nouns, and some names with each question.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.demo_pair.corpus.lexicon import (
    ADJECTIVES,
    ANIMALS,
    ITEMS,
    NAMES,
    OBJECTS,
    OTHER_WORDS,
    PLACES,
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
    *"Austin Utrecht Lyon Nice Naples".split(),
    *("New York", "San Francisco", "Los Angeles", "Mexico City", "Cape Town", "Hong Kong", "New Delhi"),
)
NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Parameter:
    names: tuple[str, ...]
    draw: Callable[[Random, Split], Value]
    description: str = ""

    @property
    def is_string(self) -> bool:
        return self.draw not in (number, small_number)


@dataclass(frozen=True)
class Kind:
    """Kind of tools. `{0}` and `{1}` in a question are the arguments, and `{w0}` is a small number as a word.

    `word` and `thing` in any text are filled for each tool of a kind that has them.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]
    result: Callable[[Random, tuple[Value, ...]], str]
    lead: str = "Here is what I found: "
    group: str = ""
    both: tuple[str, ...] = ()


def number(rng: Random, split: Split) -> int:
    return rng.randrange(10 ** rng.randint(1, 4))


def small_number(rng: Random, split: Split) -> int:
    return rng.randint(2, 10) if rng.random() < 0.7 else rng.randint(11, 90)


def city(rng: Random, split: Split) -> str:
    if rng.random() < 0.5:
        return _made_up_plain(rng).capitalize()
    return rng.choice([c for c in CITIES if split_of(f"city {c}") == split])


def person(rng: Random, split: Split) -> str:
    if rng.random() < 0.5:
        return _made_up_plain(rng).capitalize()
    return rng.choice([n for n in NAMES if split_of(f"person {n}") == split])


def word(rng: Random, split: Split) -> str:
    return made_up_word(rng) if rng.random() < 0.35 else copied_word(rng, split)


def words(rng: Random, split: Split) -> str:
    return " ".join(word(rng, split) for _ in range(rng.randint(1, 4)))


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


def _time(rng: Random, arguments: tuple[Value, ...]) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}" + rng.choice(("", "", ":00", " local time"))


def _finding(rng: Random, arguments: tuple[Value, ...]) -> str:
    some = [word(rng, "train") for _ in range(rng.randint(1, 6))]
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


_OPERANDS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("n", "m"), ("a", "b"), ("num1", "num2"))


def _pair(description: str) -> tuple[Parameter, Parameter]:
    firsts, seconds = zip(*_OPERANDS, strict=True)
    return (
        Parameter(firsts, number, f"The first {description}"),
        Parameter(seconds, number, f"The second {description}"),
    )


_CITY = Parameter(("city", "location", "place", "town", "city_name"), city, "The name of the city")
_KINDS = {
    "add": Kind(
        ("add", "add_numbers", "sum", "plus", "sum_two", "addition", "addNumbers", "get_sum"),
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
        group="arithmetic",
    ),
    "multiply": Kind(
        ("multiply", "mul", "times", "product", "multiply_numbers", "get_product", "multiplication"),
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
        group="arithmetic",
    ),
    "weather": Kind(
        ("weather", "get_weather", "current_weather", "fetch_weather", "getWeather", "get_current_weather"),
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
        group="weather",
        both=(
            "What is the weather in {0} and in {1}?",
            "Compare the weather in {0} and {1}.",
            "Weather in {0} and {1}?",
        ),
    ),
    "trip": Kind(
        ("Trip", "plan_trip", "book_trip", "trip", "travel", "TripRequest"),
        ("A trip.", "Plan a trip to a city.", "Book a trip.", "Plan some days in a city."),
        (_CITY, Parameter(("days", "num_days", "nights", "length"), small_number, "The number of days")),
        (
            "{W1} days in {0}, please.",
            "{1} days in {0}, please.",
            "Plan a trip to {0} for {1} days.",
            "A trip to {0}, {1} days.",
            "Book {1} days in {0}.",
        ),
        _done,
        lead="Done: ",
        group="trip",
    ),
    "time": Kind(
        ("time", "get_time", "current_time", "clock", "time_in", "get_current_time", "getTime"),
        ("Get the time in a city.", "Return the current time in a city.", "Tell the time in a place."),
        (_CITY,),
        (
            "What time is it in {0}?",
            "What is the time in {0}?",
            "Tell me the time in {0}.",
            "Time in {0}?",
            "What's the current time in {0}?",
            "Give me the time in {0}, please.",
        ),
        _time,
        group="time",
        both=("What time is it in {0} and in {1}?", "Tell me the time in {0} and {1}."),
    ),
    "search": Kind(
        ("search", "look_up", "lookup", "search_web", "web_search", "find", "google", "wiki", "query"),
        (
            "Search the web.",
            "Look up a topic.",
            "Search for information.",
            "Look something up.",
            "Find information about a topic.",
        ),
        (Parameter(("query", "topic", "term", "text", "q", "keywords"), words, "The search query"),),
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
        group="search",
    ),
    "person": Kind(
        ("Person", "User", "UserInfo", "person", "add_user", "save_person", "final_result", "create_user"),
        ("A person.", "Save a person.", "Add a user with name and age.", "The person of the text.", "A user."),
        (
            Parameter(("name", "first_name", "user", "full_name"), person, "The name"),
            Parameter(("age", "years"), small_number, "The age"),
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
        group="person",
    ),
    "fact": Kind(
        (
            "get_{word}",
            "{word}",
            "{word}_of",
            "find_{word}",
            "lookup_{word}",
            "get_{word}_of_{thing}",
            "{thing}_{word}",
        ),
        (
            "Get the {word} of a {thing}.",
            "Return the {word} of a {thing}.",
            "Find the {word} of a {thing}.",
            "Look up the {word} of a {thing}.",
            "Tell the {word} of the given {thing}.",
            "Return the {word}.",
        ),
        (Parameter(("{thing}", "{thing}", "name", "{thing}_name", "item", "key", "subject"), word, "The {thing}"),),
        (
            "What is the {word} of {0}?",
            "Tell me the {word} of {0}.",
            "Find the {word} of {0}.",
            "I need the {word} of {0}.",
            "Give me the {word} of {0}, please.",
            "What is the {word} of the {thing} {0}?",
            "Show me the {word} of {0}.",
            "{word} of {0}?",
        ),
        _finding,
        both=("What is the {word} of {0} and of {1}?", "Tell me the {word} of {0} and {1}."),
    ),
}
_NOUNS = {
    split: tuple(
        w for w in dict.fromkeys(ITEMS + OBJECTS + ANIMALS + PLACES + OTHER_WORDS) if split_of(f"noun {w}") == split
    )
    for split in ("train", "heldout")
}
_FACTS, _ODD_NAME, _ODD_PARAMETER, _NO_DESCRIPTION, _DESCRIBED_PARAMETERS = 0.1, 0.12, 0.08, 0.1, 0.3


@dataclass(frozen=True)
class Tool:
    """A function that a request offers. `fields` fill the texts of its kind."""

    key: str
    name_template: str
    name: str
    description: str
    parameters: tuple[tuple[str, Parameter, str], ...]
    fields: dict[str, str] = field(hash=False)

    @property
    def kind(self) -> Kind:
        return _KINDS[self.key]

    @property
    def group(self) -> str:
        return self.kind.group or self.fields["word"]

    def wordings(self, split: Split, is_double: bool = False) -> list[str]:
        """Return the questions of `split`. A question belongs to one split with each name of the function."""
        wordings = self.kind.both if is_double else self.kind.questions
        return [wording for wording in wordings if split_of(self.template(wording)) == split]

    def template(self, wording: str) -> str:
        return f"{wording} by {self.name_template}"


def draw_tool(rng: Random, split: Split) -> Tool:
    key = "fact" if rng.random() < _FACTS else rng.choice(list(_KINDS))
    kind = _KINDS[key]
    filled = {"word": _noun(rng, split), "thing": _noun(rng, split)}
    filled["Word"] = filled["word"].capitalize()
    is_odd = rng.random() < _ODD_NAME
    name_template = rng.choice(kind.names)
    if is_odd:
        name_template = "_".join(_noun(rng, split) for _ in range(rng.randint(1, 2)))
    has_description = is_odd or rng.random() >= _NO_DESCRIPTION
    is_described = rng.random() < _DESCRIBED_PARAMETERS
    choice = rng.randrange(60)  # one for all parameters, so that they are named alike
    parameters = tuple(
        (
            _noun(rng, split) if rng.random() < _ODD_PARAMETER else p.names[choice % len(p.names)].format(**filled),
            p,
            p.description.format(**filled) if is_described else "",
        )
        for p in kind.parameters
    )
    if len({name for name, _, _ in parameters}) < len(parameters):
        return draw_tool(rng, split)
    description = rng.choice(kind.descriptions).format(**filled) if has_description else ""
    tool = Tool(key, name_template, name_template.format(**filled), description, parameters, filled)
    return tool if tool.wordings(split) else draw_tool(rng, split)


def draw_tools(rng: Random, split: Split, count: int) -> list[Tool]:
    """Return tools, of which each has a name and a purpose of its own."""
    tools: list[Tool] = []
    while len(tools) < count:
        tool = draw_tool(rng, split)
        if all(_differ(tool, other) for other in tools):
            tools.append(tool)
    return tools


def _differ(tool: Tool, other: Tool) -> bool:
    same = tool.key == other.key if tool.group == other.group == "arithmetic" else tool.group == other.group
    return not same and tool.name != other.name


@dataclass(frozen=True)
class Need:
    """A question that a tool answers, by the calls that it needs."""

    question: str
    calls: tuple[dict[str, Any], ...]
    results: tuple[str, ...]
    answer: str
    wording: str


def draw_need(rng: Random, split: Split, tool: Tool, is_double: bool = False) -> Need:
    """Return a question for `tool`. If `is_double` it needs two calls."""
    wording = rng.choice(tool.wordings(split, is_double))
    sets = [tuple(p.draw(rng, split) for _, p, _ in tool.parameters) for _ in range(1 + is_double)]
    while "{w" in wording.lower() and any(isinstance(v, int) and v > len(NUMBER_WORDS) for v in sets[0]):
        sets = [tuple(p.draw(rng, split) for _, p, _ in tool.parameters)]
    shown = [v for values in sets for v in values]
    spelt = {f"w{i}": NUMBER_WORDS[v - 1] for i, v in enumerate(shown) if isinstance(v, int) and 0 < v <= 10}
    spelt |= {key.upper(): text.capitalize() for key, text in spelt.items()}
    question = wording.format(*shown, **tool.fields, **spelt)
    results = tuple(_failure(rng) or tool.kind.result(rng, values) for values in sets)
    calls = tuple(
        {"name": tool.name, "arguments": {n: v for (n, _, _), v in zip(tool.parameters, values, strict=True)}}
        for values in sets
    )
    lines = [told(tool, values, result) for values, result in zip(sets, results, strict=True)]
    return Need(question, calls, results, "\n".join(lines), tool.template(wording))


def told(tool: Tool, arguments: tuple[Value, ...], result: str) -> str:
    """Return what the assistant says of a result, which it repeats as it is."""
    if result.startswith("Error"):
        return f"The tool failed: {result}"
    if result.removeprefix("-").isdigit():
        return f"The result is {result}."
    return tool.kind.lead.format(*arguments) + result


def _failure(rng: Random) -> str:
    errors = ("Error: not found", "Error: timeout", "Error: unknown name", "Error: no connection", "Error 404")
    return rng.choice(errors) if rng.random() < 0.03 else ""


def _noun(rng: Random, split: Split) -> str:
    return _made_up_plain(rng) if rng.random() < 0.15 else rng.choice(_NOUNS[split])


def _made_up_plain(rng: Random) -> str:
    """Return a made-up word of ASCII letters."""
    while not ((made := made_up_word(rng)).isascii() and made.isalpha()):
        pass
    return made
