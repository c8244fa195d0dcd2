"""Calls as they stream, in every format: the parts of pieces are those of the whole, and always make sense."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.parsers import FORMATS, OutputParser, reasoning_for
from app.text.parsers.base import Parsed, Part, joined
from tests.fast.text.pieces import cut

SCHEMA = {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}}
TOOLS = [{"function": {"name": "f", "parameters": SCHEMA}}, {"function": {"name": "g"}}]
JSON = ('{"name": "f", ', '"name": "g"', '"s": "', "'o': {", '"n": 1', ", ", ": ", "True", "\\", '\\"', *'[]{}"')
ARGUMENTS = '{"s": "a\\n\\"é\\" </tool_call> <|call|>", "o": {"b": [1, null]}}'
FRAGMENTS = {
    "qwen3": ["<tool_call>", "</tool_call>", '"arguments": {', *JSON],
    "llama3_json": ["<|python_tag|>", ";", '"parameters": {', *JSON],
    "harmony": [
        *("<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary", " to=functions.f", "to=functions.no"),
        *("<|constrain|>json", "<|message|>", "<|call|>", "<|end|>", *JSON),
    ],
    "qwen3_coder": [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "<function=no>",
            "<parameter=s>",
            "<parameter=n>",
            "</function>",
        ),
        *("<parameter=o>", "<parameter=x>", "</parameter>", "\n<parameter=s>\n", "{'a': True}"),
    ],
}
CALLS = {
    "qwen3": f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}',
    "harmony": f"<|channel|>commentary to=functions.f<|message|>{ARGUMENTS.replace('<|call|>', '')}<|call|>",
    "qwen3_coder": "<tool_call><function=f><parameter=s>\na</parameter> b\n</parameter><parameter=n>7\n</function>",
}
OTHERS = ["<think>", "</think>", "`", "```\n", " ", "\n", "a", "<", "é"]
FORMS = {form.name: form for form in FORMATS}


def parts_of(form: str, pieces: list[str], *, thinks: bool, is_cut: bool) -> list[Part]:
    reasoning = reasoning_for("harmony" if form == "harmony" else "qwen3", "")
    assert reasoning is not None
    parser = OutputParser(reasoning(thinks), FORMS[form].parser(TOOLS))
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.finish(is_cut)])


def check(parts: list[Part]) -> None:
    """Check that calls begin and end, one after another, and that whole ones have an object."""
    kinds = " ".join(part.kind for part in parts)
    assert re.fullmatch(r"((reasoning|content|call( arguments)? (whole|broken))( |$))*", kinds), kinds
    for call in Parsed.of(parts).tool_calls:
        assert call.name in ("f", "g")
        assert not call.is_whole or isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150)
@given(data=st.data(), cuts=st.lists(st.integers(0, 400), max_size=8), thinks=st.booleans(), is_cut=st.booleans())
def test_the_joined_parts_are_those_of_the_whole_wherever_the_text_is_cut(form, data, cuts, thinks, is_cut):
    fragments = st.sampled_from([*FRAGMENTS[form], *OTHERS, CALLS[form]])
    text = "".join(data.draw(st.lists(fragments, max_size=14)))
    whole = parts_of(form, [text], thinks=thinks, is_cut=is_cut)
    check(whole)
    for pieces in (cut(text, cuts), list(text)):
        assert parts_of(form, pieces, thinks=thinks, is_cut=is_cut) == whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_output_may_end_anywhere_in_a_call(form, is_cut):
    text = f"Hm. {CALLS[form]}"
    ends = []
    for end in range(len(text) + 1):
        parts = parts_of(form, [text[:end]], thinks=False, is_cut=is_cut)
        check(parts)
        ends.append(Parsed.of(parts))
    committed = [bool(parsed.tool_calls) for parsed in ends]
    assert committed == sorted(committed), "a call that has begun stays one"
    assert ends[-1].tool_calls[0].is_whole and committed.index(True) < len(text) - 40
