"""Forced tool calls: the answer begins with the family's own opening of a call, without reasoning."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.text.parsers import llama3_json, qwen3
from tests.fast.api.errors import error_of
from tests.fast.api.served import CHATML, Server, serving_ready
from tests.fast.api.templates import HELLO, NO_THINKING, QWEN, TURN, WEATHER, Said, prompt_of, refusal, said

CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
OFFER = {"model": "tiny", "messages": [HELLO], "tools": [WEATHER, CLOCK]}
CHOICES = pytest.mark.parametrize(
    ("choice", "prefix"),
    [("required", '<tool_call>\n{"name": "'), (NAMED, '<tool_call>\n{"name": "weather", "arguments":')],
    ids=["required", "named"],
)
REST = {
    "required": 'weather", "arguments": {"city": "Bern"}}\n</tool_call>',
    "named": ' {"city": "Bern"}}\n</tool_call>',
}
ANSWER = ' {"city": "Bern"}}\n</tool_call>'
CALLED = [("weather", {"city": "Bern"})]
PLAIN = QWEN.replace("enable_thinking is defined and enable_thinking is false", "false").replace("think>", "x>")
"""Template of a model that never reasons."""
SERVED = {"template": PLAIN, "tool_call_parser": "qwen3"}


def rest_of(choice: Any) -> str:
    return REST["required" if choice == "required" else "named"]


@pytest.fixture(scope="module")
def thinking_server(model_folder: Path) -> Iterator[Server]:
    options = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}
    with serving_ready(model_folder, template=QWEN, **options) as server:
        yield server


@pytest.fixture
def thinking(thinking_server: Server) -> Server:
    thinking_server.settle()
    return thinking_server


def ask(server: Server, stream: bool = False, **fields: Any) -> Said:
    return said(server, stream, tools=[WEATHER, CLOCK], **fields)


@CHOICES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_begins_with_a_call_whose_opening_is_a_part_of_the_prompt(server, choice, prefix, seed, stream):
    server.plan_text(rest_of(choice), seed)
    answer = ask(server, stream, tool_choice=choice)
    submitted = server.script.see("Submit")["token_ids"]
    assert server.tokenizer.decode(submitted, skip_special_tokens=False).endswith(TURN + prefix)
    assert answer[1:4] == ("", "tool_calls", CALLED)
    sent = len(server.bytes(rest_of(choice)))
    assert answer.usage["prompt_tokens"] == len(submitted)
    assert answer.usage["completion_tokens"] == sent + (0 if choice == NAMED else 1)


def test_the_prompt_is_the_one_of_auto_and_the_prefix(server):
    prompts = []
    for choice in ("auto", "required", NAMED):
        prompts.append(prompt_of(server, tools=[WEATHER, CLOCK], tool_choice=choice))
    auto, required, named = prompts
    assert (required, named) == (
        auto + '<tool_call>\n{"name": "',
        auto + '<tool_call>\n{"name": "weather", "arguments":',
    )


def test_required_leaves_the_number_of_calls_to_the_model_and_a_named_function_is_called_once(server):
    more = f'{REST["required"]}\n<tool_call>\n{{"name": "clock"}}\n</tool_call>'
    server.plan_text(more)
    assert ask(server, tool_choice="required").calls == [*CALLED, ("clock", {})]
    server.plan_text(ANSWER + '\n<tool_call>\n{"name": "clock"}\n</tool_call>')
    assert ask(server, tool_choice=NAMED).calls == CALLED


def test_every_choice_begins_with_the_call(server):
    server.plan_text(REST["required"])
    choices = server.openai.chat.completions.create(**OFFER, tool_choice="required", n=3).choices
    functions = [call.function for choice in choices for call in choice.message.tool_calls]
    assert [(function.name, json.loads(function.arguments)) for function in functions] == CALLED * 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_responses_force_a_call_as_chat_does(server, choice):
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    server.plan_text(REST["required" if choice == "required" else "named"])
    response = server.openai.responses.create(model="tiny", input="hello", tools=tools, tool_choice=choice)
    assert [(item.name, json.loads(item.arguments)) for item in response.output] == CALLED
    unknown = {"model": "tiny", "input": "hello", "tools": tools, "tool_choice": {"type": "function", "name": "f"}}
    error = server.http.post("/v1/responses", json=unknown).json()["error"]
    assert error["param"] == "tool_choice.name"


def test_llama_has_its_own_opening(start):
    template = CHATML + "{% if tools %}{% endif %}"
    server = start(template, tool_call_parser="llama3_json")
    for choice, prefix, rest in [
        ("required", '{"name": "', 'weather", "parameters": {"city": "Bern"}}'),
        (NAMED, '{"name": "weather", "parameters":', ' {"city": "Bern"}}'),
    ]:
        server.plan_text(rest)
        assert ask(server, tool_choice=choice).calls == CALLED
        assert server.prompt().endswith(TURN + prefix)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_and_the_limit_end_a_forced_call_too(server, stream):
    server.plan_text(ANSWER)
    stopped = ask(server, stream, tool_choice=NAMED, stop='"Bern')
    assert stopped[1:4] == ("", "stop", [("weather", '{"city": ')])
    cut = ask(server, stream, tool_choice=NAMED, max_tokens=5)
    assert cut[1:4] == ("", "length", [("weather", '{"ci')])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "expected"),
    [
        ("required", "Bern is fine.", ('<tool_call>\n{"name": "Bern is fine.', "stop", [])),
        ("required", 'bern", "arguments": {}}', ('<tool_call>\n{"name": "bern", "arguments": {}}', "stop", [])),
        (NAMED, " Bern", ('<tool_call>\n{"name": "weather", "arguments": Bern', "stop", [])),
        (NAMED, ' {"city": Bern}}\n</tool_call>', ("", "stop", [("weather", '{"city": Bern}}')])),
    ],
)
def test_a_forced_call_that_is_not_written_is_content_and_a_broken_one_ends_with_stop(
    server, choice, said, expected, stream
):
    server.plan_text(said, 1)
    assert ask(server, stream, tool_choice=choice)[1:4] == expected


# --- with thinking on ------------------------------------------------------------------------------------------------


@CHOICES
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_has_no_reasoning(thinking, choice, prefix, stream):
    thinking.plan_text(rest_of(choice))
    answer = ask(thinking, stream, tool_choice=choice, max_tokens=200)
    submitted = thinking.script.see("Submit")
    shown = thinking.tokenizer.decode(submitted["token_ids"], skip_special_tokens=False)
    assert shown.endswith(TURN + NO_THINKING + prefix) and submitted["max_tokens"] == 200
    assert answer.calls == CALLED and answer.usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("reasoning", [True, False])
def test_reasoning_that_the_prompt_opens_is_closed_before_a_forced_call(start, reasoning):
    server = start(
        CHATML + "<think>\n{% if tools %}{% endif %}",
        reasoning_parser="qwen3" if reasoning else "none",
        tool_call_parser="qwen3",
    )
    server.plan_text(ANSWER)
    answer = ask(server, tool_choice=NAMED)
    prompt = server.prompt()
    assert prompt.endswith(f'{TURN}{NO_THINKING}<tool_call>\n{{"name": "weather", "arguments":')
    assert (answer.calls, answer.content) == (CALLED, "")
    server.plan_text("Hm.</think>So.")
    assert ask(server).content == ("So." if reasoning else "Hm.</think>So.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True}, "enable_thinking"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"enable_thinking": False}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_request_for_thinking_before_a_forced_call_is_warned(thinking, fields, param):
    thinking.plan_text(ANSWER)
    for choice, warned in ((NAMED, param), ("auto", None)):
        body = OFFER | fields | {"tool_choice": choice}
        warnings = thinking.http.post("/v1/chat/completions", json=body).json().get("warnings", [])
        expected = [("reasoning_skipped", warned)] if warned else []
        assert [(warning["code"], warning["param"]) for warning in warnings] == expected


LONG = {"type": "function", "function": {"name": "n" * 257}}
FLAT = {"type": "function", "name": "n" * 257}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((path, {"tools": [LONG]}, "tools.0.function.name") for path in ("/v1/chat/completions", "/tokenize")),
        *((path, {"tool_choice": LONG}, "tool_choice.function.name") for path in ("/v1/chat/completions", "/tokenize")),
        ("/v1/responses", {"tools": [FLAT]}, "tools.0.name"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f"}], "tool_choice": FLAT}, "tool_choice.name"),
    ],
)
def test_the_name_of_a_function_has_a_maximum_length(server, path, fields, param):
    base = {"input": "a"} if path == "/v1/responses" else OFFER
    assert error_of(server.http.post(path, json=base | fields), 400)["param"] == param


def test_a_prompt_is_encoded_off_the_event_loop(server, monkeypatch):
    loops, encode = [], server.tokenizer.encode

    def watched(*given: Any, **named: Any) -> list[int]:
        loops.append(asyncio._get_running_loop())
        return encode(*given, **named)

    monkeypatch.setattr(server.tokenizer, "encode", watched)
    server.plan_text(ANSWER)
    ask(server, tool_choice=NAMED)
    assert loops == [None]


# --- one call only ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_call_ends_the_generation(server, background, stream):
    answering = background.submit(ask, server, stream, parallel_tool_calls=False)
    request_id = server.script.see("Submit")["request_id"]
    first = 'Hm. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    server.script.emit(request_id, server.bytes(first + '\n<tool_call>\n{"name": "clock"}\n</tool_call> and'))
    assert server.script.see("Abort")["request_id"] == request_id
    answer = answering.result()
    assert answer[1:4] == ("Hm.", "tool_calls", CALLED)
    assert answer.usage["completion_tokens"] == len(server.bytes(first))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("form", "call", "more"),
    [
        (qwen3, '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>', " and more "),
        (
            llama3_json,
            '{"name": "weather", "parameters": {"city": "Bern"}}',
            ' and more <|python_tag|>{"name": "clock"}',
        ),
        (llama3_json, '{"name": "weather", "parameters": {"city": "Bern"}}', ';{"name": "clock"}'),
    ],
    ids=["qwen", "llama", "llama with two calls"],
)
def test_text_that_a_stop_string_held_back_ends_with_the_only_call(start, form, call, more, stream, seed):
    server = start(PLAIN if form is qwen3 else CHATML + "{% if tools %}{% endif %}", tool_call_parser=form.FORMAT.name)
    server.plan_text(f"{call}{more} {call}", seed)
    stop = f"{call[-3:]}{more} {call}X"
    answer = ask(server, stream, parallel_tool_calls=False, stop=[stop])
    assert answer[1:4] == ("", "tool_calls", CALLED)


def test_the_last_token_of_the_limit_may_complete_the_only_call(server):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    server.script.plan(server.bytes(text))
    answer = ask(server, parallel_tool_calls=False, max_tokens=len(server.bytes(text)))
    assert (answer.calls, answer.finish_reason) == (CALLED, "tool_calls")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}, "tools": [CLOCK]}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [CLOCK]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": "clock"}, "tools": [CLOCK]}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "clock"}}, "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": "any", "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [CLOCK], "add_generation_prompt": False}, "tool_choice"),
        ({"tool_choice": "required", "tools": [CLOCK], "continue_final_message": True,
          "messages": [HELLO, {"role": "assistant", "content": "I"}]}, "tool_choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_call_that_cannot_be_forced_is_refused_by_name(server, fields, param):
    assert refusal(server, **fields)["param"] == param


def test_an_unknown_form_of_calls_cannot_be_forced(start):
    server = start(QWEN)
    error = refusal(server, tools=[CLOCK], tool_choice="required")
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]


def test_prompt_and_prefix_must_fit_together(thinking):
    body = {"tools": [CLOCK], "chat_template_kwargs": {"enable_thinking": False}}
    room = 4096 - len(thinking.ids(prompt_of(thinking, **body)))
    error = refusal(thinking, **body, tool_choice="required", max_tokens=room)
    assert error["code"] == "context_length_exceeded"


def test_strict_is_a_wish_that_is_logged_and_not_in_the_prompt(server, caplog):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    with caplog.at_level("INFO", logger="app.api.prompts"):
        assert prompt_of(server, tools=[strict]) == prompt_of(server, tools=[WEATHER])
    assert [record.getMessage() for record in caplog.records] == [
        "tools with strict: 1; it is a wish here, and their calls are not checked"
    ]
