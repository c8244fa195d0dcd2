"""Compilation while the engine serves: its process fails alone, and ends with the engine."""

import fcntl
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine import cache_folder
from app.engine.compile import later as compile_later
from app.engine.compile import packages as building
from app.engine.compile.later import COMMAND, Compiling
from app.engine.compile.packages import compile_missing, is_compiled, load_kept
from app.engine.device.base import LayerKv

PATIENCE = 600.0


def runner_of(free: int = 1 << 40) -> Any:
    """A runner with a KV pool of 8 GiB, whose memory is not written."""
    part = torch.empty(1 << 30, device="meta")
    return SimpleNamespace(
        forward="forward",
        backend=SimpleNamespace(memory=lambda: (free, free)),
        pools=[SimpleNamespace(all_layers=LayerKv(part, part))],
    )


def ended(compiling: Compiling) -> None:
    until = time.monotonic() + PATIENCE
    while not compiling.take_up():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def compiling(command: str, *, told: list[str] | None = None) -> Iterator[Compiling]:
    found = Compiling(
        runner_of(), "{}", lambda: None if told is None else told.append("end"), [sys.executable, "-c", command]
    )
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("import sys; print('a traceback', file=sys.stderr); sys.exit('no space left')", "exit code 1: no space left"),
        (
            r"raise SystemExit('Error: g++\n\na.cpp:9: fatal Error: no space left\n 9 | }\n   ^\n\nterminated.\n')",
            "exit code 1: a.cpp:9: fatal Error: no space left",
        ),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("raise SystemExit(0)", "it kept other code than is wanted"),
    ],
)
def test_a_process_that_fails_costs_one_line_and_the_engine_goes_on(command, said, caplog, monkeypatch):
    monkeypatch.setattr(compile_later, "load_kept", lambda forward: None)
    monkeypatch.setattr(compile_later, "take_up", None)
    told: list[str] = []
    with compiling(command, told=told) as found, caplog.at_level(logging.WARNING):
        ended(found)
    (line,) = caplog.messages
    assert said in line and line.startswith("no faster code") and told == ["end"]


def test_what_was_compiled_is_taken_up_by_the_thread_that_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(compile_later, "load_kept", lambda forward: [forward])
    monkeypatch.setattr(compile_later, "take_up", lambda runner, compiled: taken.append(compiled))
    command = "import sys; assert sys.stdin.readline() == '{}\\n' and int(sys.argv[1]) > 0"
    with compiling(command) as found:
        found._thread.join(PATIENCE)
        assert not taken
        ended(found)
    assert taken == [["forward"]]


def test_closing_ends_the_process_and_what_it_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(child.pid) + ' ')\n"
        "time.sleep(600)"
    )
    with compiling(code):
        until = time.monotonic() + PATIENCE
        while not (file.exists() and file.read_text().endswith(" ")):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert is_gone(int(file.read_text()))


@pytest.mark.parametrize("beside_kv", [1 << 30, 2 << 30])
def test_no_process_is_started_where_memory_would_run_out(beside_kv: int, caplog: pytest.LogCaptureFixture) -> None:
    """Linux may end the whole container then, whose next start would compile again."""
    with caplog.at_level(logging.INFO):
        ended(Compiling(runner_of((8 << 30) + beside_kv), "{}", lambda: None, [sys.executable, "-c", "exit(3)"]))
    *told, line = caplog.messages
    assert told == ["serving now; faster code is being compiled in the background, about 2 minutes"] * (beside_kv >> 31)
    assert ("exit code 3" if beside_kv >> 31 else "1024 MiB are free after KV, and it takes 1536 MiB") in line


def test_closing_waits_for_code_that_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, done = threading.Event(), threading.Event()

    def load(forward: Any) -> None:
        loading.set()
        time.sleep(0.2)
        done.set()

    monkeypatch.setattr(compile_later, "load_kept", load)
    with compiling("raise SystemExit(0)"):
        assert loading.wait(PATIENCE)
    assert done.is_set()


def test_closing_ends_a_process_that_is_just_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    go, started = threading.Event(), []

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *command: Any, **settings: Any) -> None:
            go.wait(PATIENCE)
            super().__init__(*command, **settings)
            started.append(self)

    monkeypatch.setattr(compile_later, "_END_SECONDS", PATIENCE)
    monkeypatch.setattr("subprocess.Popen", Slow)
    with compiling("import time; time.sleep(600)") as found:
        threading.Timer(0.1, go.set).start()
    assert not found._thread.is_alive() and started[0].returncode == -signal.SIGKILL


def test_kept_code_that_cannot_be_loaded_is_told(tmp_path, monkeypatch, caplog):
    def load(folder: Path) -> None:
        raise RuntimeError("write callback failed\nand a stack of C++")

    kept = SimpleNamespace(package=lambda folder: folder, load=load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "functions", lambda forward: [kept])
    forward: Any = "forward"
    assert load_kept(forward) is None
    assert caplog.messages == ["what earlier starts compiled is made anew: write callback failed"]


@pytest.mark.parametrize("same", [True, False])
def test_a_start_waits_for_a_compiler_of_its_own_priority_alone_and_says_so(tmp_path, monkeypatch, caplog, same):
    """One of the lowest priority may be slow for hours beside busy processes."""
    monkeypatch.setattr(building, "functions", lambda forward: [])
    monkeypatch.setattr("os.nice", lambda more: 5 + more)
    forward: Any = "forward"
    waiting = threading.Thread(target=lambda: compile_missing(forward, tmp_path))
    with (tmp_path / f"lock-{5 if same else 0}").open("w") as lock, caplog.at_level(logging.INFO):
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        until = time.monotonic() + PATIENCE
        while waiting.is_alive() and not caplog.messages:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert caplog.messages == ["another process compiles: this one waits for it"] * same
        assert waiting.is_alive() == same
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_the_process_ends_with_the_engine() -> None:
    with subprocess.Popen([*COMMAND, "0"], stdin=subprocess.PIPE, process_group=0, text=True) as process:
        assert process.stdin is not None
        until, score = time.monotonic() + PATIENCE, Path(f"/proc/{process.pid}/oom_score_adj")
        while score.read_text() != "1000\n":  # where memory runs out, it ends before the engine does
            assert time.monotonic() < until
            time.sleep(0.01)
        process.stdin.write("{}\n")
        process.stdin.close()
        assert process.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.parametrize("has_folder", [True, False])
def test_nothing_is_compiled_behind_ready_where_no_folder_would_keep_it(has_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache_folder, "_owners_above", lambda folder: set() if has_folder else {12345})
    monkeypatch.setattr(building, "why_not", lambda: "")
    backend: Any = SimpleNamespace(compiles=True)
    shape: Any = SimpleNamespace(moe=None, gated_delta=None)

    def compiles(wish: Any) -> bool:
        return is_compiled(EngineConfig(Path("target"), compile=wish), backend, shape, torch.float32)

    with caplog.at_level(logging.INFO):
        assert compiles("auto") is has_folder and compiles(True)
    assert has_folder or "no folder keeps what is compiled" in caplog.text


def test_a_start_goes_on_where_no_folder_can_be_made(tmp_path, monkeypatch, caplog):
    def full(**places: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    forward: Any = "forward"
    assert load_kept(forward) is None and "No space left on device" in caplog.text


def is_gone(pid: int) -> bool:
    """True once a process has ended. Its entry stays until its parent has waited."""
    status, until = Path(f"/proc/{pid}/stat"), time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False
