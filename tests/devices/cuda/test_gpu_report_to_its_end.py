"""`report --device cuda` from its command to its verdict, with every section.

Kernels run in Triton's interpreter, and all sizes are tiny. Sections run in this process.
Their processes are tested in tests/fast/check/test_gpu_report.py.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app import demo
from app.engine.cuda.backend import CudaBackend
from app.engine.device import accelerator
from app.engine.device.base import Backend
from app.engine.device.moe import MoeConfig
from app.engine.load import engine as build
from app.engine.load import made_up_steps
from tests.devices.cuda.engines import interpreted
from tests.fast.engine.pairs import make_pair
from tools.lab import random_weights
from tools.lab.random_weights import TARGETS
from tools.report import (
    command,
    engine,
    equality,
    hazards,
    operators,
    page,
    products,
    profile,
    ranks,
    roofline,
    runner,
    section,
    speeds,
    step,
    timing,
)
from tools.report.part import Options
from tools.report.sections import SECTIONS

torch.set_num_threads(1)

MODEL: dict[str, Any] = TARGETS["qwen3-0.6b"] | {
    "vocab_size": 131,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
TINY_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
).split()
SIZES = replace(
    operators.CUDA,
    heads=((2, 1, 16),),
    **operators.of_graphs((2,), 4, 20),
    hidden=32,
    intermediate=48,
    experts=MoeConfig(4, 2, intermediate_size=32, norm_topk_prob=True),
    num_rows=(2,),
    layers=2,
    recurrent=(2, 2, 8),
    block=4,
    batches=(2,),
)


class OneGpu:
    @staticmethod
    def device_count() -> int:
        return 1


class Interpreted(CudaBackend):
    """Backend of a GPU, on a CPU. Its graphs run again what would be captured."""

    def __init__(self, device: str, **_: Any) -> None:
        super().__init__(torch.device("cpu"))
        self.defaults = replace(self.defaults, page_size=4)  # so that all sequences have pages at once

    def check_ranks(self, size: int) -> None:
        accelerator.check_ranks(torch.device("cuda", 0), size, OneGpu, "CUDA_VISIBLE_DEVICES")


def timed_once(backend: Backend, run: Callable[[], object], **_: int) -> float:
    """The stopwatch, over one call instead of the median of many."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


class InThisProcess:
    """A section's process that says all its lines, from the command that would start it."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines

    @classmethod
    async def start(cls, line: Sequence[str]) -> "InThisProcess":
        *_, name, wishes, skip, seconds = line
        options, ends = Options(**json.loads(wishes)), time.monotonic() + float(seconds)
        lines = list[dict[str, Any]]()
        section.tell(
            lambda: (section.chip(options), SECTIONS[options.kind][name].make(options, ends)),
            int(skip),
            lambda told: lines.append(json.loads(json.dumps(told))),
            lambda: section.usable(options),
        )
        return cls(lines)

    async def line(self, seconds: float) -> bytes:
        return json.dumps(self._lines.pop(0)).encode() + b"\n" if self._lines else b""

    async def end(self) -> str:
        return "ended"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sums_in_order: None) -> str:
    """Return the model of a report whose every other size is tiny too."""
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(MODEL))
    monkeypatch.setattr(command, "check_gpu", lambda options: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an interpreter")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(runner, "LineProcess", InThisProcess)
    unhurried = {
        name: given._replace(part_seconds=6000.0, all_seconds=6000.0) for name, given in SECTIONS["cuda"].items()
    }
    monkeypatch.setitem(SECTIONS, "cuda", unhurried)
    for module in (hazards, products):
        monkeypatch.setattr(module, "make_backend", interpreted)
    for module in (build, operators, ranks, roofline):
        monkeypatch.setattr(module, "make_backend", Interpreted)
    monkeypatch.setattr(operators, "VOCAB", 131)
    shape: dict[str, Any] = {
        "seed": 34,
        "vocab_size": 6,
        "max_position_embeddings": 1024,
        "num_layers": 2,
        "draft_layers": 1,
        "taps": (0,),
    }
    pair = make_pair(tmp_path / "demo", **shape, own_head=True, num_kv_heads=1)
    assert (pair.target.name, pair.draft.name) == ("target", "draft")
    monkeypatch.setattr(engine, "DEMO", tmp_path / "demo")
    monkeypatch.setattr(demo, "token_ids", lambda count: [(1, 2, 0)] * count)
    monkeypatch.setattr(demo, "stop_token_ids", list)
    monkeypatch.setattr(timing, "CALLS", 1)
    monkeypatch.setattr(timing, "seconds_each", timed_once)
    for module, name, value in (
        (operators, "EXTENTS", {"cuda": (SIZES, replace(SIZES, heads=((2, 1, 32),), turning=0.25, sinks=True))}),
        (hazards, "HazardSizes", lambda: hazard_sizes),
        (hazards, "nan_in_weight", lambda *_: hazards.found([])),  # the interpreter reads NaN in e4m3 as 480
        (products, "ProductSizes", lambda: product_sizes),
        (roofline, "RooflineSizes", lambda: roofline_sizes),
        (random_weights, "BLOCK_SIZE", 4),
        (speeds, "PROMPTS", (4, 9)),
        (profile, "ANSWER", 40),
        (profile, "STEPS", 1),
        (speeds, "REFILLS", 1),
        (equality, "KINDS", {"dense": (MODEL, equality.WAYS)}),
        (equality, "ANSWER", 3),
        (equality, "NUM_REQUESTS", 2),
        (equality, "PROMPT", 5),
        (equality, "SIZES", equality.SIZES | {"max_num_seqs": 2, "max_model_len": 32, "max_graphs": 2}),
        (made_up_steps, "MAX_SECONDS", 0),
        (made_up_steps, "_TEXT_SECONDS", 0),
        (made_up_steps, "_ROUNDS", 1),
        (made_up_steps, "_IN_A_ROW", 1),
        (build, "check_attention", lambda *_: None),
        (engine, "NUM_PROMPTS", 1),
        (engine, "MAX_TOKENS", 3),
        (engine, "ACCEPTANCE", 1.0),  # of so few tokens it depends on how the last step is cut
        (engine, "WAYS", engine.WAYS | {"graphs": {"enforce_eager": False, "max_graphs": 2}}),
        (step, "SEQUENCES", (1,)),
        (step, "CONTEXT", 8),
        (step, "REPEATS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    return str(model)


hazard_sizes = hazards.HazardSizes(128, 32, MoeConfig(4, 2, 32, norm_topk_prob=True), (2, 40), (2,), (17,))
DENSE = TARGETS["qwen3-8b-fp8"] | {name: MODEL[name] for name in TINY_SIZES} | {"head_dim": 64}
EXPERTS = TARGETS["qwen3-30b-a3b-fp8"] | {name: MODEL[name] for name in TINY_SIZES}
EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
product_sizes = products.ProductSizes((("dense", DENSE),), (("experts", EXPERTS),), (1, 2), (3,), (1,))
roofline_sizes = roofline.RooflineSizes(copied=64, hidden=4, intermediate=4, qkv=4, weights=1, rows=(1, 2), layers=1)


FIGURES: dict[str, tuple[str, str]] = {
    "operators": ("", ""),
    "equality": ("of", ""),
    "speeds": ("found", ""),
    "roofline": ("", "ms|TFLOP_s|weights_GB_s"),
    "engine": ("prompts|tokens|identical", ""),
    "step": ("step|launch|read|steps", ""),
    "collectives": ("found", ""),
}
"""Section -> figures of each of its parts, and of each case."""


SPEED = "tok/s|steady tok/s|tok/s at the mean length|step ms|acceptance length|rows: steps|share of prompts|built in s"


def missing(rows: list[dict[str, Any]], keys: str) -> list[str]:
    """Return the figures that a row has not, or that are no number."""
    wanted = keys.split("|") if keys else []
    return [f"{key} in {row}" for row in rows for key in wanted if row.get(key) is None or row[key] != row[key]]


def test_a_whole_report_ends_with_every_figure_and_its_verdict(tiny, tmp_path, capsys):
    folder = tmp_path / "report"
    load = ["--concurrency", "2", "--prompt", "4", "--answer", "8", "--rounds", "1"]
    code = command.main(["--device", "cuda", "--out", str(folder), "--model", tiny, *load, "--seconds", "6000"])
    told = capsys.readouterr()
    report = json.loads((folder / "gpu-report.json").read_text())
    assert (code, report["failed"]) == (0, 0), told.err
    assert list(report["sections"]) == list(SECTIONS["cuda"]) == list(FIGURES)
    for name, (of_parts, of_cases) in FIGURES.items():
        parts = report["sections"][name]["parts"]
        assert parts and {part["status"] for part in parts} == {"not tried" if name == "collectives" else "ok"}
        results = [part["result"] for part in parts]
        cases = [case for result in results for case in result.get("cases", []) if "failed" not in case]
        assert not missing(results, of_parts) and not missing(cases, of_cases) and (cases or of_parts), name
    compared = [case for part in report["sections"]["operators"]["parts"] for case in part["result"]["cases"]]
    assert not missing([case for case in compared if "shape" in case], "relative|us")
    timed = [case for case in compared if "us in 16 bits" in case]
    assert len(timed) == 6 and not missing(timed, "us in 16 bits")
    timed = {part["name"].partition(", ")[2]: part["result"] for part in report["sections"]["speeds"]["parts"]}
    assert timed["prompts"].keys() == {"4 tokens, ms", "9 tokens, ms", "found"}
    for way in ("plain", "full blocks"):
        step = timed.pop(f"a step of {way} at 2")
        assert step["stages ms"].keys() == {*profile.STAGES, "gaps"} and step["kernels ms"] > 0
    (plain, *drafted) = [result for name, result in timed.items() if name.endswith(" at 2")]
    assert not missing([plain, *drafted], SPEED)
    assert plain["acceptance length"] == 1 and all(result["acceptance length"] > 1.5 for result in drafted)
    end = page.verdict(report)
    assert len(end) <= page.VERDICT_CHARS
    assert [line.partition(":")[0].lower() for line in end.splitlines()[1:]] == list(FIGURES)
    assert told.out == f"{(folder / 'gpu-report.md').read_text()}\n{end}\n{page.figures(report)}\n"
