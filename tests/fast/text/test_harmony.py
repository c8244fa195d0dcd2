"""gpt-oss's messages on channels: reasoning, content and calls, however the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.parsers import FORMATS, OutputParser, format_for, reasoning_for
from app.text.parsers.base import Parsed, ToolCall
from app.text.parsers.harmony import FORMAT, HarmonyCalls, HarmonyReasoning
from app.text.parsers.reasoning import ReasoningParser
from tests.fast.text.pieces import cut
from tests.fast.text.pieces import parse as pieces_parsed

ANALYSIS = "<|channel|>analysis<|message|>Let me think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 4."
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern > 1"}'
WEATHER = ToolCall("get_weather", '{"city": "Bern > 1"}')
TOOLS = [{"function": {"name": name}} for name in ("get_weather", "f")]
FRAGMENTS = [
    "<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.f", " <|constrain|>json",
    "<|message|>", "<|end|>", "<|call|>", '{"a": 1}', "text", "<", "<|", " ", "\n", "é",
]  # fmt: skip


def parse(pieces: list[str]) -> Parsed:
    return pieces_parsed(OutputParser(HarmonyReasoning(), HarmonyCalls(TOOLS)), pieces)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (ANALYSIS + FINAL, "Let me think.", "It is 4.", []),
        (ANALYSIS + FINAL + "<|return|>", "Let me think.", "It is 4.", []),
        (FINAL.removeprefix("<|start|>assistant"), "", "It is 4.", []),
        (f"{ANALYSIS}<|start|>assistant{CALL}<|call|>", "Let me think.", "", [WEATHER]),
        (f"{ANALYSIS}<|start|>assistant{CALL}", "Let me think.", "", [WEATHER]),
        (f"{CALL}<|call|><|start|>assistant{CALL}", "", "", [WEATHER, WEATHER]),
        (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', "", "", [ToolCall("f", '{"x": 1}')]),
        (
            "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant" + CALL,
            "",
            "I look it up.",
            [WEATHER],
        ),
        (
            ANALYSIS + FINAL.replace("final", "analysis") + "<|end|>" + FINAL,
            "Let me think.\n\nIt is 4.",
            "It is 4.",
            [],
        ),
        (FINAL.replace("final", "commentary") + "<|end|>" + FINAL + "<", "", "It is 4.\n\nIt is 4.<", []),
        (f"{FINAL}<|end|> \n<|start|>assistant{CALL}", "", "It is 4.", [WEATHER]),
        (f"{CALL}<|call|>{FINAL}<|end|><|start|>assistant{CALL}", "", "It is 4.", [WEATHER, WEATHER]),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", "", "", [ToolCall("f", "{}")]),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>\n", "", "", [ToolCall("f", "{}")]),
        ("<|channel|>analysis<|message|>Still thinking", "Still thinking", "", []),
        ("<|channel|>analysis<|message|>a < b <|en", "a < b <|en", "", []),
        (ANALYSIS.replace("<|end|>", CALL), "Let me think.", "", [WEATHER]),
        (ANALYSIS.replace("<|end|>", CALL) + "<|call|>" + FINAL, "Let me think.", "It is 4.", [WEATHER]),
        ("<|channel|>analysis to=functions.f<|message|>{}<|call|>", "", "", [ToolCall("f", "{}")]),
        ("<|channel|>final<|message|>", "", "", []),
        ("<|channel|>fin", "", "", []),
        ("<|channel|>final" + " " * 520, "", "<|channel|>final" + " " * 520, []),
        (f"{ANALYSIS}{'a' * 600}{FINAL}", "Let me think.", f"{'a' * 600}\n\nIt is 4.", []),
        (f"{' ' * 600}{ANALYSIS}{' ' * 600}{FINAL}", "Let me think.", "It is 4.", []),
        (" " * 600, "", " " * 600, []),
        (" " * 600 + "a", "", " " * 600 + "a", []),
        ("and so on, as the prompt began.", "", "and so on, as the prompt began.", []),
        ("", "", "", []),
    ],
)
def test_channels_become_reasoning_content_and_calls(text, reasoning, content, calls):
    assert parse([text]) == Parsed(content, reasoning, tuple(calls))


@pytest.mark.parametrize("written", ["[1]", '{"city": Bern}', '{"city": "Ber'])
def test_a_call_whose_arguments_are_no_object_is_broken(written):
    broken = CALL.replace('{"city": "Bern > 1"}', written)
    assert parse([f"{broken}<|call|>{FINAL}"]) == Parsed("It is 4.", "", (ToolCall("get_weather", written, False),))


def test_a_mark_that_is_cut_in_place_of_arguments_is_no_whole_call():
    cut_off = CALL.replace('{"city": "Bern > 1"}', "<|ch")
    assert parse([cut_off]).tool_calls == (ToolCall("get_weather", "<|ch", False),)


def test_a_call_of_a_function_that_is_not_offered_is_content():
    parsed = parse([CALL.replace("get_", "set_")])
    assert parsed.tool_calls == () and "Bern" in parsed.content and "set_weather" in parsed.content


@settings(max_examples=200)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), cuts=st.lists(st.integers(0, 200), max_size=8)
)
def test_results_do_not_depend_on_how_the_text_is_cut(text, cuts):
    assert parse(cut(text, cuts)) == parse([text]) == parse(list(text))


def test_text_is_shown_as_soon_as_it_is_certain():
    reader = HarmonyReasoning()
    assert reader.is_before_content and not reader.has_reasoned
    assert reader.push("<|channel|>analysis<|message|>I th") == ("I th", "") and reader.has_reasoned
    assert reader.push("ink.<|e") == ("ink.", "")
    assert reader.push("nd|><|start|>assistant<|channel|>final<|message|>So") == ("", "So")
    assert not reader.is_before_content


def test_a_forced_call_is_one_that_the_parser_reads():
    for prefix, text in (
        (FORMAT.prefix("get_weather"), '{"city": "Bern > 1"}'),
        (FORMAT.prefix(None), 'get_weather <|constrain|>json<|message|>{"city": "Bern > 1"}'),
    ):
        parser = OutputParser(HarmonyReasoning(), HarmonyCalls(TOOLS), begun_call=prefix)
        assert pieces_parsed(parser, [text]) == Parsed("", "", (WEATHER,))


def test_the_template_chooses_it():
    template = "<|start|>system<|message|>{{ messages }}<|end|><|start|>assistant<|channel|>"
    assert format_for("auto", template) is FORMAT and reasoning_for("auto", template) is HarmonyReasoning
    assert format_for("harmony", "") is FORMAT and FORMAT in FORMATS
    assert reasoning_for("auto", "<think>") is ReasoningParser
    assert reasoning_for("auto", "") is None and reasoning_for("none", template) is None
