"""The real server compiles behind /ready: its compiler ends with it, and what it compiled is taken up in a stream."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from app.messages import BEING_COMPILED
from tests.fast.api.served import PATIENCE, until
from tests.server.demo import children, is_gone, process, ready

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here to compile with")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_compiler_ends_with_its_server_at_the_lowest_priority() -> None:
    with process("--compile", "auto") as (url, server):
        assert forwards(url) == BEING_COMPILED
        compiler = compiler_of(server)
    assert server.returncode == 0
    until(lambda: is_gone(compiler))


def test_the_compiler_ends_with_an_engine_that_is_killed() -> None:
    with process("--compile", "auto") as (_, server):
        compiler = compiler_of(server)
        server.send_signal(signal.SIGKILL)
        until(lambda: is_gone(compiler))


@pytest.mark.slow
def test_a_stream_goes_on_while_code_is_taken_up_and_the_next_start_has_it_at_once() -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Count to fifty."}], "max_tokens": 200}
    with ready("--compile", "auto") as url:
        texts = set()
        while forwards(url) == BEING_COMPILED:
            texts.add(streamed(url, body))
        assert forwards(url) == "compiled"
        texts.add(streamed(url, body))
    assert len(texts) == 1
    with ready("--compile", "auto") as url:
        assert forwards(url) == "compiled" and {streamed(url, body)} == texts


def forwards(url: str) -> str:
    return str(httpx.get(f"{url}/server_info", timeout=PATIENCE).json()["forwards"])


def streamed(url: str, body: dict[str, object]) -> str:
    said = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                said += "".join(c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"])
    return said


def compiler_of(server: "subprocess.Popen[str]") -> int:
    """Return the compiler of a server's engine once it runs with the lowest priority."""
    found = list[int]()

    def look() -> list[int]:
        for pid in [pid for engine in children(server.pid) for pid in children(engine)]:
            named = b"app.engine.compiler" in Path(f"/proc/{pid}/cmdline").read_bytes()
            if named and os.getpriority(os.PRIO_PROCESS, pid) == 19:
                found.append(pid)
        return found

    until(look)
    return found[0]
