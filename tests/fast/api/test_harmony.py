"""Messages on channels, as gpt-oss writes them, over HTTP: reasoning, content and calls, streamed or not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fast.api.served import Server, serving_ready
from tests.fast.api.templates import HELLO, WEATHER, prompt_of, refusal, said

TEMPLATE = (
    "{% macro system() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% endmacro %}{{ system() }}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for message in messages %}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>Hm, 漢字 < 5.<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>It is 4."
CALL = THOUGHT + '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'


LIKE_PUBLISHED = """\
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' or tools %}<|start|>developer<|message|>
{{- messages[0].content if messages[0].role == 'system' }}
{%- for tool in tools or [] %}{{ '// ' + tool.function.description + ' ' + tool.function.name }}{% endfor %}<|end|>
{%- endif %}
{%- for message in turns %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{{- '<|start|>assistant to=' + message.tool_calls[0].function.name + '<|message|><|call|>' }}
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role in ('user', 'tool') %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}<|start|>assistant"""
"""A template that reads as gpt-oss's does: `thinking`, one call, descriptions, and a system message at the start."""


def called(*names: str, **fields: str) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


PARSERS = {"reasoning_parser": "harmony", "tool_call_parser": "harmony"}
SERVED = {"template": TEMPLATE, **PARSERS}


@pytest.fixture(scope="module")
def published(model_folder: Path) -> Iterator[Server]:
    with serving_ready(model_folder, template=LIKE_PUBLISHED, **PARSERS) as server:
        yield server


@pytest.mark.parametrize("effort", ["low", "medium", "high", None])
def test_the_effort_reaches_the_prompt(server: Server, effort: str | None) -> None:
    system = f"<|start|>system<|message|>Reasoning: {effort or 'medium'}<|end|>"
    for given in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"reasoning_effort": effort}}):
        sent = server.http.post("/tokenize", json={"messages": [HELLO]} | given)
        assert server.tokenizer.decode(sent.json()["tokens"], skip_special_tokens=False).startswith(system), sent.text
    server.script.plan([2])
    answer = server.http.post("/v1/responses", json={"input": "hello", "reasoning": {"effort": effort}})
    assert answer.status_code == 200, answer.text
    prompt = server.prompt()
    assert prompt.startswith(system)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "max"}, "reasoning_effort"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
    ],
    ids=str,
)
def test_an_effort_that_the_template_does_not_know_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    answer = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": [HELLO]} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stream", [False, True])
def test_analysis_is_reasoning_and_final_is_the_answer(server: Server, stream: bool, seed: int) -> None:
    server.plan_text(ANSWER, seed)
    assert said(server, stream)[:3] == ("Hm, 漢字 < 5.", "It is 4.", "stop")


@pytest.mark.parametrize("seed", range(3))
def test_commentary_to_a_function_is_a_call(server: Server, seed: int) -> None:
    server.plan_text(CALL, seed)
    called = [("weather", {"city": "Bern"})]
    assert said(server, tools=[WEATHER])[:4] == ("Hm, 漢字 < 5.", "", "tool_calls", called)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_begins_with_its_header(server: Server, stream: bool) -> None:
    server.plan_text('{"city": "Bern"}', 0)
    named = {"type": "function", "function": {"name": "weather"}}
    assert said(server, stream, tools=[WEATHER], tool_choice=named).calls == [("weather", {"city": "Bern"})]


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"reasoning_content": "I look."}, "I look."),
        ({"content": "Wait."}, "Wait."),
        ({"content": "Wait.", "reasoning": "I look."}, "I look.\n\nWait."),
    ],
)
def test_reasoning_that_is_sent_back_with_a_call_is_in_the_prompt(
    published: Server, fields: dict[str, str], written: str
) -> None:
    result = {"role": "tool", "tool_call_id": "weather", "content": "sun"}
    prompt = prompt_of(published, messages=[HELLO, called("weather", **fields), result])
    assert f"<|channel|>analysis<|message|>{written}<|end|><|start|>assistant to=weather" in prompt


def test_a_function_without_a_description_is_offered(published: Server) -> None:
    assert "//  weather<|end|>" in prompt_of(published, tools=[WEATHER])


def test_system_messages_are_all_in_the_prompt_wherever_they_stand(published: Server) -> None:
    kind, brief = {"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}
    for messages in ([kind, brief, HELLO], [kind, HELLO, brief], [HELLO, kind, HELLO, brief]):
        assert "<|message|>Be kind.\n\nBe brief.<|end|>" in prompt_of(published, messages=messages)


def test_calls_that_the_template_would_leave_out_are_refused(published: Server) -> None:
    error = refusal(published, messages=[HELLO, called("weather", "time"), HELLO])
    assert error["param"] == "messages.1.tool_calls" and "one call of a message" in error["message"]
