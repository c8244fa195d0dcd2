"""`python -m tools.report --device cuda` without a GPU: floors, pages, processes that break or hang, and what it needs.

Its checks of kernels are tested in tests/devices/cuda."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.messages import SpecStep, StepOutput, StepStats, TokenDelta
from tests import ROOT
from tests.fast.check.patient import HANG, Patient
from tests.fast.tools.tiny import TINY
from tools.lab import expected, floors, gemms, stages
from tools.lab.floors import Load
from tools.lab.random_weights import TARGETS, draft_for
from tools.lab.speeds import headline
from tools.lab.timed import timed
from tools.report import command, page, runner
from tools.report.page import PUBLISHED
from tools.report.roofline import H200
from tools.report.runner import Program
from tools.report.sections import SECTIONS

NOT_ON_A_BARE_IMAGE = (
    "msgspec zmq pydantic fastapi prometheus_client rich httpx transformers tokenizers huggingface_hub".split()
)


@pytest.fixture(scope="module")
def target() -> DecoderConfig:
    return target_config(TARGETS["qwen3-8b"])


@pytest.fixture(scope="module")
def draft(target: DecoderConfig) -> DFlashConfig:
    return draft_config(draft_for(TARGETS["qwen3-8b"]), target)


# Floors


def test_a_plain_step_reads_the_weights_once_and_every_tokens_kv(target: DecoderConfig) -> None:
    """8.19 billion weights, 0.62 of which are the embedding, that no step reads; 144 KiB of KV a token."""
    step = floors.forward(target, 1, 1, 1024, logits=1)
    assert step.read == pytest.approx(2 * (8.19e9 - 0.62e9) + 1024 * (144 << 10), rel=0.005)
    assert floors.step_seconds(target, None, Load(1, 512, 1024)) == pytest.approx(3.55e-3, rel=0.02)


def test_a_block_of_one_sequence_costs_its_reads_and_of_many_its_operations(
    target: DecoderConfig, draft: DFlashConfig
) -> None:
    assert floors.forward(target, 16, 1, 1024, logits=16).seconds == pytest.approx(3.55e-3, rel=0.02)
    many = floors.forward(target, 512, 32, 1024, logits=512)
    assert many.seconds == many.operations / H200.flops > many.read / H200.bandwidth
    assert floors.step_seconds(target, draft, Load(32, 512, 1024)) > many.seconds


def test_the_floors_of_the_published_load_leave_room_for_the_targets(
    target: DecoderConfig, draft: DFlashConfig
) -> None:
    for concurrency, plain, drafted in ((1, 200, 1000), (32, 5000, 10000)):
        load = Load(concurrency, 512, 1024)
        tokens = concurrency * load.answer
        assert tokens / floors.run_seconds(target, None, load, 6.36) > plain
        assert tokens / floors.run_seconds(target, draft, load, 6.36) > drafted


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


def speed(**changed: Any) -> dict[str, Any]:
    row = {"way": "full blocks", "concurrency": 1, "tok/s": 900.0, "rounds": [890.0, 910.0], "floor tok/s": 1500.0}
    row |= {"share of floor": 0.6, "step ms": 7.0, "floor of step ms": 4.2, "share of step's floor": 0.6}
    row |= {"target": 1000, PUBLISHED: 681} | changed
    return row | {"found": headline(row["tok/s"], row["floor tok/s"], row["target"], row[PUBLISHED])}


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
    speeds = [speed(), speed(concurrency=32, target=None, **{PUBLISHED: None})]
    names = ["full blocks at 1", "full blocks at 32"]
    sections = {
        "operators": section(checks),
        "speeds": section(f"[(name, lambda row=row: row) for name, row in zip({names}, {speeds})]"),
    }
    code, report = write(sections, tmp_path / "report")
    page = (tmp_path / "report" / "gpu-report.md").read_text()
    for said in (
        "# gpu-report: a GPU",
        "- Operators: 1 ok, 1 failed (silu)\n",
        "full blocks at 1: 900 tok/s, target 1000: MISSED, 60% of the floor's 1500, "
        "published (different workload): 681; ",
        "full blocks at 32: 900 tok/s, no target, 60% of the floor's 1500\n",
        "| silu | [2] | 0.5 | **NO** |",
        "| target | published (different workload) |",
        "DIFFERENT WORKLOAD",
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
            first = {"name": "first", "status": "ok", "seconds": 1.0, "result": speed()}
            return Told(clock, [{"chip": "a GPU", "parts": ["first", "second", "third"]}, first])

    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "LineProcess", Process)
    tells = Program((), part=30.0, whole=4.0)
    code, report = write({"speeds": tells, "equality": tells, "prefill": tells}, tmp_path, limit=8.0)
    assert clock.seconds == 8.0
    for name in ("speeds", "equality"):
        first, *others = report["sections"][name]["parts"]
        assert first["result"] == speed()
        assert [(part["name"], part["status"]) for part in others] == [("second", "not tried"), ("third", "not tried")]
    assert [part["status"] for part in report["sections"]["prefill"]["parts"]] == ["not tried"] and code == 0
    page = (tmp_path / "gpu-report.md").read_text()
    assert "- Speeds: 1 ok, 2 not tried (second, third); first: 900 tok/s" in page
    assert "- Prefill: 1 not tried (prefill)" in page and "| prefill | not tried | no time was left |" in page
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
    limits = [(section.part, section.whole) for section in sections.values()]
    assert runner.GPU_SECONDS < 8 * 60 and all(part <= whole for part, whole in limits)
    assert runner.GPU_SECONDS - sum(whole for _, whole in limits[:3]) > 120
    assert list(sections)[3] == "speeds" and command.about(command.Options("cuda"))["limit"] == runner.GPU_SECONDS


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("device", "name"), [("cuda", "operators"), ("cuda:0", "operators"), ("cuda", "speeds")])
def test_without_a_gpu_a_sections_process_says_in_its_line_why_it_has_no_parts(
    tmp_path: Path, device: str, name: str
) -> None:
    pytest.importorskip("triton")
    section = command.sections(command.Options(device))[name]._replace(part=600.0, whole=6000.0)
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


def test_the_options_reach_the_process_of_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path, list[str]]] = []

    def noted(device: str, folder: Path, sections: dict[str, Program], **about: Any) -> int:
        asked.append((device, folder, [*sections["speeds"].command[-2:]]))
        return 0

    monkeypatch.setattr(runner, "report", noted)
    monkeypatch.setattr(command, "check_gpu", lambda options: None)
    flags = ["--concurrency", "1", "8", "--prompt", "9", "--answer", "7", "--rounds", "2", "--model", "qwen3-4b"]
    assert command.main(["--device", "cuda", *flags]) == 0
    assert asked[0][:2] == ("cuda", Path("gpu-report"))
    wishes = {"device": "cuda", "model": "qwen3-4b", "concurrency": [1, 8], "prompt": 9, "answer": 7, "rounds": 2}
    wishes |= {"sections": [], "seconds": None, "triton_cache": None}
    assert asked[0][2] == ["speeds", json.dumps(wishes)]


def test_sections_that_are_named_are_made_in_that_order_within_the_seconds_given() -> None:
    options, _ = command.parse(["--device", "cuda", "--sections", "profile,speeds,gemm", "--seconds", "480"])
    assert list(command.sections(options)) == ["profile", "speeds", "gemm"]
    assert command.about(options)["limit"] == 480.0


def test_the_verdict_is_the_end_of_the_output_and_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = f"('one', lambda: {{'found': {'x' * 9000!r}, 'cases': [{{'a': 1}}] * 50}})"
    _, report = write({"speeds": section(f"[{long}]"), "gemm": section(f"[{long}]")}, tmp_path)
    out = capsys.readouterr().out
    end = page.verdict(report)
    assert out.endswith(f"{end}\n") and len(end) <= page.VERDICT_CHARS and "Gemm: 1 ok; one: xxx" in end


@pytest.mark.exhaustive
def test_engines_are_built_compared_and_timed_on_a_bare_image(tmp_path: Path) -> None:
    """On a CPU, where graphs are steps that are run again, and overlap by a double."""
    pytest.importorskip("triton")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    done = run(
        "import json\n"
        "import time\n"
        "from tools.lab import equality, speeds as ways\n"
        "from tools.lab.floors import Load\n"
        f"model = {str(tmp_path / 'tiny.json')!r}\n"
        "from tests.fast.engine.device_lengths import device_lengths\n"
        "with device_lengths():\n"
        "    equal = [part.run() for part in equality.parts_of(model, 'cpu', answer=10)]\n"
        "    loads = [Load(1, 8, 20), Load(2, 8, 20)]\n"
        "    timed = ways.parts_of(model, loads, 'cpu', 2, time.monotonic() + 600)\n"
        "    speeds = [part.run() for part in timed]\n"
        "    speeds += [ways.parts_of(model, loads, 'cpu', 2, 0.0)[0].run()]\n"
        "print(json.dumps([equal, speeds]))\n"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    equal, speeds = json.loads(done.stdout)
    assert [row.get("passed") for row in equal] == [None, True, None, True, None, True, True, None, True, None, True]
    assert all(row["of"] == 6 * 10 and row.get("tokens alike", 6 * 10) == 6 * 10 for row in equal)
    *speeds, hurried = speeds
    ways = ("plain", "full blocks", "auto")
    assert [(row["way"], row["concurrency"]) for row in speeds] == [(w, c) for w in ways for c in (1, 2)]
    assert all(row["tok/s"] > 0 and row["step ms"] > 0 and len(row["rounds"]) == 2 for row in speeds)
    assert all(row["steady tok/s"] > 0 for row in speeds)
    assert all(row["host ms"] > 0 and row["read wait ms"] >= 0 and 0 < row["share of prompts"] < 1 for row in speeds)
    assert {row["expected tok/s"] for row in speeds} == {row["target"] for row in speeds} == {None}, "of no 8B"
    assert [row["acceptance length"] for row in speeds[:2]] == [1, 1] and speeds[2]["acceptance length"] > 3
    assert list(speeds[1]["rows: steps"]) == ["2"] and next(iter(speeds[3]["rows: steps"])) == "32"
    assert speeds[4]["floor tok/s"] >= speeds[2]["floor tok/s"] and speeds[4]["floor of step ms"] is None
    assert len(hurried["rounds"]) == 1, "when time is up"


class Waits:
    """Core of two sequences: a prompt of 1 s, and then steps of 10 ms, whose results are waited for."""

    def __init__(self, waits: Sequence[float], error: str | None = None) -> None:
        self.runner = SimpleNamespace(backend=self)
        self._waits, self._error, self._steps = list(waits), error, 0

    @property
    def has_work(self) -> bool:
        return self._steps <= len(self._waits)

    def add(self, request: Any) -> None:
        return

    def start_download(self, x: Any) -> Any:
        return lambda: time.sleep(self._waits[self._steps - 1])

    def step(self) -> StepOutput:
        stats = StepStats("decode", 0.01, 2, 0, 0, 0, 0, num_decoding=2) if self._steps else None
        if self._steps:
            self.runner.backend.start_download(None)()
        self._steps += 1
        spec = [SpecStep(1, n_verified=3, n_accepted=1)] if stats else []
        deltas = [TokenDelta("a", [1, 2], spec), TokenDelta("b", [1], spec, error=self._error if stats else None)]
        return StepOutput(deltas, stats or StepStats("prefill", 1.0, 2, 0, 0, 0, 0))


def test_a_run_tells_the_hosts_part_the_wait_the_acceptance_and_the_prompts() -> None:
    engine: Any = SimpleNamespace(core=Waits([0.004, 0.002, 0.003]), target=SimpleNamespace(vocab_size=9))
    run = timed(engine, Load(2, 4, 8))
    assert run.tokens == 12 and run.emitted == 9 and run.acceptance_length == 1.5 and run.rows == {8: 3}
    assert run.steps == [10.0] * 3 and run.steady == pytest.approx(300)
    assert all(read >= wait for read, wait in zip(run.reads, (4, 2, 3), strict=True))
    assert run.host_ms == pytest.approx(10 - run.read_ms) and run.of_prompts == 1.0
    assert "start_download" not in vars(engine.core), "as it was"


def test_a_run_in_which_a_request_fails_has_no_speed() -> None:
    engine: Any = SimpleNamespace(core=Waits([0.0], error="out of luck"), target=SimpleNamespace(vocab_size=9))
    with pytest.raises(RuntimeError, match="out of luck"):
        timed(engine, Load(2, 4, 8))


def test_parts_of_the_model_are_all_of_a_step_but_its_gaps() -> None:
    for step in expected.STEPS.values():
        assert sum(step.parts.values()) + step.gaps == pytest.approx(step.step, rel=0.02)


def event(name: str, start: float, us: float = 2.0, device: DeviceType = DeviceType.CUDA) -> Any:
    span = SimpleNamespace(start=10 * start, end=10 * start + us)
    return SimpleNamespace(name=name, time_range=span, device_type=device, self_cpu_time_total=7.0)


def test_kernels_of_a_trace_are_of_the_part_behind_whose_mark_they_begin() -> None:
    """A trace of a GPU has the host's calls too, which are no launches, and its events are in no order."""
    mark = "void at::native::vectorized_elementwise_kernel<2, at::native::{}_kernel_cuda(at::TensorIteratorBase&)>"
    events = [
        event("nvjet_head", 9),
        event("embed", 3),
        event(mark.format("frac"), 2),
        event("cudaGraphLaunch", 1, device=DeviceType.CPU),
        event("first", 0, us=5.0),
        event("Memcpy HtoD", 0),
        event(mark.format("asinh"), 4),
        event("attend", 5),
        event(mark.format("atanh"), 6),
        event("context_rope_and_write", 7),
        event(mark.format("acosh"), 8),
    ]
    parts = ["target", "marks", "draft", "marks", "target", "marks", "context", "marks", "head"]
    found = stages.launches(events, on_gpu=True)
    assert [each.part for each in found] == parts
    assert [each.name for each in found if each.part != "marks"] == [
        "first",
        "embed",
        "attend",
        "context_rope_and_write",
        "nvjet_head",
    ]
    assert [each.us for each in found][:2] == [5.0, 2.0]


def test_each_part_of_a_trace_begins_with_a_method_that_is_there() -> None:
    with stages.marked():
        assert len(stages.BEGINNINGS) == len(stages.MARKS)


def test_a_kernel_that_begins_early_counts_from_the_end_of_the_previous_one() -> None:
    events = [event("product", 0, us=50.0), event("waits", 2, us=20.0), event("norm", 4, us=30.0), event("behind", 8)]
    found = stages.launches(events, on_gpu=True)
    assert [(each.name, each.us) for each in found] == [("product", 50), ("waits", 0), ("norm", 20), ("behind", 2)]


def test_texts_that_differ_are_told_with_the_place_where_they_begin_to() -> None:
    pytest.importorskip("triton")
    from tools.lab import equality

    texts = {"graphs": [[1, 2, 3], [4, 5, 6]], "rerun": [[1, 2, 3], [4, 5, 7]], "same": [[1, 2, 3], [4, 5, 6]]}
    found = equality.compared(equality.Way("graphs"), "rerun", texts.__getitem__)
    assert found["first difference"] == "request 1, token 2" and not found["passed"] and found["tokens alike"] == 5
    assert "first difference" not in equality.compared(equality.Way("graphs"), "same", texts.__getitem__)


def test_the_model_of_products_expects_reads_at_few_rows_and_operations_at_many() -> None:
    """The figures of an 8B's o (34 MB) and gate_up (201 MB)."""
    assert gemms.expected_seconds(33.6e6, 2 * 16 * 4096 * 4096) == pytest.approx(13.0e-6, rel=0.01)
    assert gemms.expected_seconds(201e6, 2 * 512 * 24576 * 4096) == pytest.approx(181e-6, rel=0.01)
