"""A report where time is dear: mistakes are refused before it begins, and a bad disk costs no measurement."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app import cli
from app.config.error import ConfigError
from app.engine.cuda import host_probes
from app.engine.device.probe import Finding, failed, ok
from tests import ROOT
from tests.costs import fast_ones
from tools.lab.random_weights import NAMES
from tools.report import command, part, runner
from tools.report.part import Options
from tools.report.runner import Program

ANSWERS = """
import json
print(json.dumps({"chip": "a GPU", "parts": ["one"]}))
print(json.dumps({"name": "one", "status": "ok", "result": {"found": "seven"}}))
"""
HANGS = """
import json, os, sys, time
print(json.dumps({"chip": "a GPU", "parts": ["one"]}), flush=True)
print(os.getpid(), file=sys.stderr, flush=True)
time.sleep(600)
"""


def section(program: str) -> Program:
    return Program((sys.executable, "-P", "-c", program), 600.0, 600.0)


def write(folder: Path, *names: str) -> int:
    return runner.report("cuda:0", folder, dict.fromkeys(names, section(ANSWERS)), name="gpu-report")


def no_room(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the disk be full after some files."""
    own, written = Path.write_text, list[Path]()

    def write_text(path: Path, text: str, encoding: str | None = None) -> int:
        written.append(path)
        own(path, text[: len(text) // 2] if len(written) > after else text, encoding)
        if len(written) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(text)

    monkeypatch.setattr(Path, "write_text", write_text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--sections speed", "--sections speed: there is none"),
        ("--rounds 0", "--rounds: invalid count value: '0'"),
        ("--concurrency 1 -3", "-3"),
        ("--prompt 0", "--prompt: invalid"),
        ("--answer x", "--answer: invalid"),
        ("--seconds -5", "--seconds: "),
        ("--model qwen3-8c", "--model qwen3-8c: there is neither such a name nor such a file"),
        ("--device gpu", "--device gpu: a report is on npu or cuda"),
        ("--device npu:x", "--device npu:x: a report is on npu or cuda"),
        ("--device npu:1 --model qwen3-4b --rounds 2", "--model, --rounds: only a report on a GPU takes this"),
        ("here", "here"),
        ("--bogus", "--bogus"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_is_measured(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "report", lambda *_, **__: pytest.fail("it was measured"))
    device = [] if "--device" in flags else ["--device", "cuda"]
    assert command.main([*device, *flags.split(), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ") and said in told.err and "\nhint: " in told.err and told.out == ""
    assert not (tmp_path / "out").exists()


def test_a_report_asks_for_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2 and "--device" in capsys.readouterr().err
    assert command.parse(["--device", "npu:1"])[0].device == "npu:1"


def test_the_names_of_models_are_the_laboratorys() -> None:
    assert command.NAMES == NAMES and set(part.MODELS) - {part.REAL_PAIR} < set(NAMES)


@pytest.mark.parametrize(
    ("build", "available", "compiler", "said"),
    [
        (None, False, ok("gcc"), "it knows no GPUs"),
        ("13.0", False, ok("gcc"), "sees none here"),
        ("13.0", True, failed("there is no C compiler", "install gcc"), "there is no C compiler"),
        ("13.0", True, failed("Triton is not installed", "pip install triton"), "Triton is not installed"),
    ],
)
def test_a_host_that_cannot_make_a_report_says_what_is_missing(
    build: str | None,
    available: bool,
    compiler: Finding,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(host_probes, "compiler", lambda: compiler)
    assert command.main(["--device", "cuda"]) == 2
    error, hint, *rest = capsys.readouterr().err.splitlines()
    assert error.startswith("error: gpu-report needs a CUDA GPU") and said in error
    assert hint.startswith("hint: ") and len(hint) > 10 and not rest


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(host_probes, "compiler", lambda: ok("gcc"))
    command.check_gpu(Options("cuda:1"))
    with pytest.raises(ConfigError, match="--device cuda:2, but there are 2"):
        command.check_gpu(Options("cuda:2"))


def test_a_command_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setitem(cli.COMMANDS, "check", lambda arguments: missing("pydantic"))
    assert cli.main(["check"]) == 2 and "error: pydantic is not installed\nhint: " in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "check", lambda arguments: missing("app.nothing"))
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        cli.main(["check"])


def test_an_earlier_report_in_the_folder_is_kept_and_the_two_do_not_mix(tmp_path: Path, capsys: Any) -> None:
    assert write(tmp_path, "speeds") == 0
    os.utime(tmp_path / "gpu-report.json", (1e9, 1e9))
    os.utime(tmp_path / "gpu-report.md", (1e9, 1e9))
    before = {suffix: (tmp_path / f"gpu-report.{suffix}").read_text() for suffix in ("json", "md")}
    assert write(tmp_path, "roofline") == 0
    for suffix, text in before.items():
        assert (tmp_path / f"gpu-report-20010909-014640.{suffix}").read_text() == text
    assert list(json.loads((tmp_path / "gpu-report.json").read_text())["sections"]) == ["roofline"]
    assert "Speeds" not in (tmp_path / "gpu-report.md").read_text()
    assert "an earlier report is kept: " in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_another_report_writes_to_is_refused(tmp_path: Path) -> None:
    assert write(tmp_path, "speeds") == 0
    found = sorted((file.name, file.read_text()) for file in tmp_path.iterdir())
    with runner.alone(tmp_path), pytest.raises(ConfigError, match="another report is being written there"):
        write(tmp_path, "speeds")
    assert sorted((file.name, file.read_text()) for file in tmp_path.iterdir()) == found
    assert write(tmp_path, "speeds") == 0


def test_a_file_system_without_locks_takes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(runner.fcntl, "flock", refuse)
    assert write(tmp_path, "speeds") == 0


def test_a_disk_that_fills_up_ends_no_measurement_and_the_output_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_room(monkeypatch, after=4)
    assert write(tmp_path, "speeds", "roofline") == 1
    told = capsys.readouterr()
    assert "## Speeds" in told.out and "## Roofline" in told.out and told.out.count("| one | ok |") == 2
    assert told.err.count("No space left on device; the report goes on") == 1
    assert told.err.splitlines()[-1].endswith("only the output above has it")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu-report.json", "gpu-report.md"], "no half file"
    assert json.loads((tmp_path / "gpu-report.json").read_text())["report"] == "gpu-report"


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "check_gpu", lambda options: None)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert command.main(["--device", "cuda", "--out", str(folder)]) == 2
        assert f"error: --out {folder}: " in capsys.readouterr().err
    no_room(monkeypatch, after=0)
    assert command.main(["--device", "cuda", "--out", str(tmp_path / "full")]) == 2
    told = capsys.readouterr().err
    assert "full: No space left on device\nhint: give a folder that this user may write to, on a disk with room" in told


@pytest.mark.parametrize("name", fast_ones(["SIGTERM", "SIGHUP", "SIGINT"], ("SIGTERM",)))
def test_a_report_that_is_ended_leaves_no_process_on_the_device(tmp_path: Path, name: str) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom tools.report import runner\n"
        f"hangs = runner.Program((sys.executable, '-P', '-c', {HANGS!r}), 600.0, 600.0)\n"
        f"sys.exit(runner.report('cuda', Path({str(tmp_path)!r}), {{'speeds': hangs}}, name='gpu-report'))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    child = next(int(line) for line in process.stderr if line.strip().isdigit())
    process.send_signal(getattr(signal, name))
    code = process.wait(timeout=600)
    process.stderr.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    assert code == 130
    assert json.loads((tmp_path / "gpu-report.json").read_text())["sections"]["speeds"]["parts"] == []


def test_a_report_names_the_commit_of_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def run(line: list[str], **_: Any) -> Any:
        asked.append(line)
        return SimpleNamespace(stdout="abc1234-dirty\n")

    monkeypatch.setattr(command.subprocess, "run", run)
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.versions()["commit"] == "abc1234-dirty" and str(tmp_path) in asked[0]
    monkeypatch.setattr(command, "ROOT", tmp_path / "installed")
    assert command.versions()["commit"] == "unknown"
