"""docs/structured-output.md: frameworks get structured data of a scripted model, which writes what a model would.

DFLASH_CLIENTS_PYTHON is an interpreter with instructor, pydantic-ai-slim[openai], openai-agents, langchain-openai and
smolagents[openai].
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from app.text.parsers import qwen3
from tests import ROOT
from tests.clients.frameworks import CASES, REFUSED
from tests.fast.api.served import Server, serving
from tests.fast.api.templates import QWEN

PYTHON = os.environ.get("DFLASH_CLIENTS_PYTHON", "")
ARGUMENTS = '{"city": "Bern", "days": 3}'


def reply(prompt: str) -> str:
    """Return what a good model would write behind this prompt."""
    conversation, _, turn = prompt.rpartition("<|im_start|>assistant\n")
    tools = re.findall(r'"function": {"name": "([^"]+)"', conversation)
    has_result = "sunny" in conversation
    if not tools:
        return f"```json\n{ARGUMENTS}\n```"
    name, arguments = tools[0], ARGUMENTS
    if has_result and "final_answer" in tools:
        name, arguments = "final_answer", '{"answer": "sunny"}'
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if turn:
        assert call.startswith(turn), (turn, call)
        return call.removeprefix(turn)
    return "It is sunny." if has_result else call


@pytest.fixture(scope="module")
def shared_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = QWEN.replace("<think>", "").replace("</think>", "")
    folder = tmp_path_factory.mktemp("frameworks") / "qwen"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(template)
    with serving(folder, tool_family=qwen3.FAMILY) as server:
        server.script.ready(max_model_len=2**17)
        server.reach("ready")
        yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    ended = threading.Event()

    def play() -> None:
        while not ended.is_set():
            try:
                request = server.script.see("Submit")
            except zmq.Again:
                continue
            prompt = server.tokenizer.decode(request["token_ids"], skip_special_tokens=False)
            server.script.emit(request["request_id"], [*server.bytes(reply(prompt)), 2])

    server.script._seen.rcvtimeo = 200
    player = threading.Thread(target=play)
    player.start()
    yield f"{server.url}/v1"
    ended.set()
    player.join()


needs_frameworks = pytest.mark.skipif(
    not PYTHON, reason="DFLASH_CLIENTS_PYTHON names no interpreter with the frameworks"
)


def run(case: str, url: str) -> "subprocess.CompletedProcess[str]":
    script = Path(__file__).with_name("frameworks.py")
    return subprocess.run([PYTHON, str(script), case, url], capture_output=True, text=True, timeout=300)


@needs_frameworks
@pytest.mark.parametrize("case", CASES)
def test_a_framework_gets_structured_data(url, case):
    done = run(case, url)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_frameworks
@pytest.mark.parametrize("case", REFUSED)
def test_what_asks_for_a_grammar_is_refused_by_name(url, case):
    done = run(case, url)
    assert done.returncode != 0 and "response_format" in done.stderr and "400" in done.stderr, done.stderr[-3000:]


def test_the_page_names_the_cases_that_are_run():
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    section = page.partition("\n## Frameworks\n")[2]
    assert re.findall(r"^- (.+)$", section, re.MULTILINE) == [*CASES, *REFUSED]


def test_the_pages_example_works(url, tmp_path):
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = example.replace("http://127.0.0.1:8000/v1", url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{ARGUMENTS} None\n", done.stderr
