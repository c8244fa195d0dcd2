"""Servers whose engine is played by a thread, which writes what a good model would behind its family's template."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from tests.fast.api.served import Server, serving
from tests.fast.api.templates import QWEN

ARGUMENTS = '{"city": "Bern", "days": 3}'
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
"""A picture of one pixel."""
CALLS = {
    "get_weather": ({"city": "Bern"}, "sunny"),
    "mcp__weather__get_weather": ({"city": "Bern"}, "sunny"),
    "exec_command": ({"cmd": f"echo {DOT} | base64 -d > dot.png; printf 'cloud%s' less"}, "cloudless"),
    "view_image": ({"path": "dot.png"}, "cannot see"),
    "final_answer": ({"answer": "sunny"}, None),
}
"""What the model calls where it is offered, one after the other, and what the result says."""
MOST_PROMPTS = 20
"""After these a client gets empty answers, because one that goes round in circles would never end."""
OFFERED = re.compile(r'"function": {"name": "([^"]+)"|\ntype (\w+) = ')


class Family(NamedTuple):
    """How models of a family write calls, thoughts and answers, and what their prompts end with."""

    template: str
    call: Callable[[str, dict[str, Any]], str]
    turn: str = "<|im_start|>assistant\n"
    thought: str = "<think>\n{}\n</think>\n\n"
    answer: str = "{}"
    reasoning_parser: str = "auto"
    """Of models that think. Some templates do not show that they do."""


def template(name: str) -> str:
    return Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8")


def in_xml(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def in_json(key: str, around: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: around % json.dumps({"name": name, key: arguments})


def on_a_channel(name: str, arguments: dict[str, Any]) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"


FAMILIES = {
    "Qwen3": Family(QWEN, in_json("arguments", "<tool_call>\n%s\n</tool_call>")),
    "Qwen3-Coder": Family(template("qwen3_coder"), in_xml, reasoning_parser="qwen3"),
    "Qwen3.5": Family(template("qwen3.5"), in_xml),
    "Llama 3": Family(
        template("llama3"),
        in_json("parameters", "%s"),
        turn="<|start_header_id|>assistant<|end_header_id|>\n\n",
        reasoning_parser="qwen3",
    ),
    "gpt-oss": Family(
        template("gpt-oss"),
        on_a_channel,
        turn="<|start|>assistant",
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        answer="<|channel|>final<|message|>{}",
    ),
}


def reply(family: Family, thinks: bool, prompt: str) -> str:
    """Return what a good model would write behind this prompt."""
    conversation, _, begun = prompt.rpartition(family.turn)
    offered = [one or other for one, other in OFFERED.findall(conversation)]
    called = [name for name in CALLS if name in offered]
    left = [name for name in called if CALLS[name][1] is None or CALLS[name][1] not in conversation]
    if not offered:
        said = family.answer.format(f"```json\n{ARGUMENTS}\n```")
    elif not called:
        said = family.call(offered[0], json.loads(ARGUMENTS))
    else:
        said = family.call(left[0], CALLS[left[0]][0]) if left else family.answer.format("It is sunny.")
    nothing = family.thought.format("")
    whole = family.thought.format("Hm.") + said if thinks and not begun.startswith(nothing) else said
    begun = begun.removeprefix(nothing)
    assert whole.startswith(begun), (begun, whole)
    return whole.removeprefix(begun)


@contextlib.contextmanager
def playing(server: Server, family: Family, thinks: bool) -> Iterator[list[str]]:
    """Answer each request in a thread. Yields the prompts so far."""
    ended, prompts = threading.Event(), list[str]()
    seen = server.script.events
    patience = seen.rcvtimeo

    def play() -> None:
        while not ended.is_set():
            seen.rcvtimeo = 200  # because the test's end is no event
            try:
                request = server.script.see("Submit")
            except zmq.Again:
                continue
            finally:
                seen.rcvtimeo = patience
            prompts.append(server.tokenizer.decode(request["token_ids"], skip_special_tokens=False))
            text = reply(family, thinks, prompts[-1]) if len(prompts) < MOST_PROMPTS else ""
            server.script.emit(request["request_id"], [*server.bytes(text), 2])

    player = threading.Thread(target=play)
    player.start()
    try:
        yield prompts
    finally:
        ended.set()
        player.join()


@contextlib.contextmanager
def serving_family(model_folder: Path, name: str, thinks: bool = True) -> Iterator[Server]:
    """Yield a ready server of a family. A model that does not think has thinking turned off, if its template can."""
    family = FAMILIES[name]
    settings: dict[str, Any] = {"reasoning_parser": family.reasoning_parser if thinks else "auto"}
    if not thinks and "enable_thinking" in family.template:
        settings["default_chat_template_kwargs"] = {"enable_thinking": False}
    with serving(model_folder, template=family.template, tool_call_parser="auto", **settings) as server:
        server.ready(max_model_len=2**17)
        yield server


@pytest.fixture(scope="module")
def shared_server(model_folder: Path) -> Iterator[Server]:
    with serving_family(model_folder, "Qwen3") as server:
        yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with playing(server, FAMILIES["Qwen3"], thinks=True):
        yield f"{server.url}/v1"
