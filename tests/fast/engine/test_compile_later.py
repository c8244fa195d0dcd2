"""Compilation while the engine serves: its process fails alone, and ends with the engine."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine import cache_folder
from app.engine.build import compile as building
from app.engine.build import compile_later
from app.engine.build.compile import is_compiled, load_kept
from app.engine.build.compile_later import COMMAND, Compiling
from app.engine.dflash.costs import CostTable
from app.engine_config import EngineConfig

PATIENCE = 600.0


def engine() -> Any:
    costs = CostTable([(1, 2.0)], {2: [(1, 1.0)]}, [[(0, 0.0), (1, 0.5)]])
    core = SimpleNamespace(runner=SimpleNamespace(forward="forward"), scheduler=SimpleNamespace(policy=None))
    core.scheduler.policy = SimpleNamespace(costs=costs)
    return SimpleNamespace(core=core)


def ended(compiling: Compiling) -> None:
    until = time.monotonic() + PATIENCE
    while not compiling.take_up():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def compiling(command: str, *, told: list[str] | None = None) -> Iterator[Compiling]:
    found = Compiling(
        engine(), "{}", lambda: None if told is None else told.append("end"), [sys.executable, "-c", command]
    )
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("import sys; print('a traceback', file=sys.stderr); sys.exit('no space left')", "exit code 1: no space left"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("raise SystemExit(0)", "it kept other code than is wanted"),
    ],
)
def test_a_process_that_fails_costs_one_line_and_the_engine_goes_on(
    command: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_later, "load_kept", lambda forward: None)
    monkeypatch.setattr(compile_later, "take_up", None)
    told: list[str] = []
    with compiling(command, told=told) as found, caplog.at_level(logging.WARNING):
        ended(found)
    (line,) = caplog.messages
    assert said in line and line.startswith("forwards run by operators") and told == ["end"]


def test_what_was_compiled_is_taken_up_by_the_thread_that_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of steps are learnt anew. Their process gets the settings, and the number of threads."""
    taken: list[Any] = []
    monkeypatch.setattr(compile_later, "load_kept", lambda forward: [forward])
    monkeypatch.setattr(compile_later, "take_up", lambda runner, compiled: taken.append(compiled))
    command = "import sys; assert sys.stdin.readline() == '{}\\n' and int(sys.argv[1]) > 0"
    with compiling(command) as found:
        costs = found._engine.core.scheduler.policy.costs
        for _ in range(200):
            costs.refine(1, 0, 2, 0, 2.0)
        settled = costs._scales[0]._covariance[0, 0]
        found._thread.join(PATIENCE)
        assert not taken
        ended(found)
    assert taken == [["forward"]] and costs._scales[0]._covariance[0, 0] > 2 * settled


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
def test_nothing_is_compiled_behind_ready_where_no_folder_would_keep_it(
    has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start would compile for a minute, and find nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache_folder, "_owners_above", lambda folder: set() if has_folder else {12345})
    monkeypatch.setattr(building, "can_compile", lambda: True)
    backend: Any = SimpleNamespace(compiles=True)
    shape: Any = SimpleNamespace(moe=None, gated_delta=None)

    def compiles(wish: Any) -> bool:
        return is_compiled(EngineConfig(Path("target"), compile=wish), backend, shape, torch.float32)

    with caplog.at_level(logging.INFO):
        assert compiles("auto") is has_folder and compiles(True)
    assert has_folder or "no folder keeps what is compiled" in caplog.text


def test_a_start_goes_on_where_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
