"""`python -m tools.report --device cuda` without a GPU: pages, processes that break or hang, and what it needs.

Its checks of kernels are tested in tests/devices/cuda."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from app.config.engine import EngineConfig
from app.config.pairs import PAIRS
from app.engine.checkpoint.files import find_folder
from app.text.tokenizer import Tokenizer
from tests import ROOT
from tests.fast.check.patient import HANG, Patient
from tests.fast.tools.tiny import TINY
from tools.report import command, page, profile, runner, speeds
from tools.report.part import REAL_PAIR, Options
from tools.report.runner import Program
from tools.report.sections import SECTIONS

NOT_ON_A_BARE_IMAGE = (
    "msgspec zmq pydantic fastapi prometheus_client rich httpx transformers tokenizers huggingface_hub".split()
)


# The report


def write(sections: dict[str, Program], folder: Path, limit: float = 6000.0) -> tuple[int, dict[str, Any]]:
    """(exit code, report)."""
    code = runner.report("cuda:0", folder, sections, name="gpu-report", limit=limit, versions=command.versions())
    return code, json.loads((folder / "gpu-report.json").read_text())


@pytest.fixture(autouse=True)
def as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be slow to start, and to end."""
    monkeypatch.setattr(runner, "START_SECONDS", 600.0)
    monkeypatch.setattr(runner, "END_SECONDS", 900.0)
    monkeypatch.setattr(runner, "LineProcess", Patient)


def section(parts: str, part: float = 600.0, whole: float = 6000.0) -> Program:
    """Return a section whose program makes `parts`, a list of (name, function).

    After a failure the device is usable, unless the failure loses it.
    """
    program = (
        "import json, os, signal, sys, time\n"
        "from tools.report.part import Part\n"
        "from tools.report.section import tell\n"
        "lost = []\n"
        "def fail(says, loses=False):\n"
        "    lost.extend([1] * loses)\n"
        "    raise RuntimeError(says)\n"
        f"def hang(): {HANG}\n"
        "def section_in(file):\n"
        "    sections = {}\n"
        "    while not sections.get('roofline', {}).get('parts'):\n"
        "        time.sleep(0.01)\n"
        "        sections = json.loads(open(file).read())['sections']\n"
        "    return sections['roofline']\n"
        "def end():\n"
        "    print('{', end='', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "skip, left = int(sys.argv[1]), float(sys.argv[2])\n"
        f"make = lambda: ('a GPU', [Part(*part) for part in {parts}])\n"
        "tell(make, skip, lambda line: print(json.dumps(line), flush=True), lambda: not lost)\n"
    )
    return Program((sys.executable, "-P", "-c", program), part, whole)


def test_every_section_is_told_and_a_check_that_fails_is_counted(tmp_path: Path, capfd: Any) -> None:
    norm, silu = {"shape": "[1]", "relative": 0.001, "passed": True}, {"shape": "[2]", "relative": 0.5, "passed": False}
    checks = f"[('norm', lambda: {{'cases': [{norm}]}}), ('silu', lambda: {{'passed': False, 'cases': [{silu}]}})]"
    speeds = "[('full blocks at 1', lambda: {'found': '900 tok/s', 'tok/s': 900.0, 'rounds': [890.0, 910.0]})]"
    sections = {"operators": section(checks), "speeds": section(speeds)}
    code, report = write(sections, tmp_path / "report")
    page = (tmp_path / "report" / "gpu-report.md").read_text()
    for said in (
        "# gpu-report: a GPU",
        "- Operators: 1 ok, 1 failed (silu)\n",
        "- Speeds: 1 ok; full blocks at 1: 900 tok/s\n",
        "| silu | [2] | 0.5 | **NO** |",
        "| 900 | 890, 910 |",
        "RANDOM WEIGHTS",
        "SIMULATED ACCEPTANCE",
    ):
        assert said in page
    assert code == 1 and report["failed"] == 1
    told = capfd.readouterr()
    assert f"to {tmp_path}/report" in told.err.splitlines()[0] and told.out.startswith("# gpu-report")


def test_a_part_that_raises_dies_or_hangs_has_failed_and_all_others_are_told(tmp_path: Path) -> None:
    """Also if the device is lost with it, like after an illegal access."""
    row = "lambda: {}"
    breaks = ["lambda: fail('out of luck')", "lambda: fail('illegal access', True)", "end", "hang"]
    runs = [row, breaks[0], row, breaks[1], row, breaks[2], row, breaks[3], row]
    operators = section(f"zip('abcdefghi', [{', '.join(runs)}])")
    broken = Program((sys.executable, "-c", "raise SystemExit(3)"), 600.0, 600.0)
    code, report = write({"operators": operators, "equality": broken, "speeds": section("[]")}, tmp_path)
    parts = report["sections"]["operators"]["parts"]
    assert "".join(part["name"] for part in parts) == "abcdefghi"
    assert [part["name"] for part in parts if part["status"] == "failed"] == list("bdfh")
    assert [part["error"]["says"] for part in parts if "error" in part] == [
        "RuntimeError: out of luck",
        "RuntimeError: illegal access",
        "its process was killed by SIGSEGV",
        "its process did not answer in time, and was ended",
    ]
    page = (tmp_path / "gpu-report.md").read_text()
    assert "- Operators: 5 ok, 4 failed (b, d, f, h)" in page
    assert "| f | failed | its process was killed by SIGSEGV |" in page
    assert "| start | failed | its process ended with exit code 3 |" in page and "Traceback" not in page
    assert "in fail" in parts[1]["error"]["traceback"]
    assert code == 1 and report["failed"] == 5


def test_a_process_that_cannot_even_be_killed_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        async def line(self, seconds: float) -> bytes:
            return b""

        async def end(self) -> str:
            await asyncio.sleep(600)
            return ""

    monkeypatch.setattr(runner, "END_SECONDS", 0.05)
    assert asyncio.run(runner._line(Stuck(), 1.0)) == ({}, "could not be ended")  # type: ignore[arg-type]


SPEED = {"found": "900 tok/s", "tok/s": 900.0}


class Clock:
    """Moved by the processes that are read, and by nothing else."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Told:
    """A section's process that says each line a second after the one before, and then nothing."""

    def __init__(self, clock: Clock, lines: list[dict[str, Any]]) -> None:
        self._clock = clock
        self._lines = lines

    async def line(self, seconds: float) -> bytes:
        if not self._lines or seconds < 1:
            self._clock.seconds += seconds
            return b""
        self._clock.seconds += 1
        return json.dumps(self._lines.pop(0)).encode() + b"\n"

    async def end(self) -> str:
        return "did not answer in time, and was ended"


def test_when_a_sections_time_is_up_it_is_ended_and_when_all_is_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    class Process:
        @staticmethod
        async def start(command: Sequence[str]) -> Told:
            first = {"name": "first", "status": "ok", "seconds": 1.0, "result": SPEED}
            return Told(clock, [{"chip": "a GPU", "parts": ["first", "second", "third"]}, first])

    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "LineProcess", Process)
    tells = Program((), part=30.0, whole=4.0)
    code, report = write({"speeds": tells, "equality": tells, "roofline": tells}, tmp_path, limit=8.0)
    assert clock.seconds == 8.0
    for name in ("speeds", "equality"):
        first, *others = report["sections"][name]["parts"]
        assert first["result"] == SPEED
        assert [(part["name"], part["status"]) for part in others] == [("second", "not tried"), ("third", "not tried")]
    assert [part["status"] for part in report["sections"]["roofline"]["parts"]] == ["not tried"] and code == 0
    page = (tmp_path / "gpu-report.md").read_text()
    assert "- Speeds: 1 ok, 2 not tried (second, third); first: 900 tok/s" in page
    assert "- Roofline: 1 not tried (roofline)" in page and "| roofline | not tried | no time was left |" in page
    assert page.count("| third | not tried |") == 2


def test_what_a_part_has_told_is_written_while_the_next_one_runs(tmp_path: Path) -> None:
    file = tmp_path / "gpu-report.json"
    parts = f"[('one', lambda: {{'what': 'one'}}), ('two', lambda: section_in({str(file)!r}))]"
    _, report = write({"roofline": section(parts)}, tmp_path)
    one, two = report["sections"]["roofline"]["parts"]
    assert two["result"]["parts"] == [one] and one["result"] == {"what": "one"}


def test_all_of_it_takes_less_than_eight_minutes() -> None:
    """Whatever hangs, there is time for what comes behind the checks."""
    sections = SECTIONS["cuda"]
    limits = [(section.part_seconds, section.all_seconds) for section in sections.values()]
    assert runner.GPU_SECONDS < 8 * 60 and all(part <= whole for part, whole in limits)
    assert runner.GPU_SECONDS - sum(whole for _, whole in limits[:2]) >= 220
    assert list(sections)[2] == "speeds" and command.about(Options("cuda"))["limit"] == runner.GPU_SECONDS


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("device", "name"), [("cuda", "operators"), ("cuda:0", "operators"), ("cuda", "speeds")])
def test_without_a_gpu_a_sections_process_says_in_its_line_why_it_has_no_parts(
    tmp_path: Path, device: str, name: str
) -> None:
    pytest.importorskip("triton")
    section = command.sections(Options(device))[name]._replace(part=600.0, whole=6000.0)
    _, report = write({name: section}, tmp_path)
    (start,) = report["sections"][name]["parts"]
    assert start["name"] == "start" and start["error"]["says"] and "set_device" in start["error"]["traceback"]


# What it needs


def run(program: str) -> subprocess.CompletedProcess[str]:
    """In a source tree, where nothing of NOT_ON_A_BARE_IMAGE can be imported."""
    blocked = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {NOT_ON_A_BARE_IMAGE}:\n"
        "            raise ModuleNotFoundError(name + ' is not on a bare image', name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-P", "-c", blocked + program]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line_and_fails() -> None:
    done = run("from tools.report.command import main\nsys.exit(main(['--device', 'cuda']))")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith("error: gpu-report needs a CUDA GPU") and done.stderr.count("\n") == 2


def test_a_real_pair_that_is_not_there_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check_gpu", lambda options: None)
    out, missing = tmp_path / "out", str(tmp_path / "missing.gguf")
    for target, draft, role in ((missing, "smollm2", "target"), (str(tmp_path), missing, "draft")):
        assert command.main(["--device", "cuda", "--out", str(out), "--real-pair", target, draft]) == 2
        assert capsys.readouterr().err.startswith(f"error: --real-pair: {role} {missing}: ")
    assert not out.exists()


def test_the_options_reach_the_process_of_a_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, Path, list[str]]] = []

    def noted(device: str, folder: Path, sections: dict[str, Program], **about: Any) -> int:
        asked.append((device, folder, [*sections["speeds"].command[-2:]]))
        return 0

    monkeypatch.setattr(runner, "report", noted)
    monkeypatch.setattr(command, "check_gpu", lambda options: None)
    flags = ["--concurrency", "1", "8", "--prompt", "9", "--answer", "7", "--rounds", "2", "--model", "qwen3-4b"]
    pair = [str(tmp_path), "smollm2"]
    assert command.main(["--device", "cuda", *flags, "--real-pair", *pair]) == 0
    assert asked[0][:2] == ("cuda", Path("gpu-report"))
    wishes = {"device": "cuda", "models": ["qwen3-4b", "real pair"], "real_pair": pair}
    wishes |= {
        "concurrency": [1, 8],
        "prompt": 9,
        "answer": 7,
        "rounds": 2,
        "sections": [],
        "seconds": None,
        "dataset": "demo:math",
    }
    assert asked[0][2] == ["speeds", json.dumps(wishes)]


def test_sections_that_are_named_are_made_in_that_order_within_the_seconds_given() -> None:
    options, _ = command.parse(["--device", "cuda", "--sections", "roofline,speeds,step", "--seconds", "480"])
    assert list(command.sections(options)) == ["roofline", "speeds", "step"]
    assert command.about(options)["limit"] == 480.0


def test_the_verdict_is_the_end_of_the_output_and_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = f"('one', lambda: {{'found': {'x' * 9000!r}, 'cases': [{{'a': 1}}] * 50}})"
    _, report = write({"speeds": section(f"[{long}]"), "roofline": section(f"[{long}]")}, tmp_path)
    out = capsys.readouterr().out
    end = page.verdict(report)
    assert (
        out.endswith(f"{end}\n{page.figures(report)}\n")
        and len(end) <= page.VERDICT_CHARS
        and "Roofline: 1 ok; one: xxx" in end
    )


def test_wrong_results_come_first_and_predictions_with_what_was_measured_last() -> None:
    wrong = {"name": "norm", "status": "failed", "result": {"cases": [{"shape": "[2]", "passed": False}]}}
    broken = {"name": "rope", "status": "failed", "result": {}, "error": {"says": "its process ended"}}
    speed = {"name": "qwen3-8b, plain at 1", "status": "ok", "result": {"tok/s at the mean length": 107.0}}
    sections = {"operators": {"parts": [wrong, broken]}, "speeds": {"parts": [speed]}}
    about = {"report": "gpu-report", "server": "v", "time": "now", "device": "cuda", "failed": 2}
    told = page.page(about | {"sections": sections})
    first, *_, last = told.split("\n## ")[1:]
    assert first.startswith("Wrong\n") and "| operators | norm | - | [2] | **NO** |" in first
    assert "| operators | rope | its process ended |" in first and "speeds" not in first.split("The CUDA code")[0]
    assert last.startswith("Figures\n")
    assert "| qwen3-8b, plain at 1: tok/s at the mean length | 214 | model | 107 | 0.5 |" in last
    assert "| qwen3-8b, plain at 32: tok/s at the mean length | 5315 | model | - | - |" in last
    assert "## Wrong" not in page.page(about | {"sections": {"speeds": {"parts": [speed]}}})


def test_the_page_of_cuda_has_the_predictions() -> None:
    lines = page.figures({"sections": {}}).splitlines()
    told = "\n".join("|".join([*line.split("|")[:4], ""]) for line in lines)  # without what is measured
    assert told.startswith("| figure | predicted | by |\n")
    assert told in (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")


def test_the_questions_are_those_of_the_real_pairs_tokenizer() -> None:
    if PAIRS["smollm2"].missing:
        pytest.skip(f"{PAIRS['smollm2'].missing} brings its tokenizer")
    tokenizer = Tokenizer(find_folder("smollm2", "target"))
    questions = json.loads(speeds.QUESTIONS.read_text(encoding="utf-8"))
    assert len(questions) == 32
    for question, ids in questions.items():
        text = tokenizer.chat_template.render([{"role": "user", "content": question}])
        assert list(tokenizer.encode(text, add_special_tokens=False)) == ids


@pytest.mark.exhaustive
def test_the_real_pair_answers_questions_like_its_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, without a tokenizer. Products are not timed, because plain decoding might then choose others."""
    if PAIRS["smollm2"].missing:
        pytest.skip(f"{PAIRS['smollm2'].missing} brings its target")
    monkeypatch.setattr(speeds, "QUESTION_TOKENS", 12)
    monkeypatch.setattr(speeds.profile, "STEPS", 1)
    monkeypatch.setattr(speeds, "EngineConfig", partial(EngineConfig, dtype="float32", tune="off"))
    options = Options("cpu", [REAL_PAIR], ["smollm2", "smollm2"], (4,))
    found = {part.name: part.run() for part in speeds.parts(options, 0.0) if "a step" not in part.name}
    assert list(found) == [f"real pair, {way} at 4" for way in ("plain", "full blocks", "auto")]
    plain, blocks, _ = found.values()
    assert plain["acceptance length"] == 1 and blocks["acceptance length"] > 1.5
    assert blocks["of"] == blocks["texts like plain ones"] == 32


@pytest.mark.exhaustive
def test_engines_are_built_compared_and_timed_on_a_bare_image(tmp_path: Path) -> None:
    """On a CPU, where graphs are steps that are run again, and overlap by a double."""
    pytest.importorskip("triton")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    done = run(
        "import json\n"
        "import time\n"
        "from tools.report import equality, speeds as ways\n"
        "from tools.report.part import Options\n"
        f"model = {str(tmp_path / 'tiny.json')!r}\n"
        "from tests.fast.engine.device_lengths import device_lengths\n"
        "with device_lengths():\n"
        "    tiny = json.loads(open(model).read())\n"
        "    equal = [part.run() for part in equality.parts_of(tiny, equality.WAYS, 'cpu', 10, 'dense')]\n"
        "    ways.PROMPTS, ways.profile.ANSWER = (8, 30), 100\n"
        "    wishes = Options('cpu', [model], (), (1, 2), 8, 20, 2)\n"
        "    timed = {part.name: part.run for part in ways.parts(wishes, time.monotonic() + 600)}\n"
        "    speeds = [run() for name, run in timed.items() if ' at ' in name and 'a step' not in name]\n"
        "    alone = [run() for name, run in timed.items() if 'prompts' in name or 'a step' in name]\n"
        "    speeds += [ways.parts(wishes, 0.0)[0].run()]\n"
        "print(json.dumps([equal, speeds, alone]))\n"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    equal, speeds, (prompts, *steps) = json.loads(done.stdout)
    assert 0 < prompts["8 tokens, ms"] < prompts["30 tokens, ms"] * 10
    assert len(steps) == 2 and all(step["kernels ms"] > 0 for step in steps)
    assert [row.get("passed") for row in equal] == [None, True, None, True, None, True, True, None, True, None, True]
    assert all(row["of"] == 6 * 10 and row.get("tokens alike", 6 * 10) == 6 * 10 for row in equal)
    *speeds, hurried = speeds
    ways = ("plain", "full blocks", "auto")
    assert len(speeds) == len(ways) * 2
    assert all(row["tok/s"] > 0 and row["step ms"] > 0 and len(row["rounds"]) == 2 for row in speeds)
    assert all(row["steady tok/s"] > 0 for row in speeds)
    assert all(0 < row["share of prompts"] < 1 and row["refilled tok/s"] > 0 for row in speeds)
    assert [row["acceptance length"] for row in speeds[:2]] == [1, 1] and speeds[2]["acceptance length"] > 3
    assert list(speeds[1]["rows: steps"]) == ["2"] and next(iter(speeds[3]["rows: steps"])) == "32"
    assert len(hurried["rounds"]) == 1, "when time is up"


def event(name: str, start: float, us: float = 2.0, device: DeviceType = DeviceType.CUDA) -> Any:
    span = SimpleNamespace(start=10 * start, end=10 * start + us)
    return SimpleNamespace(name=name, time_range=span, device_type=device, self_cpu_time_total=7.0)


def test_kernels_of_a_trace_are_in_their_order_without_copies_and_calls_of_the_host() -> None:
    events = [
        event("attend", 5),
        event("cudaGraphLaunch", 1, device=DeviceType.CPU),
        event("first", 0, us=5.0),
        event("Memcpy HtoD", 0),
        event("nvjet_head", 9),
    ]
    found = profile.kernels(events, on_gpu=True)
    assert found == [("first", 5.0), ("attend", 2.0), ("nvjet_head", 2.0)]
    told = profile.table(found, step_ms=0.02)
    assert told["stages ms"]["attention"] == pytest.approx(2e-3 / profile.STEPS)
    assert told["stages ms"]["products"] == pytest.approx(2e-3 / profile.STEPS)
    assert told["stages ms"]["gaps"] == pytest.approx(0.02 - 9e-3 / profile.STEPS)
    assert [case["kernel"] for case in told["cases"]] == ["first", "attend", "nvjet_head"]


def test_a_kernel_that_begins_early_counts_from_the_end_of_the_previous_one() -> None:
    events = [event("product", 0, us=50.0), event("waits", 2, us=20.0), event("norm", 4, us=30.0), event("behind", 8)]
    found = profile.kernels(events, on_gpu=True)
    assert found == [("product", 50), ("waits", 0), ("norm", 20), ("behind", 2)]


def test_texts_that_differ_are_told_with_the_place_where_they_begin_to() -> None:
    pytest.importorskip("triton")
    from tools.report import equality

    texts = {"graphs": [[1, 2, 3], [4, 5, 6]], "rerun": [[1, 2, 3], [4, 5, 7]], "same": [[1, 2, 3], [4, 5, 6]]}
    found = equality.compared(equality.Way("graphs"), "rerun", texts.__getitem__)
    assert found["first difference"] == "request 1, token 2" and not found["passed"] and found["tokens alike"] == 5
    assert "first difference" not in equality.compared(equality.Way("graphs"), "same", texts.__getitem__)
