"""The whole server as its own process: signals, exit codes, ports."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import Script

ROOT = Path(__file__).parents[2]
MAIN = """
import sys
from pathlib import Path
from app.api.server import run
from app.config import Config
port, shutdown_timeout, step_timeout, folder, *engine = sys.argv[1:]
config = Config(model="tiny", port=port, shutdown_timeout=shutdown_timeout, step_timeout=step_timeout)
sys.exit(run(config, Path(folder), None, engine))
"""
ASK = {"prompt": "hi"}


class Process:
    """`run` in a process of its own, with a scripted engine."""

    def __init__(
        self,
        script: Script,
        model_folder: Path,
        port: int = 0,
        shutdown_timeout: float = 10,
        step_timeout: float = 120,
    ) -> None:
        self.script = script
        settings = (str(port), str(shutdown_timeout), str(step_timeout))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", MAIN, *settings, str(model_folder), *script.command],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(script.folder)},  # A killed server leaves its sockets behind.
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_url(self) -> str:
        line = self.read_until("listening on")
        return re.search(r"http://\S+", line).group()

    def read_until(self, words: str) -> str:
        for line in self.popen.stderr:
            if words in line:
                return line
        raise AssertionError(f"never said {words!r}")

    def wait(self) -> int:
        return self.popen.wait(15)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.popen.stderr.close()


@pytest.fixture
def script() -> Iterator[Script]:
    with tempfile.TemporaryDirectory(prefix="dft-") as folder:
        script = Script(Path(folder))
        yield script
        script.close()


@pytest.fixture
def process(script, model_folder) -> Iterator[Process]:
    process = Process(script, model_folder)
    yield process
    process.close()


def ids(model_folder, text: str) -> list[int]:
    from app.text.tokenizer import Tokenizer

    return Tokenizer(model_folder).encode(text)


def test_sigterm_finishes_what_runs_and_exits_0(process, script, model_folder, background):
    url = process.read_url()
    script.ready()
    process.read_until("ready: ")
    running = background.submit(lambda: httpx.post(f"{url}/v1/completions", json=ASK, timeout=10))
    request_id = script.see("Submit")["request_id"]
    process.popen.send_signal(signal.SIGTERM)
    process.read_until("stopping")
    assert httpx.get(f"{url}/ready").json()["status"] == "draining"
    assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 503
    script.emit(request_id, [*ids(model_folder, "done"), 2])
    assert running.result().json()["choices"][0]["text"] == "done"
    assert process.wait() == 0


def test_a_second_signal_forces_the_end(process, script, background):
    url = process.read_url()
    script.ready()
    process.read_until("ready: ")
    running = background.submit(lambda: httpx.post(f"{url}/v1/completions", json=ASK, timeout=10))
    script.see("Submit")
    process.popen.send_signal(signal.SIGTERM)
    process.read_until("stopping")
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 1
    assert running.exception() is not None or running.result().status_code == 503


def test_sigterm_while_loading_exits_0(process, script):
    process.read_url()
    script.see("started")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_sigterm_while_loading_does_not_wait_for_an_engine_that_hears_nothing(process, script):
    process.read_url()
    script.see("started")
    script.order("sleep", seconds=30)
    process.popen.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert process.wait() == 0
    assert time.monotonic() - asked < 4


def test_a_user_error_of_the_engine_ends_the_server_with_its_reason(process, script):
    process.read_url()
    script.see("started")
    script.order("fatal", reason="no such device: npu:9", user_error=True)
    assert process.read_until("error: ") == "error: no such device: npu:9\n"
    assert process.wait() == 1


def test_the_engine_ends_with_its_parent(process, script):
    """stdin of the engine closes however the parent dies, so no engine is ever left behind."""
    process.read_url()
    script.ready()
    process.read_until("ready: ")
    process.popen.kill()
    process.wait()
    assert script.see("orphaned")["epoch"] == 1


def test_the_setting_reaches_the_engine_and_a_pause_of_the_whole_server_is_no_hang(script, model_folder, background):
    process = Process(script, model_folder, step_timeout=2)
    try:
        url = process.read_url()
        engine = script.see("started")["pid"]
        script.order("ready", info=script.info)
        process.read_until("ready: ")
        running = background.submit(lambda: httpx.post(f"{url}/v1/completions", json=ASK, timeout=10))
        request_id = script.see("Submit")["request_id"]
        both = (engine, process.popen.pid)
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        script.emit(request_id, [2])
        assert running.result().status_code == 200
        running = background.submit(lambda: httpx.post(f"{url}/v1/completions", json=ASK, timeout=10))
        script.see("Submit")
        os.kill(engine, signal.SIGSTOP)
        assert "no step result within 2 s" in running.result().json()["error"]["message"]
        assert script.see("started")["epoch"] == 2
    finally:
        process.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)


def test_a_port_in_use_is_one_clear_line_and_exit_1(script, model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = Process(script, model_folder, port)
        assert process.wait() == 1
        said = process.popen.stderr.read()
        process.close()
    assert said.count("\n") == 1 and f"127.0.0.1:{port}" in said and "--port" in said


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", None), ("generation_config.json", '{"temperature": "hot"}'), ("chat_template.json", "[1]")],
)
def test_an_unusable_file_of_the_tokenizer_is_one_clear_line_and_exit_2_before_the_port(
    script, model_folder, tmp_path, name, content
):
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = Process(script, folder, taken.getsockname()[1])
        assert process.wait() == 2
        said = process.popen.stderr.read()
        process.close()
    assert said.count("\n") == 1 and name in said


def test_a_tokenizer_larger_than_the_model_is_warned_of_at_start(script, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    (folder / "config.json").write_text('{"vocab_size": 100}')
    process = Process(script, folder)
    line = process.read_until("config.json")
    process.close()
    assert "tokenizer.json" in line and "99" in line
