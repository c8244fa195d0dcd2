"""The real server compiles behind /ready: its compiler ends with it, and what it compiled is taken up in a stream."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from app.messages import BEING_COMPILED
from tests.server.demo import process, ready

PATIENCE = 600.0
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here to compile with")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_compiler_ends_with_its_server_at_the_lowest_priority() -> None:
    with process("--compile", "auto") as (url, server):
        assert forwards(url) == BEING_COMPILED
        compiler = until(lambda: of_engine(server.pid))
        assert status(compiler)[16] == "19", "its priority"
    assert server.returncode == 0
    until(lambda: compiler if not alive(compiler) else None)


def test_the_compiler_ends_with_an_engine_that_is_killed() -> None:
    with process("--compile", "auto") as (_, server):
        compiler = until(lambda: of_engine(server.pid))
        server.send_signal(signal.SIGKILL)
        until(lambda: compiler if not alive(compiler) else None)


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


def of_engine(server: int) -> int | None:
    """The compiler of a server's engine, once it runs."""
    for engine in children(server):
        for child in children(engine):
            if b"app.engine.compiler" in Path(f"/proc/{child}/cmdline").read_bytes() and status(child)[16] == "19":
                return child
    return None


def children(parent: int) -> list[int]:
    return [int(pid) for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()]


def status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name, state first (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    try:
        return status(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(found: Callable[[], int | None]) -> int:
    end = time.monotonic() + PATIENCE
    while not (pid := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return pid
