"""Values of a JSON text are counted as they arrive, and too many are refused before any parser sees them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import json_values
from app.api.json_values import TooManyValues, ValueCount
from app.api.schemas import MAX_PROMPT_IDS
from tests.fast.api.errors import CHAT, TEXT, error_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | st.floats(0.1, 9.9) | st.text('"\\[{,.eEn é漢', max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,', max_size=3), inner, max_size=4),
    max_leaves=12,
)


def counted(value: Any) -> int:
    """The values in `value` by a plain reading: keys and all but integers."""
    if isinstance(value, dict):
        return 1 + sum(1 + counted(item) for item in value.values())
    if isinstance(value, list):
        return 1 + sum(map(counted, value))
    return 0 if type(value) is int else 1


@given(value=VALUES, cuts=st.lists(st.integers(0, 400), max_size=12), ascii_only=st.booleans(), indent=st.booleans())
def test_values_are_counted_wherever_the_chunks_are_cut(value, cuts, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent or None).encode()
    count = ValueCount()
    for start, end in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
        count.add(text[start:end])
    assert count.num_values == counted(value)


@pytest.mark.parametrize("item", ["[]", "{}", '""', "null", "true", "1.5", "1e5", '{"a":1}', '{"":{}}'])
def test_no_value_is_free(item):
    count = ValueCount()
    with pytest.raises(TooManyValues):
        for _ in range(200):
            count.add(f"{item},".encode() * 2000)


def test_ids_have_a_limit_of_their_own_which_the_longest_prompt_does_not_reach():
    count = ValueCount()
    count.add(b"123," * MAX_PROMPT_IDS)
    assert count.num_values == 0
    with pytest.raises(TooManyValues):
        count.add(b"1," * MAX_PROMPT_IDS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"metadata": ["x"] * 60}),
        ("/v1/completions", TEXT | {"stop": ["x"] * 60}),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}] * 15}),
        ("/tokenize", {"prompt": "x", "more": [{}] * 60}),
        ("/detokenize", {"tokens": [1], "more": [0.5] * 60}),
    ],
)
def test_a_body_of_too_many_values_is_refused_with_the_limit(server, monkeypatch, path, body):
    server.script.plan([2])
    monkeypatch.setattr(json_values, "MAX_VALUES", 50)
    error = error_of(server.http.post(path, json=body), 413)
    assert error["code"] == "request_too_large" and "more than 50" in error["message"]


def test_arguments_of_all_calls_together_have_the_same_limit(server, monkeypatch):
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [[]] * 30})}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call, call]}]
    monkeypatch.setattr(json_values, "MAX_VALUES", 50)
    error = error_of(server.http.post("/v1/chat/completions", json=CHAT | {"messages": messages}), 400)
    assert error["param"] == "messages.1.tool_calls.1.function.arguments" and "more than 50" in error["message"]


def test_an_agents_long_conversation_with_many_tools_is_within_the_limits():
    property_ = {"type": "string", "description": "what it is", "enum": ["a", "b", "c"], "default": None}
    schema = {"type": "object", "properties": {f"p{i}": property_ for i in range(40)}, "required": ["p0"]}
    tool = {"type": "function", "function": {"name": "f", "description": "does", "parameters": schema}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"p0": "x"})}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    count = ValueCount()
    count.add(json.dumps({"messages": turn * 1000, "tools": [tool] * 200}).encode())
    assert count.num_values < json_values.MAX_VALUES


def test_a_number_of_many_digits_is_refused_before_it_takes_the_square_of_their_time():
    assert json_values.loads("9" * 640) == int("9" * 640)
    with pytest.raises(ValueError, match="640 digits"):
        json_values.loads("[" + "9" * 641 + "]")
