"""The demo pair calls the right function with the right arguments, for templates and names that training never saw."""

import itertools

import pytest

from app.messages import Request
from app.text.tokenizer import Tokenizer
from tests.exhaustive.acceptance import engine
from tests.fast.engine.lossless import demo_folder, run_engine
from tools.demo_pair.corpus import TOOLS, Sample, is_right, samples
from tools.demo_pair.corpus.sample import ask
from tools.demo_pair.corpus.tools import calls_in

CALLS = 200


def answers(asked: list[Sample]) -> list[str]:
    tokenizer = Tokenizer(demo_folder("target"))
    texts = [tokenizer.chat_template.render(sample.messages, tools=list(sample.tools)) for sample in asked]
    requests = [
        Request(str(i), tuple(tokenizer.encode(text, add_special_tokens=False)), 300, stop_token_ids=frozenset([2]))
        for i, text in enumerate(texts)
    ]
    return [tokenizer.decode(ids) for ids in run_engine(engine(), requests).texts]


def test_95_of_100_heldout_calls_are_right() -> None:
    calls = (sample for sample in samples(TOOLS, "heldout", 2) if calls_in(sample.answer))
    asked = list(itertools.islice(calls, CALLS))
    right = sum(map(is_right, asked, answers(asked)))
    print(f"{right} of {CALLS} calls are right")
    assert right >= 0.95 * CALLS


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
    assert is_right(Sample("math", ask(question), str(result)), *answers([Sample("math", ask(question), "")]))


def test_a_function_that_filters_and_maps_is_right() -> None:
    question = "Write a Python function that returns the squares of the odd numbers in a list."
    (answer,) = answers([Sample("code", ask(question), "")])
    names: dict[str, object] = {}
    exec(answer.partition("```python\n")[2].partition("```")[0], names)
    (function,) = [value for name, value in names.items() if name != "__builtins__"]
    assert callable(function) and function([1, 2, 3, 4, 5]) == [1, 9, 25]
