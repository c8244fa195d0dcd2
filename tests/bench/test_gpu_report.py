"""`bench gpu-report` without a GPU: it says so; its floors, its page and what it needs are right. Its checks of kernels
are tested in tests/cuda."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.bench import gpu_report, gpu_report_page
from app.bench import gpu_report_floor as floor
from app.bench.gpu_report_floor import Load
from app.bench.random_weights import TARGETS, draft_for
from app.engine.decoder_config import DecoderConfig
from app.engine.dflash.config import DFlashConfig
from app.engine.models.qwen3 import qwen3_config
from tests.bench.test_random_weights import TINY

ROOT = Path(__file__).parents[2]
NOT_ON_A_BARE_IMAGE = [
    "msgspec",
    "zmq",
    "pydantic",
    "pydantic_settings",
    "fastapi",
    "prometheus_client",
    "rich",
    "httpx",
]


@pytest.fixture(scope="module")
def target() -> DecoderConfig:
    return qwen3_config(TARGETS["qwen3-8b"])


@pytest.fixture(scope="module")
def draft(target: DecoderConfig) -> DFlashConfig:
    return DFlashConfig.from_json(draft_for(TARGETS["qwen3-8b"]), target)


# Floors


def test_a_plain_step_reads_the_weights_once_and_every_tokens_kv(target: DecoderConfig) -> None:
    """8.19 billion weights, 0.62 of which are the embedding, that no step reads; 144 KiB of KV a token."""
    step = floor.forward(target, 1, 1, 1024, logits=1)
    assert step.read == pytest.approx(2 * (8.19e9 - 0.62e9) + 1024 * (144 << 10), rel=0.005)
    assert floor.step_seconds(target, None, Load(1, 512, 1024)) == pytest.approx(3.55e-3, rel=0.02)


def test_a_block_of_one_sequence_costs_its_reads_and_of_many_its_operations(
    target: DecoderConfig, draft: DFlashConfig
) -> None:
    assert floor.forward(target, 16, 1, 1024, logits=16).seconds == pytest.approx(3.55e-3, rel=0.02)
    many = floor.forward(target, 512, 32, 1024, logits=512)
    assert many.seconds == many.operations / floor.FLOPS > many.read / floor.BANDWIDTH
    assert floor.step_seconds(target, draft, Load(32, 512, 1024)) > many.seconds


def test_the_floors_of_the_published_load_leave_room_for_the_targets(
    target: DecoderConfig, draft: DFlashConfig
) -> None:
    for concurrency, plain, drafted in ((1, 200, 1000), (32, 5000, 10000)):
        load = Load(concurrency, 512, 1024)
        tokens = concurrency * load.answer
        assert tokens / floor.run_seconds(target, None, load, 6.36) > plain
        assert tokens / floor.run_seconds(target, draft, load, 6.36) > drafted


def test_a_longer_answer_takes_longer_and_a_larger_acceptance_less(target: DecoderConfig, draft: DFlashConfig) -> None:
    load = Load(4, 512, 1024)
    seconds = floor.run_seconds(target, draft, load, 6.36)
    assert floor.run_seconds(target, draft, replace(load, answer=2048), 6.36) > 2 * seconds - 0.1
    assert floor.run_seconds(target, draft, load, 3.0) > 1.5 * seconds


# The report


def speed(**changed: Any) -> dict[str, Any]:
    row = {"way": "DFlash", "concurrency": 1, "tok/s": 900.0, "rounds": [890.0, 910.0], "floor tok/s": 1500.0}
    row |= {"share of floor": 0.6, "step ms": 7.0, "floor of step ms": 4.2, "share of step's floor": 0.6}
    return row | {"target": 1000, "published": 681} | changed


def test_sections_are_written_as_they_end_and_a_failing_one_leaves_the_others_alone(tmp_path: Path) -> None:
    def fail() -> list[dict[str, Any]]:
        assert json.loads((tmp_path / "gpu-report.json").read_text())["sections"]["kernels"]["rows"]
        raise RuntimeError("out of luck")

    checks = [{"kernel": "norm", "error": 0.001, "passed": True}, {"kernel": "silu", "error": 0.5, "passed": False}]
    report = gpu_report.write(
        {"kernels": lambda: checks, "equality": fail, "speeds": lambda: [speed(), speed(concurrency=32, target=None)]},
        "a GPU",
        tmp_path,
    )
    page = (tmp_path / "gpu-report.md").read_text()
    for said in (
        "# gpu-report: a GPU",
        "- Kernels: 1 of 2 passed",
        "FAILED: RuntimeError: out of luck",
        "DFlash at 1: 900 tok/s, target 1000: MISSED; 60% of the floor's 1500",
        "DFlash at 32: 900 tok/s, no target",
        "| silu | 0.5000 | **NO** |",
        "DIFFERENT WORKLOAD",
        "RANDOM WEIGHTS",
        "SIMULATED ACCEPTANCE",
    ):
        assert said in page
    assert gpu_report_page.failures(report) == 2
    assert (
        "out of luck" in json.loads((tmp_path / "gpu-report.json").read_text())["sections"]["equality"]["error"]["says"]
    )
    assert (tmp_path / "gpu-report.png").stat().st_size > 1000


def test_when_time_is_up_nothing_more_is_begun_and_that_is_said(tmp_path: Path) -> None:
    report = gpu_report.write({"speeds": lambda: [speed()], "prefill": list}, "a GPU", tmp_path, limit=-1.0)
    assert report["left_out"] == ["speeds", "prefill"] and not report["sections"]
    assert "Prompts: left out" in (tmp_path / "gpu-report.md").read_text()


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
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line_and_fails() -> None:
    done = run("from app.bench.__main__ import main\nsys.exit(main(['gpu-report']))")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: gpu-report needs a CUDA GPU") and done.stderr.count("\n") == 1


def test_engines_are_built_compared_and_timed_on_a_bare_image(tmp_path: Path) -> None:
    """On a CPU, where graphs are steps that are run again, and overlap by a double."""
    pytest.importorskip("triton")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    done = run(
        "import json\n"
        "from app.bench import gpu_report, gpu_report_kernels, gpu_report_runs as runs\n"
        "from app.bench.gpu_report_floor import Load\n"
        f"model = {str(tmp_path / 'tiny.json')!r}\n"
        "from tests.engine.device_lengths import device_lengths\n"
        "with device_lengths():\n"
        "    equal = runs.equality(model, 'cpu', answer=24)\n"
        "    speeds = runs.speeds(model, [Load(1, 8, 20), Load(2, 8, 20)], 'cpu', 2)\n"
        "print(json.dumps([equal, speeds]))\n"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    equal, speeds = json.loads(done.stdout)
    assert [row["passed"] for row in equal] == [None, True, None, None, None, True]
    assert all(row["tokens alike"] == row["of"] == 6 * 24 for row in equal)
    assert [(row["way"], row["concurrency"]) for row in speeds] == [(w, c) for w in ("plain", "DFlash") for c in (1, 2)]
    assert all(row["tok/s"] > 0 and row["step ms"] > 0 and len(row["rounds"]) == 2 for row in speeds)
    assert [row["target"] for row in speeds] == [200, None, 1000, None]
