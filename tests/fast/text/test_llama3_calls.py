"""Llama 3's tool calls: JSON at the start of the output or behind <|python_tag|>."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.parsers import FORMATS, OutputParser
from app.text.parsers.base import Parsed, Part, ToolCall
from app.text.parsers.llama3_json import Llama3Calls
from tests.fast.text.pieces import cut
from tests.fast.text.pieces import parse as pieces_parsed

TAG = "<|python_tag|>"
F = '{"name": "f", "parameters": {"x": "a; {\\"}"}}'
F_CALL = ToolCall("f", '{"x": "a; {\\"}"}')
G = '{"name": "g", "parameters": {}}'
G_CALL = ToolCall("g", "{}")
TOOLS = [{"function": {"name": name}} for name in ("f", "g")]
FRAGMENTS = [TAG, "<|py", "thon_tag|>", F, G, "{", "}", '"', "\\", ";", " ", "\n", "a", "é", '{"a": 1}', "<"]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


def parse(pieces) -> Parsed:
    return pieces_parsed(OutputParser(calls=Llama3Calls(TOOLS)), pieces)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F, "", [F_CALL]),
        (f"\n {F}\n", "", [F_CALL]),
        (f"{TAG}{F}", "", [F_CALL]),
        (f"{TAG} {F}; {G}", "", [F_CALL, G_CALL]),
        (f"{F}\n{G};", "", [F_CALL, G_CALL]),
        (f"Let me see. {TAG}{G}", "Let me see.", [G_CALL]),
        ('{"name": "g", "arguments": {}}', "", [G_CALL]),
        (f"{F} and so on {G}", " and so on " + G, [F_CALL]),
        (f"I call {F}", f"I call {F}", []),
        ('{"answer": 1} ', '{"answer": 1} ', []),
        (F[:-1], "", [F_CALL]),
        (F[:-2], "", [ToolCall("f", F_CALL.arguments[:-1], False)]),
        (F[:-2] + "; " + TAG + G, "", [ToolCall("f", F_CALL.arguments[:-1] + ";", False), G_CALL]),
        (F.replace('"f"', '"not_offered"'), F.replace('"f"', '"not_offered"'), []),
        ('{"name": "", "parameters": {}}', '{"name": "", "parameters": {}}', []),
        (f"{G}, and so on", ", and so on", [G_CALL]),
        (f'{TAG}search.call(query="x")', f'{TAG}search.call(query="x")', []),
        (f"{G}; {{}}", "; {}", [G_CALL]),
        (";", ";", []),
        (" \n", " \n", []),
        ("", "", []),
        ("a <|python", "a <|python", []),
        (f"{G} <|python", " <|python", [G_CALL]),
    ],
)
def test_calls_are_taken_out_and_all_else_is_content_as_written(text, content, calls):
    assert parse([text]) == Parsed(content, "", tuple(calls))


@settings(max_examples=200)
@given(text=TEXT, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_results_do_not_depend_on_how_the_text_is_cut(text, cuts):
    assert parse(cut(text, cuts)) == parse([text]) == parse(text)


@settings(max_examples=200)
@given(texts=st.lists(st.sampled_from([*FRAGMENTS, F + ";" + TAG + G, G + TAG, " <|", "|>"]), max_size=8))
def test_no_split_of_two_changes_the_result(texts):
    text = "".join(texts)
    whole = parse([text])
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]]) == whole


def test_a_tag_may_be_split_behind_the_call_that_a_piece_ends():
    pieces = [F[:10], f"{F[10:]};<|py", f"thon_tag|>{G}"]
    assert parse(pieces) == Parsed(tool_calls=(F_CALL, G_CALL))


def test_a_call_is_whole_by_the_piece_that_closes_it():
    parser = OutputParser(calls=Llama3Calls(TOOLS))
    parts = [part for character in F[:-1] for part in parser.push(character)]
    assert parts[0] == Part("call", "f") and "".join(part.text for part in parts[1:]) == F_CALL.arguments
    assert parser.push("}") == [Part("whole")]


def test_a_json_answer_streams_as_soon_as_it_is_no_call():
    parser = OutputParser(calls=Llama3Calls(TOOLS))
    assert parser.push('{"name": "Bern", "parameters": {') == [Part("content", '{"name": "Bern", "parameters": {')]
    assert parser.push('"a": 1}}') == [Part("content", '"a": 1}}')]


@pytest.mark.parametrize("form", FORMATS[:2], ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["weather", 'a "b"\\ é'])
def test_a_forced_call_is_one_that_the_parser_reads(form, name):
    endings = {"qwen3": "}\n</tool_call>", "llama3_json": "}"}
    for prefix, text in [
        (form.prefix(name), ' {"x": 1}'),
        (form.prefix(None), f'{json.dumps(name)[1:]}, "{form.key}": {{"x": 1}}'),
    ]:
        parser = OutputParser(calls=form.parser([{"function": {"name": name}}]), begun_call=prefix)
        assert pieces_parsed(parser, [text + endings[form.name]]).tool_calls == (ToolCall(name, '{"x": 1}'),)


def test_the_prefixes_are_the_families_own_wording():
    assert [form.prefix("f") for form in FORMATS] == [
        '<tool_call>\n{"name": "f", "arguments":',
        '{"name": "f", "parameters":',
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<tool_call>\n<function=f>\n",
    ]
    assert [form.prefix(None) for form in FORMATS] == [
        '<tool_call>\n{"name": "',
        '{"name": "',
        "<|channel|>commentary to=functions.",
        "<tool_call>\n<function",
    ]
