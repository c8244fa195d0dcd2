"""The demo pair calls the right function with the right arguments, for templates and names that training never saw.

`demo_calls.json` has 200 held-out conversations and the calls that are right. They were drawn once, with seed 2, from
the corpus of the pair's training, which last stood in commit 8788056.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from app.text.parsers import OutputParser, qwen3
from app.text.parsers.base import Parsed
from tests.exhaustive.demo_answers import answers, ask, final_number

CONVERSATIONS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("demo_calls.json").read_text("utf-8"))


def calls_in(text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that the server's parser reads."""
    parser = OutputParser(calls=qwen3.FORMAT.parser(tools))
    calls = Parsed.of([*parser.push(text), *parser.finish()]).tool_calls
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls if call.is_whole]


def test_95_of_100_heldout_calls_are_right() -> None:
    said = answers(CONVERSATIONS)
    right = sum(
        calls_in(text, asked["tools"]) == asked["calls"] for asked, text in zip(CONVERSATIONS, said, strict=True)
    )
    print(f"{right} of {len(CONVERSATIONS)} calls are right")
    assert len(CONVERSATIONS) == 200 and all(asked["calls"] for asked in CONVERSATIONS)
    assert right >= 0.95 * len(CONVERSATIONS)


@pytest.mark.parametrize(
    ("question", "result"),
    [
        ("What is 17 * 3 + 4?", 55),
        ("Calculate 12 * 4 - 6 + 8.", 50),
        ("How much is 23 + 9 - 5?", 27),
        ("9 * 7 - 8 = ?", 55),
    ],
)
def test_a_short_sum_is_right(question: str, result: int) -> None:
    assert final_number(*answers([ask(question)])) == result


def test_a_function_that_filters_and_maps_is_right() -> None:
    (answer,) = answers([ask("Write a Python function that returns the squares of the odd numbers in a list.")])
    names: dict[str, object] = {}
    exec(answer.partition("```python\n")[2].partition("```")[0], names)
    (function,) = [value for name, value in names.items() if name != "__builtins__"]
    assert callable(function) and function([1, 2, 3, 4, 5]) == [1, 9, 25]
