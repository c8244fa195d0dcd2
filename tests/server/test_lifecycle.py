"""The whole server as its own process: signals, exit codes, ports."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import ROOT
from tests.fast.api.served import PATIENCE, Script, until
from tests.server.own_process import ASK, MAIN, Process, ids


@pytest.fixture
def script() -> Iterator[Script]:
    with tempfile.TemporaryDirectory(prefix="dft-") as folder:
        script = Script(Path(folder))
        yield script
        script.close()


@pytest.fixture
def process(script, model_folder) -> Iterator[Process]:
    with Process(script, model_folder) as process:
        yield process


def test_a_second_signal_forces_the_end(process, script, background):
    url = process.ready()
    running = background.submit(lambda: httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE))
    script.see("Submit")
    process.popen.send_signal(signal.SIGTERM)
    process.read_until("stopping")
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 1
    assert running.exception() is not None or running.result().status_code == 503


@pytest.mark.parametrize("again", [False, True])
def test_a_terminal_that_closes_begins_a_drain_and_does_not_end_it(process, script, model_folder, background, again):
    url = process.ready()
    running = background.submit(lambda: httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE))
    request_id = script.see("Submit")["request_id"]
    process.popen.send_signal(signal.SIGHUP)
    process.read_until("stopping: SIGHUP")
    process.read_until("1 running requests get")
    if again:
        process.popen.send_signal(signal.SIGHUP)
    script.emit(request_id, [*ids(model_folder, "done"), 2])
    assert running.result().json()["choices"][0]["text"] == "done"
    assert process.wait() == 0
    assert not list(script.folder.glob("dflash-*"))


def test_nohup_is_honoured_and_signals_without_a_meaning_are_told(script, model_folder):
    main = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{MAIN}"
    with Process(script, model_folder, main=main) as process:
        url = process.ready()
        process.popen.send_signal(signal.SIGHUP)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # one after the other, because two may come in any order
            process.popen.send_signal(number)
            process.read_until(number.name)
        script.plan([*ids(model_folder, "fine"), 2])
        answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE)
        assert answer.json()["choices"][0]["text"] == "fine"
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0


WORKS = f"""
import threading
from app.text.tokenizer import Tokenizer
Tokenizer.encode = lambda *_, **__: threading.Event().wait()
{MAIN}"""
"""A thread that never ends, as with a tokenizer's regular expression."""
LOOPS = f"""
from app.api.server import Server
async def drain(self):
    while True:
        pass
Server.drain = drain
{MAIN}"""
HOLDS = f"""
import asyncio, re, threading
from app.api.server import Server
async def drain(self):
    threading.Thread(target=re.match, args=("(a+)+b", "a" * 64)).start()
    await asyncio.sleep(0.1)
Server.drain = drain
from app.api import process
process._MAX_STOP_SECONDS = 0.5
{MAIN}"""
"""A C call that never ends and holds the interpreter."""


def leave_work_behind(url: str) -> None:
    """Ask for something that a thread never finishes, and leave."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/tokenize", json=ASK, timeout=0.5)


@pytest.mark.parametrize("main", [WORKS, LOOPS], ids=["a thread works", "the event loop is busy"])
def test_a_second_signal_ends_the_server_and_a_deaf_engine_whatever_works(script, model_folder, main):
    with Process(script, model_folder, main=main) as process:
        url = process.read_url()
        engine = Path("/proc", str(script.see("started")["pid"]), "stat")
        script.order("ready", info=script.info)
        process.read_until("ready: ")
        script.order("sleep", seconds=10 * PATIENCE)
        if main == WORKS:
            leave_work_behind(url)
        process.popen.send_signal(signal.SIGTERM)
        process.read_until("stopping: SIGTERM")
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 1
        assert "stopped by a second signal" in "".join(process.lines())
    assert not list(script.folder.glob("dflash-*"))
    until(lambda: not engine.exists() or engine.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_drain_ends_the_server_although_a_thread_works(script, model_folder):
    main = WORKS.replace("sys.exit(run", "process._GRACEFUL_SECONDS = 0.5\nsys.exit(run")
    with Process(script, model_folder, main=main) as process:
        leave_work_behind(process.ready())
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "stopped" in "".join(process.lines())
    assert not list(script.folder.glob("dflash-*"))


def test_one_signal_ends_a_server_whose_interpreter_is_never_given_back(script, model_folder):
    with Process(script, model_folder, shutdown_timeout=0.2, main=HOLDS) as process:
        process.ready()
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 1
        assert "most recent call first" in "".join(process.lines())


def test_for_the_drain_delay_ready_says_503_and_requests_are_taken(script, model_folder, background):
    with Process(script, model_folder, settings=f"drain_delay={10 * PATIENCE}") as process:
        url = process.ready()
        process.popen.send_signal(signal.SIGTERM)
        process.read_until("stopping: SIGTERM, draining ")
        ready = httpx.get(f"{url}/ready", timeout=PATIENCE)
        assert ready.status_code == 503 and ready.json() == {"status": "draining"} and "retry-after" in ready.headers
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        script.plan([*ids(model_folder, "fine"), 2])
        answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE)
        assert answer.json()["choices"][0]["text"] == "fine"
        assert answer.headers["connection"] == "close"
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 1
        assert "running requests get" not in "".join(process.lines())


@pytest.mark.parametrize("delay", [0, 0.5])
def test_after_the_drain_delay_the_server_finishes_what_runs_and_exits_0(script, model_folder, background, delay):
    with Process(script, model_folder, settings=f"drain_delay={delay}") as process:
        url = process.ready()
        running = background.submit(lambda: httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE))
        request_id = script.see("Submit")["request_id"]
        process.popen.send_signal(signal.SIGTERM)
        for word in ("draining 0.5 s", "1 running requests get") if delay else ("1 running requests get",):
            process.read_until(word)
        assert httpx.get(f"{url}/ready", timeout=PATIENCE).json()["status"] == "draining"
        assert httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE).status_code == 503
        script.emit(request_id, [*ids(model_folder, "done"), 2])
        assert running.result().json()["choices"][0]["text"] == "done"
        assert process.wait() == 0


def test_the_log_says_where_a_server_on_all_addresses_can_be_reached(script, model_folder):
    with Process(script, model_folder, settings="host='0.0.0.0'") as process:
        line = process.read_until("starting on")
        assert re.search(r" on http://127\.0\.0\.1:\d+ and on every other address$", line), line


@pytest.mark.parametrize("hears_nothing", [False, True])
def test_sigterm_while_loading_exits_0_at_once_even_if_the_engine_hears_nothing(script, model_folder, hears_nothing):
    with Process(script, model_folder, settings=f"drain_delay={10 * PATIENCE}") as process:
        process.read_url()
        script.see("started")
        if hears_nothing:
            script.order("sleep", seconds=10 * PATIENCE)
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_user_error_of_the_engine_ends_the_server_with_its_reason(script, model_folder):
    waits = f"from app.engine_client import link\nlink._LAST_WORDS_SECONDS = {PATIENCE}"
    with Process(script, model_folder, main=f"{waits}\n{MAIN}") as process:
        process.read_url()
        script.see("started")
        script.order("fatal", reason="no such device: npu:9", user_error=True)
        assert process.wait() == 2
        said = "".join(process.lines())
    assert "error: no such device: npu:9\n" in said and said.count("no such device") == 1, "told once"


def test_the_engine_ends_with_its_parent(process, script):
    """stdin of the engine closes however the parent dies, so no engine is ever left behind."""
    process.ready()
    process.popen.kill()
    process.wait()
    assert script.see("orphaned")


def test_the_setting_says_how_long_an_engine_may_be_silent(script, model_folder):
    with Process(script, model_folder, step_timeout=0.5) as process:
        url = process.ready()
        answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE)
        assert "no step result within 0.5 s" in answer.json()["error"]["message"]
        assert script.see("started")


def test_a_port_in_use_is_one_clear_line_and_exit_1(script, model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process(script, model_folder, port) as process:
            assert process.wait() == 1
            said = "".join(process.lines())
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
    with socket.create_server(("127.0.0.1", 0)) as taken, Process(script, folder, taken.getsockname()[1]) as process:
        assert process.wait() == 2
        said = "".join(process.lines())
    assert said.count("\n") == 1 and name in said


def test_a_chat_template_that_is_no_file_is_one_clear_line_and_exit_2(script, model_folder):
    with Process(script, model_folder, settings="chat_template='chatml'") as process:
        assert process.wait() == 2
        said = "".join(process.lines())
    assert said.count("\n") == 1 and "--chat-template chatml is no file" in said


def test_a_tokenizer_larger_than_the_model_is_warned_of_at_start(script, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    (folder / "config.json").write_text('{"vocab_size": 100}')
    with Process(script, folder) as process:
        line = process.read_until("config.json")
    assert "tokenizer.json" in line and "99" in line


class Stream:
    """A streamed request on a connection of its own, which may serve others before and after."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.connection = socket.create_connection((host, int(port)), timeout=PATIENCE)

    def ask(self, **fields: object) -> None:
        body = json.dumps(ASK | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.connection.sendall(head.encode() + body)

    def read_to_end(self) -> str:
        """Until the server closes the connection."""
        with self.connection:
            return b"".join(iter(lambda: self.connection.recv(65536), b"")).decode()


def test_sigterm_finishes_64_streams_and_refuses_what_comes_then(process, script, model_folder):
    url = process.ready(max_num_seqs=64)
    streams = [Stream(url) for _ in range(64)]
    for stream in streams:
        stream.ask(stream=True, max_tokens=100)
    request_ids = [script.see("Submit")["request_id"] for _ in streams]
    hello, world = ids(model_folder, "hello "), [*ids(model_folder, "world"), 2]
    for request_id in request_ids[:32]:  # The other half has not begun.
        script.emit(request_id, hello)
    waiting = Stream(url)  # A connection that is open and idle, as proxies keep them.
    process.popen.send_signal(signal.SIGTERM)
    process.read_until("running requests get")  # Until then a request is taken.
    waiting.ask()
    refused = waiting.read_to_end()
    assert refused.startswith("HTTP/1.1 503") and "engine_draining" in refused
    assert "connection: close" in refused.lower() and "retry-after" in refused.lower()
    for request_id in request_ids:
        script.emit(request_id, world)
    answers = [stream.read_to_end() for stream in streams]
    assert all('"finish_reason":"stop"' in answer and "data: [DONE]" in answer for answer in answers)
    assert sum("hello" in answer for answer in answers) == 32 and all("world" in answer for answer in answers)
    assert process.wait() == 0


def test_what_is_not_done_in_time_ends_with_an_error_and_the_exit_code_is_0(script, model_folder):
    with Process(script, model_folder, shutdown_timeout=0.2) as process:
        stream = Stream(process.ready())
        stream.ask(stream=True)
        script.emit(script.see("Submit")["request_id"], ids(model_folder, "hello"))
        process.popen.send_signal(signal.SIGTERM)
        answer = stream.read_to_end()
        assert "shut down before the request was done" in answer
        assert "[DONE]" not in answer and '"finish_reason":"stop"' not in answer
        assert process.wait() == 0


def test_an_engine_that_dies_again_and_again_ends_the_server_with_its_reason(process, script):
    process.read_url()
    for _ in range(3):
        script.ready()
        script.order("die", code=7)
    assert "exit code 7" in process.read_until("error: ")
    assert process.wait() == 1


READ_ONLY = "/proc"  # Where not even root may make a file.


@pytest.mark.parametrize("shared_memory", [True, False])
def test_on_a_read_only_file_system_it_serves_from_shared_memory_or_says_what_it_needs(
    script, model_folder, shared_memory
):
    places = f"[{READ_ONLY!r}{', ' + repr(str(script.folder)) if shared_memory else ''}]"
    main = f"from app.engine_client import link\nlink._parents = lambda: {places}\n{MAIN}"
    read_only = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"), READ_ONLY)
    with Process(script, model_folder, main=main, cwd=Path(READ_ONLY), PYTHONPATH=str(ROOT), **read_only) as process:
        url = process.read_url()
        if shared_memory:
            script.ready()
            process.read_until("ready: ")
            script.plan([*ids(model_folder, "fine"), 2])
            answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=PATIENCE)
            assert answer.json()["choices"][0]["text"] == "fine"
            process.popen.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        else:
            assert "Set TMPDIR" in process.read_until("error: ")
            assert process.wait() == 2


@pytest.mark.parametrize(("of_one", "most"), [(9, 4), (3, 3)])
def test_the_settings_of_the_door_reach_it(script, model_folder, of_one, most):
    settings = f"max_queue=2, max_concurrency_per_key={of_one}, request_timeout=0.2"
    with Process(script, model_folder, settings=settings) as process:
        url = process.ready(max_num_seqs=2)
        refused = httpx.post(f"{url}/v1/completions", json=ASK | {"n": 5}, timeout=PATIENCE).json()
        assert f"at most {most} may come" in refused["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json=ASK | {"n": most}, timeout=PATIENCE).status_code == 504


def test_no_key_is_told_to_the_engine_or_to_the_log(script, model_folder, tmp_path):
    (tmp_path / "keys").write_text("filed-key\n")
    keys = ("given-key", "filed-key", "admin-key")
    file = f"__import__('pathlib').Path({str(tmp_path / 'keys')!r})"
    settings = f"api_key=['given-key'], admin_key=['admin-key'], api_key_file={file}, log_level='debug'"
    with Process(script, model_folder, settings=settings) as process:
        url = process.read_url()
        started = json.dumps(script.see("started"))
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 401
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE).status_code == 200
        process.popen.terminate()
        process.wait()
        log = (script.folder / "log").read_text()
    assert "401" in log and not [key for key in keys if key in log + started]


def test_the_end_runs_what_was_left_for_it() -> None:
    """Such as the removal of a temporary folder."""
    program = "import atexit; from app.api import process; atexit.register(print, 'removed'); process._exit(3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (3, "removed\n")
