"""A server whose engine is played by a thread, which writes what a good model would behind Qwen3's template."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.fast.api.served import Server, serving
from tests.fast.api.templates import QWEN

ARGUMENTS = '{"city": "Bern", "days": 3}'


def reply(prompt: str) -> str:
    """Return what a good model would write behind this prompt."""
    conversation, _, turn = prompt.rpartition("<|im_start|>assistant\n")
    tools = re.findall(r'"function": {"name": "([^"]+)"', conversation)
    has_result = "sunny" in conversation
    if not tools:
        return f"```json\n{ARGUMENTS}\n```"
    name, arguments = tools[0], ARGUMENTS
    if name == "get_weather":
        arguments = json.dumps({"city": "Bern"})
    if has_result and "final_answer" in tools:
        name, arguments = "final_answer", '{"answer": "sunny"}'
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    turn = turn.lstrip("\n")  # of the empty reasoning that a forced call begins with
    if turn:
        assert call.startswith(turn), (turn, call)
        return call.removeprefix(turn)
    return "It is sunny." if has_result else call


@pytest.fixture(scope="module")
def shared_server(model_folder: Path) -> Iterator[Server]:
    template = QWEN.replace("<think>", "").replace("</think>", "")
    with serving(model_folder, template=template, tool_call_parser="qwen3") as server:
        server.ready(max_model_len=2**17)
        yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    ended = threading.Event()

    seen = server.script.events
    patience = seen.rcvtimeo

    def play() -> None:
        while not ended.is_set():
            seen.rcvtimeo = 200  # because the fixture's end is no event
            try:
                request = server.script.see("Submit")
            except zmq.Again:
                continue
            finally:
                seen.rcvtimeo = patience
            prompt = server.tokenizer.decode(request["token_ids"], skip_special_tokens=False)
            server.script.emit(request["request_id"], [*server.bytes(reply(prompt)), 2])

    player = threading.Thread(target=play)
    player.start()
    yield f"{server.url}/v1"
    ended.set()
    player.join()
