"""Forced calls of the demo pair: the text behind the opening of a call is the target's own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fast.api.served import PATIENCE
from tests.fast.api.templates import QWEN
from tests.server.demo import ready

DEMO = Path(__file__).parents[2] / "app" / "demo" / "checkpoint"
OPENING = '<tool_call>\n{"name": "weather", "arguments":'
ASK = {
    "messages": [{"role": "user", "content": "Tom has 6 boxes with 4 keys in each. How many keys are there?"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target = tmp_path_factory.mktemp("demo") / "target"
    shutil.copytree(DEMO / "target", target)
    (target / "chat_template.jinja").write_text(QWEN)
    with ready(
        str(target), "--draft-model", str(DEMO / "draft"), "--served-model-name", "demo", "--verify", "full"
    ) as url:
        yield url


def post(url: str, path: str, body: dict[str, object]) -> dict[str, object]:
    response = httpx.post(url + path, json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return dict(response.json())


def written(choice: dict[str, Any]) -> str:
    """Return the text of a choice, which is its content unless it begins a call. A broken call has it all."""
    message = choice["message"]
    if message["content"] is not None:
        return str(message["content"])
    (call,) = message["tool_calls"]
    text = f"{OPENING} {call['function']['arguments']}"
    return text + "}\n</tool_call>" if choice["finish_reason"] == "tool_calls" else text.replace("\\n", "\n")


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_a_forced_call_is_the_plain_continuation_of_its_prompt_and_prefix(url, thinking, speculate, sampling):
    """A forced call has no reasoning, so thinking on or off makes the same prompt."""
    template = {"chat_template_kwargs": {"enable_thinking": thinking}}
    tokens = post(url, "/tokenize", ASK | {"chat_template_kwargs": {"enable_thinking": False}})["tokens"]
    prompt = str(post(url, "/detokenize", {"tokens": tokens})["prompt"]) + OPENING
    plain = post(url, "/v1/completions", {"prompt": prompt, "max_tokens": 48, "speculate": False} | sampling)
    named = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 48}
    forced = post(url, "/v1/chat/completions", ASK | template | named | {"speculate": speculate} | sampling)
    (choice,) = forced["choices"]
    assert written(choice) == OPENING + plain["choices"][0]["text"]
    is_call = choice["finish_reason"] == "tool_calls"
    assert choice["finish_reason"] == ("tool_calls" if is_call else plain["choices"][0]["finish_reason"])
    assert forced["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    unread = int(is_call)  # the end mark, because the answer ends with its one call
    assert forced["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] - unread
    assert json.dumps(forced).count("speculation") == 0
