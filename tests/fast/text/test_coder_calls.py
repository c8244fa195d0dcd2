"""Tool calls of Qwen3-Coder: tags around raw text, whose types come from the schemas of the tools."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.parsers import FORMATS, OutputParser, format_for, qwen3_coder
from app.text.parsers.base import Parsed, Part, ToolCall
from app.text.parsers.qwen3_coder import FORMAT, Qwen3CoderCalls
from app.text.parsers.reasoning import ReasoningParser
from tests.fast.text.pieces import cut
from tests.fast.text.pieces import parse as pieces_parsed

TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "nothing": {"type": "null"},
    "items": {"type": "array"},
    "more": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "any": {},
    "trip": {"$ref": "#/$defs/Trip"},
    "trips": {"anyOf": [{"$ref": "#/$defs/Trip"}, {"type": "null"}]},
    "loop": {"$ref": "#/$defs/Loop"},
}
SCHEMA = {
    "type": "object",
    "properties": TYPES,
    "$defs": {"Trip": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
F = "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>"
BARE = F.removeprefix("<tool_call>\n")
F_CALL = ToolCall("f", '{"count": 1}')
G_CALL = ToolCall("g", "{}")
TAGS = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "<parameter=count>"]
FRAGMENTS = [
    *TAGS, "<parameter=", "<function", "=g>", "</parameter>", "\n", " ", "\n</parameter>\n", "<", ">", "a", "1", "é", F,
    "<tool_call>\n<function=f>\n<parameter=text>\n", "\n</parameter>\n</function>\n</tool_call>", "</func", "tion>",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def parse(pieces) -> Parsed:
    return pieces_parsed(OutputParser(calls=Qwen3CoderCalls(TOOLS)), pieces)


def written(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def arguments(text: str) -> list[dict[str, Any]]:
    return [json.loads(call.arguments) for call in parse([text]).tool_calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F, "", [F_CALL]),
        (f"\n{F}\n", "", [F_CALL]),
        (f"{F}\n{F}", "", [F_CALL, F_CALL]),
        (f"I look.\n\n{F}\nand so on", "I look.\nand so on", [F_CALL]),
        ("<tool_call><function=g></function></tool_call>", "", [G_CALL]),
        ("<tool_call><function=g>\n</function>\n<function=g></function></tool_call>", "", [G_CALL, G_CALL]),
        ("<tool_call>\n<function=f><parameter=count>1</parameter></function>", "", [F_CALL]),
        (F.replace("\n</function>", ""), "", [F_CALL]),
        (BARE, "", [F_CALL]),
        (f"So: {BARE} b", "So: b", [F_CALL]),
        (F.partition("\n</function>")[0], "", [F_CALL]),
        (F.replace("\n</parameter>", ""), "", [F_CALL]),
        (F.replace("\n</parameter>\n</function>", ""), "", [F_CALL]),
        (F.replace("\n</parameter>", "").partition("\n</tool_call>")[0], "", [F_CALL]),
        (f"{F.partition('</function>')[0]}{F}", "", [F_CALL, F_CALL]),
        (f"{F.partition('</function>')[0]}{BARE}", "", [F_CALL, F_CALL]),
        (f"{F.replace('</parameter>', '')} so", " so", [F_CALL]),
        (F.partition("tion>\n</tool_call>")[0], "", [F_CALL]),
    ],
)  # fmt: skip
def test_calls_are_taken_out(text, content, calls):
    assert parse([text]) == Parsed(content, "", tuple(calls))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "a < b </tool_call> c",
        "</function>",
        "<tool_call>",
        "<tool_call>\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<tool_call>\n</funct",
        "<tool_call>\n<function=>\n</function>",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>",
        "<tool_call>\n<function=f>\n<",
        "<tool_call>\n<function=f>\n<parameter=count",
        F.replace("=f", "=not_offered"),
        "<tool_call>\n<function=f>\nand <parameter=count>",
        '<tool_call>\n<function=f>\n{"count": 1}\n</function>\n',
        "Write <function=example> and </function>.",
        "<function=not_offered>\n</function>",
        "<parameter=count>\n1\n</parameter>",
        f"<function={'f' * 257}></function>",
    ],
)
def test_what_is_no_call_stays_text(text):
    assert parse([text]) == Parsed(text)


def test_a_call_may_follow_what_was_none():
    assert parse([f"<tool_call>\n{F}"]) == Parsed("<tool_call>\n", "", (F_CALL,))
    assert parse([f"<tool_call>\n<function=g>a{F}"]) == Parsed("<tool_call>\n<function=g>a", "", (F_CALL,))


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "",
        " a\tb ",
        "\n\na\n",
        "one\n  two\n\nthree",
        'say "hi" \\ {"a": 1}',
        "a < b > c <b>é</b>",
        "null",
        "a</parameter>",
        "a</parameter> b",
        "a\n</parameter>\nb\n</parameter>",
        "</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n",
        "inline <parameter=x> is no tag",
        f"as in\n{written(text='b', count='2')}\nand",
        written(text=written(text="c")),
        "a" + "<parameter=x>" * 3,
    ],
)
def test_a_text_is_taken_as_it_is_between_its_line_breaks(text):
    assert arguments(written(text=text, count="3")) == [{"text": text, "count": 3}]


@pytest.mark.parametrize("number", ["0.12345678901234567890", "1.10", "12345678901234567890123"])
def test_a_number_keeps_its_digits(number):
    (call,) = parse([written(share=number)]).tool_calls
    assert call.arguments == f'{{"share": {number}}}'


def test_of_a_schema_without_end_a_part_is_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(
        qwen3_coder, "_object", lambda value: looked.append(1) or (value if isinstance(value, dict) else {})
    )
    schema = {"properties": {"a": {"anyOf": [{"anyOf": [{"type": "integer"}] * 100}] * 100_000}}}
    assert qwen3_coder.types_of(schema, "a") == {"integer"}
    assert len(looked) < 2000


@pytest.mark.parametrize(
    "large",
    [
        *({name: [{"type": "integer"}] * 1_000_000} for name in ("anyOf", "oneOf", "allOf")),
        {"type": ["integer"] * 500_000 + [f"t{i}" for i in range(500_000)]},
        {"$ref": {f"k{i}": [i] for i in range(200_000)}},
        {"$ref": [["k"]] * 1_000_000},
        {"enum": [0] * 1_000_000, "type": "integer"},
        {"description": "a" * 1_000_000, "properties": dict.fromkeys(map(str, range(200_000)), 0), "type": "integer"},
    ],
    ids=lambda large: next(iter(large)),
)
def test_a_large_schema_is_neither_copied_nor_written_out_for_a_parameter(large):
    schema = {"properties": {"a": large, "b": {"anyOf": [large] * 1000}}}
    tracemalloc.start()
    try:
        for key in "ab":
            assert bool(qwen3_coder.types_of(schema, key)) == ("$ref" not in large)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("where", ["definitions", "$defs"])
def test_a_definition_is_followed_by_its_name(where):
    schema = {
        where: {"N": {"type": "integer"}, "None": {"type": "integer"}},
        "properties": {"a": {"$ref": f"#/{where}/N"}, "b": {}},
    }
    assert qwen3_coder.types_of(schema, "a") == {"integer"}
    assert qwen3_coder.types_of(schema, "b") == set(), "no $ref is no name"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "1", "1"),
        ("text", "null", "null"),
        ("count", "7", 7),
        ("count", " -7 ", -7),
        ("count", "seven", "seven"),
        ("count", "", ""),
        ("count", "9" * 5_000, "9" * 5_000),
        ("share", "0.5", 0.5),
        ("share", "2", 2),
        ("share", "NaN", "NaN"),
        ("share", "1e999", "1e999"),
        ("deep", "true", True),
        ("deep", "False", False),
        ("deep", "yes", "yes"),
        ("nothing", "null", None),
        ("nothing", "None", None),
        ("items", '[1, "é", null]', [1, "é", None]),
        ("items", "[" * 100_000, "[" * 100_000),
        ("items", '["\\ud800"]', '["\\ud800"]'),
        ("more", '{\n  "a": {"b": []}\n}', {"a": {"b": []}}),
        ("more", "{'a': 1}", {"a": 1}),
        ("more", "{'a': {'b': [True, None, 'x\\'s \"é\" \\n']}}", {"a": {"b": [True, None, 'x\'s "é" \n']}}),
        ("more", "{'a': __import__('os')}", "{'a': __import__('os')}"),
        ("more", "{'a': 1} b", "{'a': 1} b"),
        ("more", "{'a': 1,", "{'a': 1,"),
        ("items", "['a', \"b's\", False]", ["a", "b's", False]),
        ("items", "[" * 64 + "]" * 64, json.loads("[" * 64 + "]" * 64)),
        ("items", "[" * 65 + "]" * 65, "[" * 65 + "]" * 65),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("maybe", '"a"', '"a"'),
        ("either", "5", 5),
        ("either", "5.5", "5.5"),
        ("either", "05", "05"),
        ("any", "5", "5"),
        ("unknown", "5", "5"),
        ("trip", '{"to": "Bern"}', {"to": "Bern"}),
        ("trips", "null", None),
        ("loop", "true", True),
    ],
)
def test_values_have_the_types_of_the_schema(key, text, value):
    assert arguments(written(**{key: text})) == [{key: value}]


@pytest.mark.parametrize(
    "schema",
    [
        None, {}, {"properties": []}, {"properties": {"count": 5}}, {"properties": {"count": {"type": 5}}},
        {"properties": {"count": {"type": [{}], "anyOf": 5, "oneOf": {"type": "integer"}, "$ref": 5}}},
        {"$defs": [], "properties": {"count": {"anyOf": [5, None], "$ref": "#/$defs/None"}}},
        {"definitions": {"a": 5}, "properties": {"count": {"$ref": "#/definitions/a"}}},
    ],
)  # fmt: skip
def test_a_schema_that_says_no_type_makes_strings(schema):
    parser = Qwen3CoderCalls([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    (call,) = pieces_parsed(OutputParser(calls=parser), [written(count="1")]).tool_calls
    expected = 1 if schema and "oneOf" in str(schema) else "1"
    assert json.loads(call.arguments) == {"count": expected}


def test_the_last_of_parameters_with_one_name_counts():
    assert arguments(written(count="1").replace("</function>", "<parameter=count>2</parameter></function>")) == [
        {"count": 2}
    ]


@settings(max_examples=300)
@given(text=TEXT, cuts=st.lists(st.integers(0, 300), max_size=8))
def test_results_do_not_depend_on_how_the_text_is_cut(text, cuts):
    assert parse(cut(text, cuts)) == parse([text]) == parse(text)


@settings(max_examples=200)
@given(
    text=st.text(st.sampled_from('ab<>/=\n "\\é'), max_size=30),
    count=st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    deep=st.booleans(),
    more=st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=3),
)
def test_what_a_template_writes_is_read_back(text, count, deep, more):
    """As the newest templates have it: strings are written as they are, all else as JSON."""
    values = {"text": text, "share": count, "deep": deep, "more": more}
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    assert arguments(written(**shown)) == [values]


def test_calls_follow_reasoning():
    parser = OutputParser(ReasoningParser(True), Qwen3CoderCalls(TOOLS))
    assert pieces_parsed(parser, [f"Hm.\n</think>\n\nI look.\n\n{F}"]) == Parsed("I look.", "Hm.", (F_CALL,))


def test_a_call_ends_with_the_piece_that_ends_its_function():
    parser = OutputParser(calls=Qwen3CoderCalls(TOOLS))
    before, end, _ = F.partition("</function>")
    parts = [part for character in before + end[:-1] for part in parser.push(character)]
    assert parts == [Part("call", "f"), Part("arguments", '{"count": ')]
    assert parser.push(">") == [Part("arguments", "1}"), Part("whole")]
    assert parser.push("\n</tool_call>") == parser.finish() == []


def test_a_string_streams_as_it_is_written_and_other_values_when_they_end():
    parser = OutputParser(calls=Qwen3CoderCalls(TOOLS))
    assert parser.push("<tool_call>\n<function=f>\n") == []
    assert parser.push("<parameter=text>\na") == [Part("call", "f"), Part("arguments", '{"text": "a')]
    assert parser.push('b "c"\n') == [Part("arguments", 'b \\"c\\"')]
    assert parser.push("d\n</param") == [Part("arguments", "\\nd")]
    assert parser.push("eter>\n<parameter=items>\n[1") == [Part("arguments", '", "items": ')]
    assert parser.push(",2]\n</parameter>\n<parameter=count>") == [Part("arguments", '[1,2], "count": ')]
    assert parser.push("\n3</parameter></function>") == [Part("arguments", "3}"), Part("whole")]


@pytest.mark.parametrize(
    ("text", "is_cut", "arguments"),
    [
        (written(text="a").partition("\n</parameter>")[0], False, '{"text": "a'),
        (written(text="a").partition("\n</function>")[0], True, '{"text": "a"'),
        (written(count="12").partition("\n</parameter>")[0], True, '{"count": 12'),
        (F.partition("</parameter>")[0] + "</param", False, '{"count": 1\n</param'),
    ],
)
def test_a_call_that_no_tag_ends_is_broken(text, is_cut, arguments):
    (call,) = pieces_parsed(OutputParser(calls=Qwen3CoderCalls(TOOLS)), text, is_cut=is_cut).tool_calls
    assert (call.is_whole, call.arguments) == (False, arguments)


def test_a_missing_end_tag_is_seen_by_the_next_parameter_of_the_function():
    text = "<function=f><parameter=count>1<parameter=text>\na <parameter=other> b\n<parameter=deep>\ntrue\n</function>"
    assert arguments(text) == [{"count": 1, "text": "a <parameter=other> b", "deep": True}]
    bare = "<tool_call><function=g>\n<parameter=a>\n1 <parameter=x>\n<parameter=b>\n2\n</tool_call>"
    assert arguments(bare) == [{"a": "1 <parameter=x>", "b": "2"}], "without a schema a line decides"


def test_a_forced_call_is_one_that_the_parser_reads():
    rest = "<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>"
    for prefix, text in ((FORMAT.prefix("f"), rest), (FORMAT.prefix(None), f"=f>\n{rest}")):
        assert prefix + text == F
        parser = OutputParser(calls=FORMAT.parser(TOOLS), begun_call=prefix)
        assert pieces_parsed(parser, [text]) == Parsed("", "", (F_CALL,))


@pytest.mark.parametrize("piece", ["a", "<", "</parameter>", "</parameter>\n", "\n<parameter=a>", "<function=g>"])
def test_a_long_text_is_not_read_again_with_every_piece(piece, monkeypatch):
    looked_at, read = [], Qwen3CoderCalls._read
    monkeypatch.setattr(Qwen3CoderCalls, "_read", lambda self, text: looked_at.append(len(text)) or read(self, text))
    begin = "<tool_call>\n<function=f>\n<parameter=text>\n"
    parse([begin, *[piece] * 2_000])
    assert max(looked_at[1:]) < len(piece) + len("</parameter>")


def test_the_template_decides_between_the_formats_of_one_tag():
    teaching = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>"
    assert format_for("auto", teaching) is FORMAT
    assert FORMAT in FORMATS and format_for("qwen3_coder", "") is FORMAT
    for other in ("<tool_call>", "<tool_call><function=f>{}</function>", "<function=f><parameter=a>"):
        assert format_for("auto", other) is not FORMAT


def test_a_parameter_that_has_come_does_not_end_a_text():
    tools = [{"function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
    parser = OutputParser(calls=Qwen3CoderCalls(tools))
    parts = parser.push("<function=f><parameter=s>a <parameter=s> b</parameter></function>")
    assert json.loads(parts[1].text) == {"s": "a <parameter=s> b"}
