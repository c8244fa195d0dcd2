"""Reasoning and tool calls taken out of output, over random cuts and against a plain reading of the whole text."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.parsers import OutputParser
from app.text.parsers.base import Parsed, Part, ToolCall
from app.text.parsers.llama3_json import Llama3Calls
from app.text.parsers.qwen3 import Qwen3Calls
from app.text.parsers.qwen3_coder import Qwen3CoderCalls
from app.text.parsers.reasoning import ReasoningParser
from tests.fast.text.pieces import cut
from tests.fast.text.pieces import parse as pieces_parsed

SPACE = " \t\r\n"
TOOLS = [{"function": {"name": name}} for name in ("f", "g")]
TYPED = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
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
    calls = Qwen3Calls(TOOLS) if tools else None
    return OutputParser(ReasoningParser(starts_in_reasoning) if reasoning else None, calls)


def parse(pieces, *switches, **named) -> Parsed:
    return pieces_parsed(parser_of(*switches, **named), pieces)


def block(name: str = "f", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reference(text: str, reasoning: bool, starts_in_reasoning: bool) -> Parsed:
    content, thought = text, ""
    opened = re.match(r"[ \t\r\n]*<think>", text)
    if reasoning and (opened or starts_in_reasoning):
        thought, _, content = text[opened.end() if opened else 0 :].partition("</think>")
        thought, content = thought.strip(SPACE), content.lstrip(SPACE)
    return Parsed(content, thought)


@few
@given(text=TEXT, cuts=CUTS, switches=SWITCHES)
def test_results_do_not_depend_on_how_the_text_is_cut(text, cuts, switches):
    assert parse(cut(text, cuts), *switches) == parse([text], *switches) == parse(text, *switches)


@few
@given(text=TEXT, reasoning=st.booleans(), starts_in_reasoning=st.booleans())
def test_without_calls_results_are_those_of_a_plain_reading_of_the_whole_text(text, reasoning, starts_in_reasoning):
    expected = reference(text, reasoning, starts_in_reasoning)
    assert parse([text], reasoning, False, starts_in_reasoning) == expected
    nothing_offered = OutputParser(ReasoningParser(starts_in_reasoning) if reasoning else None, Qwen3Calls([]))
    assert pieces_parsed(nothing_offered, [text]) == expected


@few
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<")).map(lambda text: f"a{text}a")),
    arguments=st.dictionaries(st.text(), st.recursive(st.text() | st.integers() | st.booleans(), st.lists)),
    cuts=CUTS,
)
def test_calls_and_the_texts_between_them_are_read_back(texts, arguments, cuts):
    text = "".join(f"{text} {block('g', **arguments)}" for text in texts)
    parsed = parse(cut(text, cuts), tools=True)
    assert parsed == parse([text], tools=True) and parsed.content == "".join(texts)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [("g", arguments)] * len(texts)


@few
@given(text=TEXT, cuts=CUTS, starts_in_reasoning=st.booleans())
def test_both_switches_off_pass_every_piece_on_at_once(text, cuts, starts_in_reasoning):
    parser = parser_of(False, False, starts_in_reasoning)
    for piece in cut(text, cuts):
        assert Parsed.of(parser.push(piece)) == Parsed(content=piece)
    assert parser.finish() == []


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
        ('{"name":"f","arguments":{"x":1}}', '{"x":1}'),
        ('{"id": 1, "name": "f", "arguments": {"x": 1}, "type": "function"}', '{"x": 1}'),
        ('{"name": "f", "parameters": {"x": 1}}', '{"x": 1}'),
        ('{"name": "f", "parameters": {"x": 1}, "arguments": {"x": 2}}', '{"x": 1}'),
        ('{"name": "f"}', "{}"),
        (r'{"name": "f", "arguments": "{\"x\":1}"}', '{"x":1}'),
        ('\r\n {"name": "f", "id": 1} \n', "{}"),
        ('{"name": "f", "arguments": {"x": "a</tool_call>b</tool_call>"}}', '{"x": "a</tool_call>b</tool_call>"}'),
        ('{"name": "f", "arguments": {"</tool_call>": "<tool_call>"}}', '{"</tool_call>": "<tool_call>"}'),
        (r'{"name": "f", "arguments": {"x": "\"</tool_call>\\"}}', r'{"x": "\"</tool_call>\\"}'),
        (
            "{'name': 'f', 'arguments': {'x': True, 'y': [None, \"it's\", 'a \"b\"']}}",
            '{"x": true, "y": [null, "it\'s", "a \\"b\\""]}',
        ),
        (r"""{"name": "f", "arguments": {"x": '\x41\u00e9\''}}""", r"""{"x": "\u0041\u00e9'"}"""),
        ('{"name": "f", "arguments": {"x": "a\n\tb"}}', '{"x": "a\\n\\tb"}'),
        ('{"name": "f", "arguments": {"x": 1}', '{"x": 1}'),
        ('{"name": "f", "arguments": {"x": [1, 2,\n], }, }', '{"x": [1, 2\n] }'),
    ],
)
@pytest.mark.parametrize("end", ["</tool_call>", "", "</tool_c", "<"])
def test_a_call_is_read_even_if_its_closing_tag_is_missing_or_cut_off(inside, arguments, end):
    assert parse(f"<tool_call>{inside}{end}", tools=True) == Parsed(tool_calls=(ToolCall("f", arguments),))


@pytest.mark.parametrize(
    "inside",
    [
        *("", " ", "f(x)", '"a', '["a', "[]", "{}", "{'name': f}", '{"name": 1}', '{"name": "f", "arguments": [1]}'),
        *('{"name": "no", "arguments": {}}', '{"name": "", "arguments": {}}', '{"arguments": {}, "name": "no"}'),
        *('{"name": "f", "arguments": null}', '{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": "[]"}'),
        *('{"name: "f"}', '{"name": "f\n', '{"name": "\\', '{"name": "f", "arguments": ['),
        *('{"name": "\\ud800"}', '{"name": ' + "[" * 100_000, '{"name": ' + "9" * 5_000 + "}"),
        *(r'{"name": "f", "arguments": "{\"a"}', r'{"arguments": {"x": "\ud800"}, "name": "f"}'),
    ],
    ids=lambda inside: inside[:40],
)
@pytest.mark.parametrize("end", ["</tool_call>", "", "</tool_c", "<b"])
def test_a_block_that_is_no_call_is_content_as_written(inside, end):
    broken = f"a \n<tool_call>{inside}{end}"
    assert parse([broken], tools=True) == Parsed(content=broken)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('{"x": 1', '{"x": 1'),
        ('{"x": "a', '{"x": "a'),
        ('{"x": tru', '{"x": tru'),
        ('{"x": NaN}}', '{"x": NaN}}'),
        ('{"x": Bern}} \n', '{"x": Bern}}'),
        ('{"x": "say "hi""}}', '{"x": "say "hi""}}'),
        ('{"x": "\\d"}}', '{"x": "\\d"}}'),
        ('{"x": 1, ', '{"x": 1, '),
        ('{"x": 1,,}}', '{"x": 1,,}}'),
        ('{"x": 01}}', '{"x": 01}}'),
        (f'{{"x": {"[" * 64}{"]" * 64}}}}}', f'{{"x": {"[" * 64}{"]" * 64}}}}}'),
    ],
)
@pytest.mark.parametrize("text", ["", "</tool_call>\nso"])
def test_a_call_that_has_begun_stays_one_whatever_its_arguments_are(inside, arguments, text):
    if text and inside == '{"x": "a':
        arguments += "</tool_call>\\nso"  # which may be in the string
    parsed = parse(f'a <tool_call>{{"name": "f", "arguments": {inside}{text}', tools=True)
    assert parsed.tool_calls == (ToolCall("f", arguments, is_whole=False),)
    assert parsed.content == ("a\nso" if text and "so" not in arguments else "a")


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
        (["a <b", "<tool_call>", "{}", "</tool_call>", "c"], ["a <b", "", "<tool_call>{}", "</tool_call>", "c"]),
        (["a <tool_call>", '{"name": "no", "arguments": {'], ["a", ' <tool_call>{"name": "no", "arguments": {']),
    ],
)
def test_text_is_shown_as_soon_as_it_is_certain(pieces, shown):
    parser = parser_of(reasoning=False, tools=True)
    assert [Parsed.of(parser.push(piece)).content for piece in pieces] == shown


def test_arguments_stream_as_they_are_written():
    parser = parser_of(reasoning=False, tools=True)
    assert parser.push('a\n<tool_call>\n{"name": "f", "arguments": ') == [Part("content", "a")]
    assert parser.push('{"x') == [Part("call", "f"), Part("arguments", '{"x')]
    assert parser.push('": "b</to') == [Part("arguments", '": "b')]
    assert parser.push("ol> c\\") == [Part("arguments", "</tool> c")]
    assert parser.push('n", "y": tr') == [Part("arguments", '\\n", "y": ')]
    assert parser.push("ue}}\n") == [Part("arguments", "true}")]
    assert parser.push("</tool_call>") == [Part("whole")]


def test_nothing_may_be_pushed_after_the_end():
    parser = parser_of(reasoning=True, tools=True)
    parser.finish()
    with pytest.raises(AssertionError):
        parser.push("a")


@pytest.mark.parametrize("piece", [" ", "a", "<", "</t", "</tool_call>", "</tool_call>a", "\\n"])
def test_a_long_block_is_not_read_again_with_every_piece(piece, monkeypatch):
    looked_at, read = [], Qwen3Calls._read
    monkeypatch.setattr(Qwen3Calls, "_read", lambda self, text: looked_at.append(len(text)) or read(self, text))
    begin = '<tool_call>{"name": "'
    assert parse([begin, *[piece] * 2_000], tools=True) == Parsed(content=begin + piece * 2_000)
    assert max(looked_at[1:]) < len(piece) + len("</tool_call>")


# --- calls inside a thought ------------------------------------------------------------------------------------------

WRITTEN = {
    "qwen3": (Qwen3Calls, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
    "llama3_json": (Llama3Calls, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}'),
    "qwen3_coder": (Qwen3CoderCalls, "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"),
}
IN_THOUGHT = pytest.mark.parametrize("form", WRITTEN)


def think(form: str, text: str, cuts: tuple[int, ...] = (), tools: list = TYPED) -> Parsed:
    return pieces_parsed(OutputParser(ReasoningParser(True), WRITTEN[form][0](tools)), cut(text, [*cuts]))


@IN_THOUGHT
@pytest.mark.parametrize(
    ("after", "content"),
    [("", ""), ("\n</think>\n\nSo.", "So."), (" and\n</think>\nSo.", "and\nSo."), ("</thi", "</thi")],
    ids=["never closed", "closed", "closed later", "half closed"],
)
@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_a_call_ends_the_thought_in_which_it_is_written(form, after, content, opened):
    call = WRITTEN[form][1]
    text = f"{opened}I look.\n{call}{after}"
    expected = Parsed(content, "I look.", (ToolCall("f", '{"x": 1}'),))
    assert all(think(form, text, (at,)) == expected for at in range(len(text)))
    assert not think(form, text, tools=[]).tool_calls


@IN_THOUGHT
def test_a_call_may_be_all_of_a_thought(form):
    assert think(form, f"{WRITTEN[form][1]}\n</think>\nSo.") == Parsed("So.", "", (ToolCall("f", '{"x": 1}'),))


@IN_THOUGHT
@pytest.mark.parametrize(
    "quote",
    ["`{}`", "as in\n```xml\n{}\n```\n", "so ``{}``, then", "```\na\n```\n`b` and ```{}```", '"{}"', "\u201c{}\u201d"],
    ids=range(6),
)
def test_an_example_that_a_thought_quotes_is_no_call(form, quote):
    quoted = quote.format(WRITTEN[form][1])
    text = f"I may write {quoted} now.</think>So."
    assert all(think(form, text, (at,)) == Parsed("So.", f"I may write {quoted} now.") for at in range(len(text)))
    called = think(form, f"I may write {quoted} now.\n{WRITTEN[form][1]}")
    assert called == Parsed("", f"I may write {quoted} now.", (ToolCall("f", '{"x": 1}'),))


@IN_THOUGHT
@pytest.mark.parametrize("code", ["```\nls `pwd`\n```\n", "`a` and `b` ", "a stray ` on a line\n", "``` ``` ", '"a" '])
def test_a_call_behind_code_of_a_thought_is_one(form, code):
    assert think(form, f"{code}{WRITTEN[form][1]}").tool_calls == (ToolCall("f", '{"x": 1}'),)


@IN_THOUGHT
def test_a_tag_without_the_head_of_an_offered_call_stays_in_the_thought(form):
    call = WRITTEN[form][1]
    for text in (f"write {call.partition('>')[0]}> then", call.replace('"f"', '"no"').replace("=f", "=no")):
        assert think(form, f"{text}</think>So.") == Parsed("So.", text)


# --- functions that are not offered ----------------------------------------------------------------------------------

CODER_F, CODER_NO = (f"<function={name}>\n<parameter=x>\n{{}}\n</parameter>\n</function>" for name in ("f", "no"))
NOT_OFFERED = {
    "qwen3": (Qwen3Calls, """<tool_call>{"name": "no", "arguments": {"x": "{}"}}</tool_call>"""),
    "llama3_json": (Llama3Calls, """<|python_tag|>{"name": "no", "parameters": {"x": "{}"}}"""),
    "qwen3_coder": (Qwen3CoderCalls, f"<tool_call>\n{CODER_NO}\n</tool_call>"),
    "qwen3_coder alone": (Qwen3CoderCalls, CODER_NO),
    "qwen3_coder without an end": (Qwen3CoderCalls, f"<tool_call>\n{CODER_NO.removesuffix('</function>')}</tool_call>"),
}
INSIDE = {
    Qwen3Calls: "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    Llama3Calls: "<|python_tag|>{'name': 'f', 'parameters': {}}",
    Qwen3CoderCalls: "<tool_call>\n" + CODER_F.format(1) + "\n</tool_call>",
}


@pytest.mark.parametrize("form", NOT_OFFERED)
def test_a_call_in_the_text_of_one_that_is_not_offered_is_text_and_one_behind_it_is_a_call(form):
    make, outer = NOT_OFFERED[form]
    written = outer.replace("{}", f"as in {INSIDE[make]} or\n{INSIDE[make]}")
    after = WRITTEN[form.partition(" ")[0]][1]
    text = f"a {written}\n{after}"
    expected = Parsed(f"a {written}", "", (ToolCall("f", '{"x": 1}'),))
    for at in range(len(text)):
        assert pieces_parsed(OutputParser(calls=make(TYPED)), cut(text, [at])) == expected
