"""`report --device cuda` from its command to its verdict, with every section.

Kernels run in Triton's interpreter, events are those of a clock, and all sizes are tiny. Sections run in this process.
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
from torch import Tensor

from app import demo
from app.engine.cuda.backend import CudaBackend
from app.engine.device import accelerator
from app.engine.device.base import Graph
from app.engine.device.moe import MoeConfig
from app.engine.device.torch import RerunGraph
from app.engine.load import engine as build
from app.engine.load import made_up_steps
from tests.fast.engine.pairs import make_pair
from tools.lab import cuda_attention, equality, expected, gemms, kernels, launch_gap, random_weights, speeds, turns
from tools.lab.random_weights import TARGETS
from tools.report import command, engine, operators, page, ranks, roofline, runner, section, step, timing
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

    def capture_apart(self, run: Callable[[], tuple[Tensor, ...]]) -> Graph:  # type: ignore[override]
        return RerunGraph(run)

    def check_ranks(self, size: int) -> None:
        accelerator.check_ranks(torch.device("cuda", 0), size, OneGpu, "CUDA_VISIBLE_DEVICES")


class ClockEvent:
    """Event of a device that works at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: "ClockEvent") -> float:
        return 1e3 * (end._at - self._at)


class InThisProcess:
    """A section's process that says all its lines, from the command that would start it."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines

    @classmethod
    async def start(cls, line: Sequence[str]) -> "InThisProcess":
        *_, name, wishes, skip, seconds = line
        options, ends = command.Options(**json.loads(wishes)), time.monotonic() + float(seconds)
        lines = list[dict[str, Any]]()
        section.tell(
            lambda: (section.chip(options), section.parts(name, options, ends)),
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
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the model of a report whose every other size is tiny too."""
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(MODEL))
    monkeypatch.setattr(command, "check_gpu", lambda options: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an interpreter")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", ClockEvent)
    monkeypatch.setattr(runner, "LineProcess", InThisProcess)
    unhurried = {name: given._replace(part=6000.0, whole=6000.0) for name, given in SECTIONS["cuda"].items()}
    monkeypatch.setitem(SECTIONS, "cuda", unhurried)
    for module in (build, cuda_attention, gemms, kernels, operators, ranks, roofline):
        monkeypatch.setattr(module, "make_backend", Interpreted)
    monkeypatch.setattr(expected, "MODEL", str(model))
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
    model_says = expected.STEPS
    of_two = {("plain", 2): model_says["plain", 32]} | {
        (f"width {n}", 2): model_says["width 8", 32] for n in (2, 3, 4, 16)
    }
    monkeypatch.setattr(expected, "STEPS", model_says | of_two)
    monkeypatch.setattr(expected, "CHOSEN", expected.CHOSEN | {("full blocks", 2): 4, ("auto", 2): 4})
    monkeypatch.setattr(expected, "HOST_MS", expected.HOST_MS | {2: 0.4})
    monkeypatch.setattr(timing, "CALLS", 1)
    for module, name, value in (
        (operators, "EXTENTS", {"cuda": SIZES}),
        (cuda_attention, "CUDA", SIZES),
        (cuda_attention, "CONTEXT", 20),
        (cuda_attention, "TILES", cuda_attention.TILES[:1]),
        (cuda_attention, "PROMPTS", [[(17, 20)]]),
        (cuda_attention, "WARM_UP", [(18, 18)]),
        (roofline, "RooflineSizes", lambda: roofline_sizes),
        (gemms, "ROWS", (1, 2)),
        (gemms, "ROTATED", 1.0),
        (random_weights, "BLOCK_SIZE", 4),
        (kernels, "WIDTHS", (None, 4)),
        (kernels, "CONTEXT", 16),
        (kernels, "ANSWER", 40),
        (kernels, "STEPS", 1),
        (kernels, "REPLAYS", 2),
        (launch_gap, "KERNELS", 2),
        (turns, "ANSWER", 5),
        (turns, "ATTENTION", {"twice attention's splits": turns.ATTENTION["twice attention's splits"]}),
        (speeds, "REFILLS", 1),
        (turns, "ROUNDS", 2),
        (equality, "MODEL", str(model)),
        (equality, "ANSWER", 3),
        (equality, "NUM_REQUESTS", 2),
        (equality, "PROMPT", 5),
        (equality, "SIZES", equality.SIZES | {"max_num_seqs": 2, "max_model_len": 32, "max_graphs": 2}),
        (made_up_steps, "MAX_SECONDS", 0),
        (made_up_steps, "_ROUNDS", 1),
        (made_up_steps, "_IN_A_ROW", 1),
        (build, "check_attention", lambda *_: None),
        (engine, "NUM_PROMPTS", 1),
        (engine, "MAX_TOKENS", 3),
        (engine, "ACCEPTANCE", 1.0),  # of so few tokens it depends on how the last step is cut
        (engine, "WAYS", engine.WAYS | {"graphs": {"enforce_eager": False, "max_graphs": 2}}),
        (step, "SEQUENCES", (1,)),
        (step, "REPEATS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    return str(model)


roofline_sizes = roofline.RooflineSizes(copied=64, hidden=4, intermediate=4, qkv=4, weights=1, rows=(1, 2), layers=1)


FIGURES: dict[str, tuple[str, str]] = {
    "roofline": ("", "ms|TFLOP_s|weights_GB_s"),
    "operators": ("", "relative|passed|us"),
    "equality": ("of", ""),
    "speeds": (
        "tok/s|expected tok/s|floor tok/s|steady tok/s|expected steady tok/s|step ms|expected step ms|host ms|"
        "expected host ms|read wait ms|acceptance length|rows: steps|share of prompts|refilled tok/s|built in s",
        "",
    ),
    "prefill": ("", "first call ms|us|expected us at most"),
    "attention": ("expected us", "us"),
    "profile": ("", "us"),
    "gemm": ("found", "rows"),
    "graphs": ("", "run|ms|slowest ms|expected ms"),
    "turns": ("rounds", "tok/s|ratio"),
    "engine": ("prompts|tokens|identical", ""),
    "step": ("step|launch|read|steps", ""),
    "collectives": ("found", ""),
}
"""Section -> figures of each of its parts, and of each case."""


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
        assert parts and {part["status"] for part in parts} == {"ok"}
        results = [part["result"] for part in parts]
        cases = [case for result in results for case in result.get("cases", []) if "failed" not in case]
        assert not missing(results, of_parts) and not missing(cases, of_cases) and (cases or of_parts), name
    by_name = {part["name"]: part["result"] for part in report["sections"]["profile"]["parts"]}
    assert [case["us"] > 0 for case in by_name.pop("launch gap")["cases"]] == [True]
    for result in by_name.values():
        assert result["stages ms"].keys() >= {"attention", "products", "gaps"} and result["expected ms"] > 0
        assert {"target", "head"} <= result["ms of"].keys() and result["expected ms of"]["target"] > 0
    assert {"context", "draft"} <= by_name["width 4 at 2"]["ms of"].keys()
    *products, names = report["sections"]["gemm"]["parts"]
    of_products = [case for part in products for case in part["result"]["cases"]]
    assert not missing(of_products, "us|expected us|TB/s|TFLOP/s|us again")
    assert all(case["kernels"] for case in names["result"]["cases"]) and len(names["result"]["cases"]) == 7 * 2
    ways = {case["way"] for part in report["sections"]["turns"]["parts"] for case in part["result"]["cases"]}
    assert {*turns.WAYS, "DFlash, eager, one step at a time", "DFlash, twice attention's splits"} <= ways
    (plain, *drafted) = [part["result"] for part in report["sections"]["speeds"]["parts"]]
    assert plain["acceptance length"] == 1 and all(result["acceptance length"] > 1.5 for result in drafted)
    assert report["versions"]["kernels"] == "0 compiled", "they were interpreted"
    refused = [part["name"] for part in report["sections"]["prefill"]["parts"] if "error" in part]
    assert set(refused) <= {"PyTorch's, cuDNN", "PyTorch's, memory-efficient"}, "a CPU has them not"
    end = page.verdict(report)
    assert len(end) <= page.VERDICT_CHARS
    assert [line.partition(":")[0].lower() for line in end.splitlines()[1:]] == list(FIGURES)
    assert told.out == f"{(folder / 'gpu-report.md').read_text()}\n{end}\n"
