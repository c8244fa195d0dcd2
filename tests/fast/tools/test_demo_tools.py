"""The demo's conversations with tools: calls that parse, names that are offered, and the chat template's own text."""

import itertools
import json
from collections.abc import Callable, Collection
from functools import cache
from random import Random
from typing import Any

import jsonschema
import pytest

from app.text.chat_template import ChatTemplate
from app.text.parsers import OutputParser, qwen3
from tools.demo_pair.chat import CHAT_TEMPLATE, turns_of
from tools.demo_pair.corpus import DOMAINS, TOOLS, Sample, is_right, samples
from tools.demo_pair.corpus.lexicon import NAMES
from tools.demo_pair.corpus.tool_kinds import CITIES, city, number, person, small_number
from tools.demo_pair.corpus.tools import calls_in

BEFORE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of the demo before it knew tools."""


def take(split: str, count: int, domain: str = TOOLS) -> list[Sample]:
    return list(itertools.islice(samples(domain, split, 5), count))  # type: ignore[arg-type]


@cache
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def render(sample: Sample, source: str = CHAT_TEMPLATE, **options: Any) -> str:
    return template_of(source).render(sample.messages, tools=list(sample.tools) or None, **options)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_call_names_an_offered_function_and_fits_its_schema(split: str) -> None:
    num_with = {0: 0, 1: 0}
    for sample in take(split, 300):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        calls = calls_in(sample.answer) or []
        for call in calls:
            jsonschema.validate(call["arguments"], offered[call["name"]])
            assert list(call["arguments"]) == list(offered[call["name"]].get("properties", {}))
        num_with[len(calls)] += 1
    assert num_with[0] > 60 and num_with[1] > 120


def test_the_servers_parser_reads_the_calls() -> None:
    for sample in take("heldout", 200):
        parser = OutputParser(calls=qwen3.FORMAT.parser())
        parsed = [parser.push(sample.answer), parser.finish()]
        calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for part in parsed for c in part.tool_calls]
        assert (calls or None) == calls_in(sample.answer)
        assert "".join(part.content for part in parsed) == ("" if calls else sample.answer)


def test_calls_are_judged_by_what_they_are_parsed_to() -> None:
    answer = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    sample = Sample(TOOLS, [{"role": "user", "content": "1 + 2"}], answer)
    assert is_right(sample, '<tool_call>\n{"arguments": {"b": 2, "a": 1}, "name": "add"}\n</tool_call>\n')
    assert not is_right(sample, answer.replace("2", "3"))
    assert not is_right(sample, answer.replace("add", "sum"))
    assert not is_right(sample, f"{answer}\n{answer}")
    assert not is_right(sample, answer.replace("}}", "}"))
    assert not is_right(sample, "3")


def test_every_message_is_one_that_the_server_takes_and_the_answer_follows_a_user_or_a_tool() -> None:
    for sample in take("train", 300):
        roles = [message["role"] for message in sample.messages]
        assert roles[-1] in ("user", "tool") and 1 <= len(sample.tools) <= 5
        assert sample.answer == sample.answer.strip() != ""
        assert is_right(sample, sample.answer)
        for before, after in itertools.pairwise(sample.messages):
            assert (after["role"] == "tool") <= (before["role"] == "tool" or "tool_calls" in before)


@pytest.mark.parametrize(
    ("draw", "known"), [(city, CITIES), (person, NAMES), (number, range(9999)), (small_number, range(91))]
)
def test_heldout_cities_people_and_numbers_are_asked_for_in_no_training_sample(
    draw: Callable[[Random, str], object], known: Collection[object]
) -> None:
    train, heldout = ({draw(Random(i), split) for i in range(600)} for split in ("train", "heldout"))
    assert len(heldout & set(known)) >= 3 and len(train & set(known)) > 20
    assert not train & heldout & set(known)


@pytest.mark.parametrize("domain", [*DOMAINS, TOOLS])
def test_training_rows_have_the_templates_text(domain: str) -> None:
    for sample in take("train", 60, domain):
        turns = turns_of(sample.messages, sample.tools)
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert text == render(sample, add_generation_prompt=False)


@pytest.mark.parametrize("domain", DOMAINS)
def test_without_tools_the_template_writes_what_it_always_wrote(domain: str) -> None:
    for sample in take("heldout", 60, domain):
        assert render(sample) == render(sample, BEFORE)


def test_the_tools_section_is_qwens() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1 + 2, 3 + 4"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
                {"id": "y", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}},
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "3"},
        {"role": "tool", "tool_call_id": "y", "content": "7"},
    ]
    assert template_of(CHAT_TEMPLATE).render(messages, tools=[tool]) == (
        "<|im_start|>system\nBe kind.\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
        "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1 + 2, 3 + 4<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
