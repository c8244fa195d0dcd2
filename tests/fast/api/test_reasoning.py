"""Reasoning is separated from the answer, streamed or whole, if the model or the template opens it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.services import Services
from app.config.settings import Config
from tests.fast.api.served import CHATML, Server, serving_ready
from tests.fast.api.templates import CALL, HEAD, HELLO, NO_THINKING, QWEN, TURN, WEATHER, prompt_of, said

ASK = {"model": "tiny", "messages": [HELLO]}
OPENS = QWEN.replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)
"""Opens the reasoning itself, as Qwen3's thinking models do."""
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
SERVED = {"template": QWEN, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}


@pytest.fixture(scope="module")
def opening_server(model_folder: Path) -> Iterator[Server]:
    """A server whose template opens the reasoning itself."""
    with serving_ready(model_folder, template=OPENS, reasoning_parser="qwen3") as server:
        yield server


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("<think>\nhm, 漢字\n\nso\n</think>\n\nIt is 5 < 6.\n", "hm, 漢字\n\nso", "It is 5 < 6.\n"),
        ("<think>hm</think>5", "hm", "5"),
        ("\n<think>\n\n</think>\n\nShort.", None, "Short."),
        ("No thoughts, 漢字.", None, "No thoughts, 漢字."),
        ("Tags: <think>not thought</think>.", None, "Tags: <think>not thought</think>."),
        ("<think>a </thin b <think> c</think>d</think>e", "a </thin b <think> c", "d</think>e"),
        ("<think>never closed", "never closed", ""),
        ("<think>", None, ""),
        ("<thi", None, "<thi"),
    ],
    ids=["thoughts", "tight", "empty", "none", "later", "nested", "open", "tag", "half a tag"],
)
def test_reasoning_is_split_off_alike_streamed_or_whole(server, output, reasoning, content, seed):
    server.plan_text(output, 2 * seed)
    assert said(server)[:3] == (reasoning, content, "stop")
    server.plan_text(output, 2 * seed + 1)
    assert said(server, True)[:3] == (reasoning, content, "stop")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("hm\n</think>\n\nSo.", "hm", "So."),
        ("<think>\nhm\n</think>\n\nSo.", "hm", "So."),
        ("\n</think>\n\nSo.", None, "So."),
        ("never closed", "never closed", ""),
    ],
    ids=["opened", "opened twice", "empty", "never closed"],
)
def test_a_template_may_open_the_reasoning_itself(opening_server, output, reasoning, content, seed):
    opening_server.plan_text(output, 2 * seed)
    assert said(opening_server)[:3] == (reasoning, content, "stop")
    opening_server.plan_text(output, 2 * seed + 1)
    assert said(opening_server, True)[:3] == (reasoning, content, "stop")
    assert prompt_of(opening_server) == f"{HEAD}{TURN}<think>\n"


@pytest.mark.parametrize("begun", ["Okay, ", "Okay, let me see.\n" * 100, "a < b\n"], ids=["short", "long", "bracket"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_template_may_begin_the_reasoning_at_any_length(start, begun, stream):
    server = start(
        OPENS.replace("assistant\\n<think>\\n'", "assistant\\n<think>\\n' + begun"), reasoning_parser="qwen3"
    )
    server.plan_text("thought</think>answer", 3)
    assert said(server, stream, chat_template_kwargs={"begun": begun})[:3] == ("thought", "answer", "stop")
    assert server.prompt().endswith(f"<think>\n{begun}")


def test_a_users_own_tag_opens_nothing(server):
    for messages in ([HELLO | {"content": "what is <think>"}], [HELLO | {"content": "<think>"}]):
        server.plan_text("A tag.", 0)
        assert said(server, messages=messages, add_generation_prompt=False)[:3] == (None, "A tag.", "stop")
        assert said(server, messages=messages)[:3] == (None, "A tag.", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_without_thinking_the_prompt_closes_the_reasoning_and_all_is_content(server, stream):
    server.plan_text("It is </think> 5.", 3)
    assert said(server, stream, **NO_THOUGHTS)[:3] == (None, "It is </think> 5.", "stop")
    prompt = server.prompt()
    assert prompt == HEAD + TURN + NO_THINKING


@pytest.mark.parametrize("stream", [False, True])
def test_separate_reasoning_false_leaves_all_in_the_content(server, stream):
    output = "<think>\nhm\n</think>\n\nSo."
    server.plan_text(output, 3)
    assert said(server, stream, separate_reasoning=False)[:3] == (None, output, "stop")


@pytest.mark.parametrize("value", [True, None])
def test_separate_reasoning_true_is_what_happens_anyway(server, value):
    server.plan_text("<think>hm</think>So.", 3)
    assert said(server, separate_reasoning=value)[:3] == ("hm", "So.", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [QWEN, OPENS], ids=["qwen", "opens"])
def test_with_the_parser_off_all_is_content(start, template, stream):
    server = start(template)
    server.plan_text("<think>\nhm\n</think>\n\nSo.", 3)
    assert said(server, stream)[:3] == (None, "<think>\nhm\n</think>\n\nSo.", "stop")


@pytest.mark.parametrize(
    ("said", "template", "on"),
    [("auto", QWEN, True), ("auto", CHATML, False), ("none", QWEN, False), ("deepseek_r1", CHATML, True)],
)
def test_the_parser_is_chosen_by_its_setting_or_from_the_template(start, said, template, on):
    server = start(template)
    services = Services(Config(reasoning_parser=said), server.engine, server.tokenizer, server.metrics)
    assert (services.reasoning_parser is not None) is on


@pytest.mark.parametrize("output", ["<think>hm</think>So.", "<think>never closed", "So."])
def test_the_sdks_own_message_can_be_sent_back_as_it_is(server, output):
    server.plan_text(output, 0)
    message = server.openai.chat.completions.create(**ASK).choices[0].message
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        server.script.plan([2])
        assert server.openai.chat.completions.create(model="tiny", messages=[HELLO, sent, HELLO]).choices


@pytest.mark.parametrize(
    ("begun", "output", "reasoning", "content"),
    [
        ("<think>\n2 + 3", " is 5\n</think>\n\nFive.", "is 5", "Five."),
        ("<think>\n2 + 3\n</think>\n\nIt", " is </think> 5.", None, " is </think> 5."),
        ("It", " is 5.", None, " is 5."),
    ],
    ids=["in reasoning", "behind reasoning", "no reasoning"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_continued_message_goes_on_where_it_stopped(server, begun, output, reasoning, content, stream):
    server.plan_text(output, 3)
    messages = [HELLO, {"role": "assistant", "content": begun}]
    answer = said(server, stream, messages=messages, continue_final_message=True)[:3]
    assert answer == (reasoning, content, "stop")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("stop", "reasoning", "content", "counted"),
    [
        ("so far", "one and", "", len("<think>one and so far")),
        (["nothing", "e</th"], "one and so far, fin", "", len("<think>one and so far, fine</th")),
        ("done", "one and so far, fine", "It is ", len("<think>one and so far, fine</think>It is done")),
    ],
)
def test_stop_strings_end_reasoning_as_they_end_content(server, stop, reasoning, content, counted, seed):
    output = "<think>one and so far, fine</think>It is done."
    server.plan_text(output, seed)
    response = server.http.post("/v1/chat/completions", json=ASK | {"stop": stop})
    assert response.json()["usage"]["completion_tokens"] == counted
    assert said(server, stop=stop)[:3] == (reasoning, content, "stop")
    assert said(server, True, stop=stop)[:3] == (reasoning, content, "stop")


def test_the_limit_may_fall_into_the_reasoning(server):
    server.plan_text("<think>one and so far", 0)
    assert said(server, max_tokens=len("<think>one"))[:3] == ("one", "", "length")
    assert said(server, True, max_tokens=len("<think>one"))[:3] == ("one", "", "length")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("output", "reasoning", "content", "num_calls"),
    [
        (f"<think>\nmaybe {CALL}", "maybe", "", 1),
        (f"<think>\nmaybe {CALL}\n</think>\n\nSo.", "maybe", "So.", 1),
        (f"<think>\nmaybe {CALL}\n</think>\n\n{CALL}", "maybe", "", 2),
        (f"<think>\nmaybe `{CALL}`?\n</think>\n\n{CALL}", f"maybe `{CALL}`?", "", 1),
        (f"<think>\nas in\n```\n{CALL}\n```\n</think>\n\nSo.", f"as in\n```\n{CALL}\n```", "So.", 0),
        ("<think>\nI say <tool_call> and\n</think>\n\nSo.", "I say <tool_call> and", "So.", 0),
    ],
    ids=["never closed", "closed", "a call in the answer too", "quoted", "fenced", "a tag alone"],
)
def test_a_call_of_an_offered_function_ends_the_thought(server, output, reasoning, content, num_calls, seed):
    reason = "tool_calls" if num_calls else "stop"
    expected = (reasoning, content, reason, [("weather", {})] * num_calls)
    server.plan_text(output, seed)
    for stream in (False, True):
        assert said(server, stream, tools=[WEATHER])[:4] == expected
    tools = [{"type": "function", **WEATHER["function"]}]
    items = server.http.post("/v1/responses", json={"input": "hello", "tools": tools}).json()["output"]
    assert [item["type"] for item in items].count("function_call") == num_calls
    assert items[0]["content"][0]["text"] == reasoning


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}], ids=["no tools", "none"])
@pytest.mark.parametrize("stream", [False, True])
def test_without_offered_tools_nothing_in_a_thought_is_a_call(server, fields, stream):
    server.plan_text(f"<think>\nmaybe {CALL}\n</think>\n\nSo.", 1)
    assert said(server, stream, **fields)[:4] == (f"maybe {CALL}", "So.", "stop", [])
