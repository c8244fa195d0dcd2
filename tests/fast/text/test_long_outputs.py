"""An output of any length is read once, in whatever pieces it comes."""

import json
from itertools import product

import pytest

from app.text.parsers import OutputParser
from app.text.parsers.base import Part
from app.text.parsers.harmony import HarmonyCalls, HarmonyReasoning
from app.text.parsers.llama3_json import Llama3Calls
from app.text.parsers.qwen3 import Qwen3Calls
from app.text.parsers.qwen3_coder import Qwen3CoderCalls
from app.text.parsers.reasoning import ReasoningParser

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
PARSERS = {
    "harmony": (HarmonyReasoning, HarmonyCalls),
    "qwen3": (ReasoningParser, Qwen3Calls),
    "qwen3_coder": (lambda: ReasoningParser(True), Qwen3CoderCalls),
    "llama3_json": (lambda: None, Llama3Calls),
}
BEGUN = {
    "harmony": [
        "",
        "<|channel|>analysis",
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>a<|end|>",
        "<|channel|>commentary to=functions.f",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "',
    ],
    "qwen3": [
        "",
        "<think>",
        "<think></think>",
        "<tool_call>",
        '<tool_call>{"a": "',
        '<tool_call>{"name": "f", "arguments": {"a": ',
        '<tool_call>{"name": "f", "arguments": {"a": "',
        '<tool_call>{"name": "f", "arguments": {a',
        '<tool_call>{"name": "f", "arguments": {}',
    ],
    "qwen3_coder": ["", "</think>", "</think><tool_call><function=", "</think><tool_call><function=f><parameter=a>"],
    "llama3_json": [
        "",
        "{",
        '{"a": "',
        "<|python_tag|>",
        "a",
        '{"name": "f", "parameters": {"a": ',
        '{"name": "f", "parameters": {}',
    ],
}
PIECES = [" ", "a", "<", "{", '"', "\\", ";", "<|end|>", "</tool_call>", "</parameter>", "<parameter=a>", "<|channel|>"]


@pytest.mark.parametrize(("name", "piece"), list(product(PARSERS, PIECES)))
def test_a_piece_is_not_read_with_all_that_came_before(name, piece):
    for begun in BEGUN[name]:
        make_reasoning, make_calls = PARSERS[name]
        reasoning, calls = make_reasoning(), make_calls(TOOLS)
        parser = OutputParser(reasoning, calls)
        parser.push(begun)
        for _ in range(1_500):
            parser.push(piece)
            assert len(calls._tail) < 600 and (reasoning is None or len(reasoning._tail) < 600)
            assert len(getattr(calls, "_inner", ())) < 100, "each closing tag is searched among them"
        parser.finish()


def test_an_object_is_read_a_few_times_however_many_objects_are_in_it(monkeypatch):
    read, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(len(text)) or loads(text))
    parser = OutputParser(calls=Qwen3Calls(TOOLS))
    text = "<tool_call>{" + "".join(f'"{i}": {{}}, ' for i in range(2_000)) + '"name": "f"}'
    parts = [part for character in text for part in parser.push(character)]
    assert parts[0] == Part("call", "f")
    assert sum(read) < 4 * len(text)
