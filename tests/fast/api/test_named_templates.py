"""A model with several chat templates: requests with tools have the one called `tool_use`, all others the default."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.api.served import CHATML, Server, serving_ready
from tests.fast.api.templates import CALL, HEAD, HELLO, QWEN, TURN, WEATHER, prompt_of, refusal, said

FLAT = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def named(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As Hermes 3's folder."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("named") / "model")
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": QWEN}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    auto = {"reasoning_parser": "auto", "tool_call_parser": "auto"}
    with serving_ready(folder, **auto) as server:
        yield server


@pytest.fixture
def server(named: Server) -> Server:
    named.settle()
    return named


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_in_the_prompt_and_their_calls_are_read(server: Server, stream: bool) -> None:
    server.plan_text(f"<think>hm</think>{CALL}", 3)
    answer = said(server, stream, tools=[WEATHER])
    assert (answer.reasoning, answer.calls) == ("hm", [("weather", {})])
    assert "<tools>" in server.prompt()
    server.plan_text(CALL, 3)
    items = server.http.post("/v1/responses", json={"input": "hello", "tools": [FLAT]}).json()["output"]
    assert [item["type"] for item in items] == ["function_call"] and "<tools>" in server.prompt()
    tokens = server.http.post("/tokenize", json={"messages": [HELLO], "tools": [WEATHER]}).json()["tokens"]
    assert "<tools>" in server.text(tokens)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}], ids=str)
def test_without_tools_the_default_is_taken(server: Server, fields: dict) -> None:
    assert prompt_of(server, **fields) == HEAD + TURN
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}
    assert refusal(server, messages=[HELLO, call], **fields)["param"] == "messages.1.tool_calls"


def test_switches_are_those_of_the_template_that_is_taken(server: Server) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_of(server, tools=[WEATHER], **off).endswith("<think>\n\n</think>\n\n")
