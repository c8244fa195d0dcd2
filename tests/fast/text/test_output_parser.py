"""Reasoning and tool calls taken out of output, over random cuts and against a plain reading of the whole text."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.parsers import OutputParser, Parsed, ToolCall, qwen3
from app.text.parsers.qwen3 import Qwen3Calls
from app.text.parsers.reasoning import ReasoningParser
from tests.fast.text.pieces import cut
from tests.fast.text.pieces import parse as pieces_parsed

SPACE = " \t\r\n"
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<to", "ol_call>", "</thi", "</tool_c", "<", ">", "a", "é"),
    *(" ", "\n", "\n\n", "\u3000", "{", "}", '"', "\\", '{"name": "f"}', '{"name": "f", "arguments": {"x": "', '"}}'),
    *('{"name": "', '<tool_call>{"name": "g", "parameters": {"y": 1}}</tool_call>', '<tool_call>{"a": "'),
]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=8)
SWITCHES = st.tuples(st.booleans(), st.booleans(), st.booleans())
few = settings(max_examples=200)


def parser_of(reasoning=False, tools=False, starts_in_reasoning=False) -> OutputParser:
    return OutputParser(ReasoningParser(starts_in_reasoning) if reasoning else None, Qwen3Calls() if tools else None)


def parse(pieces, *switches, **named) -> Parsed:
    return pieces_parsed(parser_of(*switches, **named), pieces)


def block(name: str = "f", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reference(text: str, reasoning: bool, tools: bool, starts_in_reasoning: bool) -> Parsed:
    content, thought = text, ""
    opened = re.match(r"[ \t\r\n]*<think>", text)
    if reasoning and (opened or starts_in_reasoning):
        thought, _, content = text[opened.end() if opened else 0 :].partition("</think>")
        thought, content = thought.strip(SPACE), content.lstrip(SPACE)
    if not tools:
        return Parsed(content, thought)
    calls, texts, end = [], [""], 0
    for start in (m.start() for m in re.finditer("<tool_call>", content)):
        if start < end:
            continue
        call, block_end = reference_block(content, start)
        texts[-1] += content[end:start]
        if call is None:
            texts[-1] += content[start:block_end]
        else:
            texts[-1] = texts[-1].rstrip(SPACE)
            texts.append("")
            calls.append(call)
        end = block_end
    texts[-1] += content[end:]
    if calls and not texts[-1].strip(SPACE):
        texts[-1] = ""
    return Parsed("".join(texts), thought, tuple(calls))


def reference_block(content: str, start: int) -> tuple[ToolCall | None, int]:
    """The call of the block that begins at start, if it is one, and where the block ends."""
    begin = start + len("<tool_call>")
    for closing in re.finditer("</tool_call>", content[begin:]):
        call = reference_call(content[begin : begin + closing.start()])
        if call or not may_go_on(content[begin : begin + closing.end()]):
            return call, begin + closing.end()
    return reference_call(re.sub("<(/(t(o(o(l(_(c(a(l(l)?)?)?)?)?)?)?)?)?)?$", "", content[begin:])), len(content)


def may_go_on(text: str) -> bool:
    """Return True if some continuation makes it an object. The fragments nest nothing but objects."""
    endings = (f'"{value}{"}" * depth}' for value in ("", ":0") for depth in range(text.count("{") + 1))
    return text.lstrip(SPACE).startswith("{") and any(is_json(text + ending) for ending in endings)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def reference_call(text: str) -> ToolCall | None:
    value = json.loads(text) if is_json(text) else None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


@few
@given(text=TEXT, cuts=CUTS, switches=SWITCHES)
def test_results_do_not_depend_on_how_the_text_is_cut(text, cuts, switches):
    assert parse(cut(text, cuts), *switches) == parse([text], *switches) == parse(text, *switches)


@few
@given(text=TEXT, switches=SWITCHES)
def test_results_are_those_of_a_plain_reading_of_the_whole_text(text, switches):
    assert parse([text], *switches) == reference(text, *switches)


@few
@given(text=TEXT, cuts=CUTS, starts_in_reasoning=st.booleans())
def test_both_switches_off_pass_every_piece_on_at_once(text, cuts, starts_in_reasoning):
    parser = parser_of(False, False, starts_in_reasoning)
    for piece in cut(text, cuts):
        assert parser.push(piece) == Parsed(content=piece)
    assert parser.finish() == Parsed()


@few
@given(text=st.text(st.characters(exclude_characters="<"), max_size=40), cuts=CUTS)
def test_text_without_tags_is_exact(text, cuts):
    assert parse(cut(text, cuts), reasoning=True, tools=True) == Parsed(content=text)


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", "why", "so"),
        (" \n<think>why</think>so", "why", "so"),
        ("<think>\n\n</think>\n\nso", "", "so"),
        ("<think> a \n\n b\t</think> c \n d \n", "a \n\n b", "c \n d \n"),
        ("<think>\n why \n", "why", ""),
        ("<think>why</thi", "why</thi", ""),
        ("<think>a<think>b<tool_call>{}</tool_call></think>c", "a<think>b<tool_call>{}</tool_call>", "c"),
        ("<think><think>a</think>b", "<think>a", "b"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<think>\u3000a\u3000</think>\u3000b", "\u3000a\u3000", "\u3000b"),
        (" \n no <think>a</think>", "", " \n no <think>a</think>"),
        (" \n", "", " \n"),
        (" </think>a", "", " </think>a"),
        (" <thi", "", " <thi"),
        ("", "", ""),
    ],
)
@pytest.mark.parametrize("tools", [False, True])
def test_reasoning_is_the_block_that_the_output_begins_with(text, thought, content, tools):
    assert parse([text], reasoning=True, tools=tools) == Parsed(content, thought)
    assert parse(text, reasoning=True, tools=tools) == Parsed(content, thought)


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("\nwhy\n</think>\n\nso", "why", "so"),
        ("\n<think>\nwhy</think>so", "why", "so"),
        ("<think><think>why</think>so", "<think>why", "so"),
        ("why <think></think>so", "why <think>", "so"),
        ("\n</think>\n so", "", "so"),
        ("why \n", "why", ""),
        ("\n<thi", "<thi", ""),
        (" \n", "", ""),
    ],
)
def test_output_may_begin_inside_the_reasoning(text, thought, content):
    assert parse(text, reasoning=True, starts_in_reasoning=True) == Parsed(content, thought)


def test_without_reasoning_its_tags_are_content():
    text = "\n<think>a</think>\n b"
    assert parse([text], tools=True, starts_in_reasoning=True) == Parsed(content=text)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('{"name": "f", "arguments": {"x": [1, {"é": null}]}}', '{"x": [1, {"é": null}]}'),
        ('{"arguments":{"x":1},"name":"f"}', '{"x": 1}'),
        ('{"name": "f", "parameters": {"x": 1}}', '{"x": 1}'),
        ('{"name": "f", "parameters": {"x": 1}, "arguments": {"x": 2}}', '{"x": 2}'),
        ('{"name": "f"}', "{}"),
        (r'{"name": "f", "arguments": "{\"x\":1}"}', '{"x":1}'),
        ('\r\n {"name": "f", "id": 1} \n', "{}"),
        ('{"name": "f", "arguments": {"x": "a</tool_call>b</tool_call>"}}', '{"x": "a</tool_call>b</tool_call>"}'),
        ('{"name": "f", "arguments": {"</tool_call>": "<tool_call>"}}', '{"</tool_call>": "<tool_call>"}'),
        (r'{"name": "f", "arguments": {"x": "\"</tool_call>\\"}}', r'{"x": "\"</tool_call>\\"}'),
    ],
)
@pytest.mark.parametrize("end", ["</tool_call>", "", "</tool_c", "<"])
def test_a_call_is_read_even_if_its_closing_tag_is_missing_or_cut_off(inside, arguments, end):
    assert parse(f"<tool_call>{inside}{end}", tools=True) == Parsed(tool_calls=(ToolCall("f", arguments),))


@pytest.mark.parametrize(
    "inside",
    [
        *("", " ", "f(x)", '"a', '["a', "[]", "{}", "{'name': 'f'}", '{"name": 1}', '{"name": "f", "arguments": [1]}'),
        *('{"name": "f", "arguments": null}', '{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": "[]"}'),
        *('{"name": "f", "arguments": {"x": 1}', '{"name": "f"}}', '{"name: "f"}', '{"name": "f\n'),
        *('{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": 1e999}}', '{"name": "\\'),
        *('{"name": "\\ud800"}', '{"name": ' + "[" * 100_000, '{"name": ' + "9" * 5_000 + "}"),
        r'{"name": "f", "arguments": "{\"a"}',
    ],
    ids=lambda inside: inside[:40],
)
@pytest.mark.parametrize("end", ["</tool_call>", "", "</tool_c", "<b"])
def test_a_block_that_is_no_call_is_content_as_written(inside, end):
    broken = f"a \n<tool_call>{inside}{end}"
    assert parse([broken], tools=True) == Parsed(content=broken)


@pytest.mark.parametrize("inside", ["f(x)", '"a', "{}", '{"name: "f"}', '{"name": "f", "arguments": {"x": 1}'])
def test_a_block_that_cannot_become_json_ends_at_its_first_closing_tag(inside):
    parser = parser_of(reasoning=False, tools=True)
    broken = f"\n<tool_call>{inside}</tool_call>"
    assert parser.push(broken) == Parsed(content=broken)
    assert parser.push(f"\n{block()}") == Parsed(tool_calls=(ToolCall("f", "{}"),))


def test_a_block_with_too_many_closing_tags_in_a_string_is_given_back():
    begin, closing = '<tool_call>{"name": "f", "arguments": {"x": "', "</tool_call>"
    assert len(parse([begin + closing * 64 + '"}}' + closing], tools=True).tool_calls) == 1
    text = begin + closing * 65 + '"}}' + closing
    assert parse([text, block()], tools=True) == Parsed(text, tool_calls=(ToolCall("f", "{}"),))


@pytest.mark.parametrize(
    ("text", "content", "n_calls"),
    [
        (f"\n{block()}\n", "", 1),
        (f"{block()}\n\n{block(x=1)} \n", "", 2),
        (f" a b \n{block()}", " a b", 1),
        (f"a\n{block()}\n b \n", "a\n b \n", 1),
        (f"a {block()} b {block()} c", "a b c", 2),
        (f"a\n{block()}\n<to", "a\n<to", 1),
        ("a <tool_call>x</tool_call> \n", "a <tool_call>x</tool_call> \n", 0),
        (f"a <tool_call>x</tool_call> \n{block()}", "a <tool_call>x</tool_call>", 1),
        (f"{block()} <tool_call>x</tool_call> ", " <tool_call>x</tool_call> ", 1),
        ("a </tool_call> ", "a </tool_call> ", 0),
        (" \n", " \n", 0),
    ],
)
def test_whitespace_beside_calls_is_dropped_and_elsewhere_exact(text, content, n_calls):
    parsed = parse(text, tools=True)
    assert (parsed.content, len(parsed.tool_calls)) == (content, n_calls)


def test_reasoning_then_content_then_calls_in_order():
    text = f"<think>\nwhy\n</think>\n\nlook:\n{block('f', x=1)}\n{block('g')}"
    calls = (ToolCall("f", '{"x": 1}'), ToolCall("g", "{}"))
    assert parse(text, reasoning=True, tools=True) == Parsed("look:", "why", calls)
    assert parse([f"<think>a</think>\n{block('g')}\n"], True, True) == Parsed("", "a", calls[1:])


def test_without_tools_a_call_is_content():
    text = f" {block()} \n{block()}\n"
    assert parse([text], reasoning=True) == Parsed(content=text)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["a<to", "ol", "x<"], ["a", "", "<toolx"]),
        (["a ", "\n", "b"], ["a", "", " \nb"]),
        (["a <b", "<tool_call>", "{}", "</tool_call>", "c"], ["a <b", "", "", "<tool_call>{}</tool_call>", "c"]),
    ],
)
def test_text_is_shown_as_soon_as_it_is_certain(pieces, shown):
    parser = parser_of(reasoning=False, tools=True)
    assert [parser.push(piece).content for piece in pieces] == shown


def test_a_call_is_given_whole_by_the_piece_that_ends_it():
    parser = parser_of(reasoning=False, tools=True)
    text = block(x=1)
    assert all(parser.push(c) == Parsed() for c in text[:-1])
    assert parser.push(">") == Parsed(tool_calls=(ToolCall("f", '{"x": 1}'),))


def test_nothing_may_be_pushed_after_the_end():
    parser = parser_of(reasoning=True, tools=True)
    parser.finish()
    with pytest.raises(AssertionError):
        parser.push("a")


@pytest.mark.parametrize("piece", [" ", "a", "<", "</t", "</tool_call>", "</tool_call>a", "\\n"])
def test_a_long_block_is_not_read_again_with_every_piece(piece, monkeypatch):
    """Each piece is looked at with a tail no longer than a tag, and the block is parsed a bounded number of times."""
    looked_at, parsed, read, read_call = [], [], Qwen3Calls._read, qwen3.read_call
    monkeypatch.setattr(Qwen3Calls, "_read", lambda self, text: looked_at.append(len(text)) or read(self, text))
    monkeypatch.setattr(qwen3, "read_call", lambda text: parsed.append(len(text)) or read_call(text))
    parser = parser_of(reasoning=False, tools=True)
    begin = '<tool_call>{"name": "'
    pieces = [parser.push(text) for text in [begin, *[piece] * 2_000]]
    assert Parsed.joined([*pieces, parser.finish()]) == Parsed(content=begin + piece * 2_000)
    assert max(looked_at[1:]) < len(piece) + len("</tool_call>")
    assert len(parsed) <= 65
