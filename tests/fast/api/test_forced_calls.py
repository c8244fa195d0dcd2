"""Forced tool calls: the answer begins with the family's own opening of a call, without reasoning."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.text.parsers import llama3_json, qwen3
from tests.fast.api.served import CHATML, Server
from tests.fast.api.templates import HELLO, NO_THINKING, QWEN, TURN, WEATHER, prompt_of, refusal, serving_template

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


def rest_of(choice: Any) -> str:
    return REST["required" if choice == "required" else "named"]


@pytest.fixture(scope="module")
def shared_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plain") / "qwen"
    with serving_template(model_folder, folder, PLAIN, tool_call_parser="qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def thinking_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinking") / "qwen"
    with serving_template(model_folder, folder, reasoning_parser="qwen3", tool_call_parser="qwen3") as server:
        yield server


@pytest.fixture
def thinking(thinking_server: Server) -> Server:
    thinking_server.settle()
    return thinking_server


def steps_of(server: Server, text: str, seed: int = 0, *, end: bool = True) -> list[list[int]]:
    """Return the tokens of a text, one for each byte, in steps of random sizes."""
    ids = [*(server.bytes(text) if text else []), *([2] if end else [])]
    random = Random(seed)
    cuts = sorted(random.choices(range(1, len(ids) + 1), k=random.randrange(len(ids)))) if ids else []
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)]) if ids[a:b]]


def functions(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls or []]


def whole(server: Server, **fields: Any) -> dict[str, Any]:
    return server.openai.chat.completions.create(**OFFER | fields).model_dump()


def streamed(server: Server, **fields: Any) -> dict[str, Any]:
    """Return the first choice that the SDK puts together from the chunks, with the usage."""
    body = OFFER | fields | {"stream_options": {"include_usage": True} | fields.get("stream_options", {})}
    text, thought, calls, reasons, usage = "", "", [], [], None
    with server.openai.chat.completions.create(**body, stream=True) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices[:1]:
                text += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                calls += [call.model_dump() for call in choice.delta.tool_calls or []]
                reasons += [choice.finish_reason] if choice.finish_reason else []
    return {"content": text, "reasoning": thought, "calls": calls, "reasons": reasons, "usage": usage.model_dump()}


def shown(server: Server, token_ids: list[int]) -> str:
    return server.tokenizer.decode(token_ids, skip_special_tokens=False)


@CHOICES
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_begins_with_a_call_whose_opening_is_a_part_of_the_prompt(server, choice, prefix, seed):
    server.script.plan(*steps_of(server, rest_of(choice), seed))
    answer = whole(server, tool_choice=choice)
    submitted = server.script.see("Submit")["token_ids"]
    assert shown(server, submitted).endswith(TURN + prefix)
    (only,) = answer["choices"]
    assert functions(only["message"]["tool_calls"]) == CALLED
    assert (only["message"]["content"], only["finish_reason"]) == (None, "tool_calls")
    sent = len(server.bytes(rest_of(choice)))
    assert answer["usage"]["prompt_tokens"] == len(submitted)
    assert answer["usage"]["completion_tokens"] == sent + (0 if choice == NAMED else 1)


@CHOICES
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_says_the_same(server, choice, prefix, seed):
    server.script.plan(*steps_of(server, rest_of(choice), seed))
    pieces = streamed(server, tool_choice=choice)
    assert functions(pieces["calls"]) == CALLED
    assert (pieces["content"], pieces["reasons"]) == ("", ["tool_calls"])


def test_the_prompt_is_the_one_of_auto_and_the_prefix(server):
    prompts = []
    for choice in ("auto", "required", NAMED):
        server.script.plan([2])
        whole(server, tool_choice=choice)
        prompts.append(shown(server, server.script.see("Submit")["token_ids"]))
    auto, required, named = prompts
    assert (required, named) == (
        auto + '<tool_call>\n{"name": "',
        auto + '<tool_call>\n{"name": "weather", "arguments":',
    )


def test_required_leaves_the_number_of_calls_to_the_model_and_a_named_function_is_called_once(server):
    more = f'{REST["required"]}\n<tool_call>\n{{"name": "clock"}}\n</tool_call>'
    server.script.plan(*steps_of(server, more))
    message = whole(server, tool_choice="required")["choices"][0]["message"]
    assert functions(message["tool_calls"]) == [*CALLED, ("clock", {})]
    server.script.plan(*steps_of(server, ANSWER + '\n<tool_call>\n{"name": "clock"}\n</tool_call>'))
    message = whole(server, tool_choice=NAMED)["choices"][0]["message"]
    assert functions(message["tool_calls"]) == CALLED


def test_every_choice_begins_with_the_call(server):
    server.script.plan(*steps_of(server, REST["required"]))
    choices = whole(server, tool_choice="required", n=3)["choices"]
    assert [functions(choice["message"]["tool_calls"]) for choice in choices] == [CALLED] * 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_responses_force_a_call_as_chat_does(server, choice):
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    server.script.plan(*steps_of(server, REST["required" if choice == "required" else "named"]))
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
        server.script.plan(*steps_of(server, rest))
        (only,) = whole(server, tool_choice=choice)["choices"]
        assert shown(server, server.script.see("Submit")["token_ids"]).endswith(TURN + prefix)
        assert functions(only["message"]["tool_calls"]) == CALLED


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_and_the_limit_end_a_forced_call_too(server, stream):
    read = streamed if stream else whole
    server.script.plan(*steps_of(server, ANSWER))
    answer = read(server, tool_choice=NAMED, stop='"Bern')
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    assert content == '<tool_call>\n{"name": "weather", "arguments": {"city": '
    server.script.plan(*steps_of(server, ANSWER))
    answer = read(server, tool_choice=NAMED, max_tokens=5)
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    reasons = answer["reasons"] if stream else [answer["choices"][0]["finish_reason"]]
    assert (content, reasons) == ('<tool_call>\n{"name": "weather", "arguments": {"ci', ["length"])


# --- with thinking on ------------------------------------------------------------------------------------------------


@CHOICES
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_has_no_reasoning(thinking, choice, prefix, stream):
    thinking.script.plan(*steps_of(thinking, rest_of(choice)))
    answer = (streamed if stream else whole)(thinking, tool_choice=choice, max_tokens=200)
    submitted = thinking.script.see("Submit")
    assert shown(thinking, submitted["token_ids"]).endswith(TURN + NO_THINKING + prefix)
    assert submitted["max_tokens"] == 200
    calls = answer["calls"] if stream else answer["choices"][0]["message"]["tool_calls"]
    assert functions(calls) == CALLED
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("reasoning", [True, False])
def test_reasoning_that_the_prompt_opens_is_closed_before_a_forced_call(start, reasoning):
    server = start(
        CHATML + "<think>\n{% if tools %}{% endif %}",
        reasoning_parser="qwen3" if reasoning else "none",
        tool_call_parser="qwen3",
    )
    server.script.plan(*steps_of(server, ANSWER))
    (only,) = whole(server, tool_choice=NAMED)["choices"]
    prompt = shown(server, server.script.see("Submit")["token_ids"])
    assert prompt.endswith(f'{TURN}{NO_THINKING}<tool_call>\n{{"name": "weather", "arguments":')
    assert (functions(only["message"]["tool_calls"]), only["message"]["content"]) == (CALLED, None)
    server.script.plan(*steps_of(server, "Hm.</think>So."))
    message = whole(server)["choices"][0]["message"]
    assert message["content"] == ("So." if reasoning else "Hm.</think>So.")


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
    thinking.script.plan(*steps_of(thinking, ANSWER))
    answer = whole(thinking, tool_choice=NAMED, extra_body=fields)
    warnings = [(warning["code"], warning["param"]) for warning in answer.get("warnings", [])]
    assert warnings == ([("reasoning_skipped", param)] if param else [])
    assert "warnings" not in whole(thinking, tool_choice="auto", extra_body=fields)


@pytest.mark.parametrize("field", ["tools.0.function.name", "tool_choice.function.name"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_the_name_of_a_function_has_a_maximum_length(server, path, field):
    long = {"type": "function", "function": {"name": "n" * 257}}
    tools, choice = ([long], "auto") if field.startswith("tools") else ([WEATHER], long)
    response = server.http.post(path, json=OFFER | {"tools": tools, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", ["tools.0.name", "tool_choice.name"])
def test_responses_have_the_same_maximum(server, field):
    names = ("n" * 257, "f") if field.startswith("tools") else ("f", "n" * 257)
    tool, choice = ({"type": "function", "name": name} for name in names)
    response = server.http.post("/v1/responses", json={"input": "a", "tools": [tool], "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_a_prompt_is_encoded_off_the_event_loop(server, monkeypatch):
    loops, encode = [], server.tokenizer.encode

    def watched(*given: Any, **named: Any) -> list[int]:
        loops.append(asyncio._get_running_loop())
        return encode(*given, **named)

    monkeypatch.setattr(server.tokenizer, "encode", watched)
    server.script.plan(*steps_of(server, ANSWER))
    whole(server, tool_choice=NAMED)
    assert loops == [None]


# --- one call only ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_call_ends_the_generation(server, background, stream):
    read = streamed if stream else whole
    answering = background.submit(read, server, parallel_tool_calls=False)
    request_id = server.script.see("Submit")["request_id"]
    first = 'Hm. <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    server.script.emit(request_id, server.bytes(first + '\n<tool_call>\n{"name": "clock"}\n</tool_call> and'))
    assert server.script.see("Abort")["request_id"] == request_id
    answer = answering.result()
    calls = answer["calls"] if stream else answer["choices"][0]["message"]["tool_calls"]
    reasons = answer["reasons"] if stream else [answer["choices"][0]["finish_reason"]]
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    assert (functions(calls), reasons, content) == (CALLED, ["tool_calls"], "Hm.")
    assert answer["usage"]["completion_tokens"] == len(server.bytes(first))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("family", "call", "more"),
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
def test_text_that_a_stop_string_held_back_ends_with_the_only_call(start, family, call, more, stream, seed):
    server = start(
        PLAIN if family is qwen3 else CHATML + "{% if tools %}{% endif %}", tool_call_parser=family.FAMILY.name
    )
    server.script.plan(*steps_of(server, f"{call}{more} {call}", seed))
    stop = f"{call[-3:]}{more} {call}X"
    answer = (streamed if stream else whole)(server, parallel_tool_calls=False, stop=[stop])
    calls = answer["calls"] if stream else answer["choices"][0]["message"]["tool_calls"]
    reasons = answer["reasons"] if stream else [answer["choices"][0]["finish_reason"]]
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    assert (functions(calls), reasons, content or "") == (CALLED, ["tool_calls"], "")


def test_the_last_token_of_the_limit_may_complete_the_only_call(server):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    server.script.plan(server.bytes(text))
    (only,) = whole(server, parallel_tool_calls=False, max_tokens=len(server.bytes(text)))["choices"]
    assert (functions(only["message"]["tool_calls"]), only["finish_reason"]) == (CALLED, "tool_calls")


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


def test_bare_completions_know_no_tools(server):
    response = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


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
        "strict is a wish here: 1 tools have it, and their calls are not checked"
    ]
