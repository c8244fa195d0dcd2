"""Servers whose model has a chat template of the test."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fast.api.errors import error_of
from tests.fast.api.served import Server, serving_ready

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {%- set ns.turns = ns.turns + 1 %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""As Qwen3 has it, shortened."""
HEAD = "<|im_start|>user\nhello<|im_end|>\n"
TURN = "<|im_start|>assistant\n"
NO_THINKING = "<think>\n\n</think>\n\n"
HELLO = {"role": "user", "content": "hello"}
ASK = {"model": "tiny", "messages": [HELLO]}


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def started(model_folder: Path) -> Iterator[Start]:
    """Start one server for each template and settings of a module."""
    servers: dict[str, Server] = {}

    def started(**given: Any) -> Server:
        if (key := repr(given)) not in servers:
            servers[key] = stack.enter_context(serving_ready(model_folder, **given))
        return servers[key]

    with contextlib.ExitStack() as stack:
        yield started


@pytest.fixture
def start(started: Start) -> Start:
    """Return a function that yields a server with a template and settings, as new."""

    def start(template: str = QWEN, **settings: Any) -> Server:
        server = started(template=template, **settings)
        server.settle()
        server.script.plan([2])
        return server

    return start


def prompt_of(server: Server, path: str = "/v1/chat/completions", **fields: Any) -> str:
    """The prompt that the engine was given for a request with these fields."""
    server.script.plan([2])
    response = server.http.post(path, json=ASK | fields)
    assert response.status_code == 200, response.text
    return server.prompt()


class Said(NamedTuple):
    """The first choice of a chat. `calls` are (name, arguments), with the text of those that are no JSON."""

    reasoning: str | None
    content: str
    finish_reason: str
    calls: list[tuple[str, dict[str, Any]]]
    call_ids: list[str]
    usage: dict[str, Any]


def json_or_text(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def said(server: Server, stream: bool = False, **fields: Any) -> Said:
    """Ask with OpenAI's SDK, and return the whole choice or what its chunks make together."""
    if stream:
        fields |= {"stream_options": {"include_usage": True}}
        with server.openai.chat.completions.create(**ASK, stream=True, extra_body=fields) as events:
            *chunks, last = events
        choices, usage = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0], last.usage
        parts = [choice.delta for choice in choices]
        called = [call for part in parts for call in part.tool_calls or []]
        begun = [call for call in called if call.id]
        assert [call.index for call in begun] == list(range(len(begun)))
        for call in called:
            if not call.id:
                begun[call.index].function.arguments += call.function.arguments
    else:
        answer = server.openai.chat.completions.create(**ASK, extra_body=fields)
        choices, usage = answer.choices[:1], answer.usage
        parts = [choices[0].message]
    reasoning = [getattr(part, "reasoning_content", None) or "" for part in parts]
    contents = [part.content or "" for part in parts]
    if stream:
        assert not any(any(contents[:index]) for index, thought in enumerate(reasoning) if thought)
    calls = begun if stream else parts[0].tool_calls or []
    assert all(call.type == "function" and call.id for call in calls)
    (reason,) = filter(None, (choice.finish_reason for choice in choices))
    functions = [(call.function.name, json_or_text(call.function.arguments)) for call in calls]
    ids = [call.id for call in calls]
    return Said("".join(reasoning) or None, "".join(contents), reason, functions, ids, usage.model_dump())


def refusal(server: Server, **fields: Any) -> dict[str, Any]:
    return error_of(server.http.post("/v1/chat/completions", json=ASK | fields), 400)
