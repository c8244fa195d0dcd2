"""Servers whose model has a chat template of the test."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fast.api.served import Server, serving

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


@contextlib.contextmanager
def serving_template(model_folder: Path, folder: Path, template: str = QWEN, **services: Any) -> Iterator[Server]:
    """A ready server whose model has this chat template; `folder` is not there yet."""
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(template)
    with serving(folder, **services) as server:
        server.script.ready(max_model_len=4096)
        server.reach("ready")
        server.script.plan([2])
        yield server


@pytest.fixture
def start(model_folder: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a server of this test's own with a template and Services' options."""
    with contextlib.ExitStack() as stack:
        yield lambda template=QWEN, **services: stack.enter_context(
            serving_template(model_folder, tmp_path / "own", template, **services)
        )


def prompt_of(server: Server, path: str = "/v1/chat/completions", **fields: Any) -> str:
    """The prompt that the engine was given for a request with these fields."""
    server.script.plan([2])
    response = server.http.post(path, json=ASK | fields)
    assert response.status_code == 200, response.text
    return server.tokenizer.decode(server.script.see("Submit")["token_ids"], skip_special_tokens=False)


def refusal(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json=ASK | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]
