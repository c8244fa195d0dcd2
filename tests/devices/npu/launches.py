"""Tasks and launches of a step on an NPU. `make npu-launches` prints the table of docs/ascend.md.

The target has 36 layers and the draft 5, like Qwen3-8B and its draft. Weights are tiny and random, because sizes do not
change the number of launches. The null device counts calls of torch_npu 2.13.0's own host code, without an NPU.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from app.engine.core import EngineCore
from app.engine.npu.backend import NpuBackend
from app.engine.npu.graph import NpuGraph
from app.messages import Request
from tests.devices.npu.engines import engine
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.dialects import as_dflash2, in_deepspec_layout_with, rewrite_draft
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.quantised import quantise
from tools.report.npu_questions import QuestionSizes
from tools.report.npu_questions import updates as updates_of_a_graph

LAYERS, DRAFT_LAYERS = 36, 5
LAYER = (
    "norm",
    "QKV projection",
    "norm of q",
    "norm of k",
    "RoPE of q and k",
    "copy of V",
    "K/V write",
    "attention",
    "output projection",
    "residual and norm",
    "gate and up projection",
    "SwiGLU",
    "down projection",
)
"""Tasks of a layer."""

SHAPE = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "taps": (1, 9, 17, 25, 33), "block_size": 16}


SIZES: dict[str, Any] = {
    "kv_cache_memory": 64 << 20,
    "max_num_batched_tokens": None,
    "max_model_len": 256,
    "max_graphs": 2,
}
HEAD = f"| a step, {LAYERS} + {DRAFT_LAYERS} layers | tasks | launches | graphs | updates | up | down | waits |"
EXPERTS = "experts"
"""In the name of a way whose target has experts in all of its layers."""
W8A8 = "W8A8"
"""In the name of a way whose target has int8 weights."""
WAYS = ("plain, eager", "plain, graphs", "DFlash, eager", "DFlash, graphs", "experts, graphs")
WAYS += ("W8A8, graphs", "W8A8 experts, graphs", "DFlash2, graphs", "DSpark, graphs")
REWRITES = {"DFlash2": as_dflash2, "DSpark": in_deepspec_layout_with("vanilla")}
"""Other kinds of draft."""
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.7},
    "penalised": {"temperature": 0.7, "frequency_penalty": 0.5},
}


def main() -> None:
    """Print Markdown, below it what is not a layer's, and the host's time of an update."""
    print(HEAD, "|---" * 8 + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), Numerics():
        for way in WAYS:
            lines = rows(Path(folder), way)
            print(*lines, sep="\n")
    print("", around(), "", *updates(), sep="\n")


def rows(folder: Path, way: str) -> list[str]:
    """Return the rows of a way: decode steps, for DFlash each kind, and with graphs each kind with each sampling."""
    experts = 8 if EXPERTS in way else 0
    pair = make_pair(folder, num_layers=LAYERS, draft_layers=DRAFT_LAYERS, experts=experts, **SHAPE)
    if W8A8 in way:
        pair = replace(pair, target=quantise(pair.target, folder, "W8A8 dynamic")[0])
    if rewrite := REWRITES.get(way.partition(",")[0]):
        rewrite_draft(pair, {}, rewrite)
    draft = {"draft": None} if way.startswith("plain") else {}
    with tasks_of_graphs() as tasks:
        core = engine(pair, enforce_eager=way.endswith("eager"), block_size=16, **SIZES | draft)
        found = {}
        for name, sampling in SAMPLED.items() if not rewrite else [("greedy", {})]:
            for kind, cells in steps(core, sampling, tasks).items():
                is_shown = name == "greedy" if way == "DFlash, eager" else way == "DFlash, graphs"
                if is_shown or (name != "penalised" and kind == "decode"):
                    found[f"{kind}, {name}"] = cells
    return [f"| {way}, {kind} | " + " | ".join(map(str, cells)) + " |" for kind, cells in found.items()]


@contextlib.contextmanager
def tasks_of_graphs() -> Iterator[Callable[[], int]]:
    """Count tasks of graphs that are captured in the block. The result returns those replayed since it was asked."""
    capture, replay = NpuBackend.capture, NpuGraph.replay
    sizes: WeakKeyDictionary[NpuGraph, int] = WeakKeyDictionary()
    replayed = 0

    def counted(backend: NpuBackend, *args: Any) -> NpuGraph:
        with traced() as trace:
            graph = capture(backend, *args)
        sizes[graph] = len(trace.of("capture", "capture-copy"))
        return graph

    def followed(graph: NpuGraph) -> None:
        nonlocal replayed
        replayed += sizes.get(graph, 0)
        replay(graph)

    def since() -> int:
        nonlocal replayed
        count, replayed = replayed, 0
        return count

    NpuBackend.capture, NpuGraph.replay = counted, followed  # type: ignore[method-assign]
    try:
        yield since
    finally:
        NpuBackend.capture, NpuGraph.replay = capture, replay  # type: ignore[method-assign]


def steps(core: EngineCore, sampling: dict[str, Any], tasks: Callable[[], int]) -> dict[str, list[int]]:
    """Return the cells of a step of each kind: three prompts, these three beside a fourth prompt, four whole blocks."""
    found = {}
    for kind, first, count in (("prefill", 0, 3), ("decode", 3, 0), ("mixed", 3, 1), ("decode", 4, 0)):
        for i in range(first, first + count):
            core.add(request(i, sampling))
        while kind not in (found_now := one_step(core, tasks)):
            pass
        found |= found_now
    for i in range(4):
        core.abort(f"r{i}")
    return {kind: found[kind] for kind in ("prefill", "mixed", "decode")}


def request(i: int, sampling: dict[str, Any]) -> Request:
    """Return a request whose prompt has a place in the graph, which is of 65 rows, next to three blocks."""
    return flat_request(f"r{i}", tuple(range(1, 12 + i)), max_tokens=60, seed=i, **sampling)


def one_step(core: EngineCore, tasks: Callable[[], int]) -> dict[str, list[int]]:
    """Return the cells of the next step by its kind."""
    tasks()
    with traced() as trace:
        kind = core.step().stats.kind
    counts = [len(trace.of(column)) for column in ("launch", "replay", "update")]
    counts += [sum(copy.startswith(way) for copy in trace.of("copy")) for way in ("h2d", "d2h")]
    return {kind: [counts[0] + tasks(), *counts, len(trace.waits)]}


def around() -> str:
    return f"A layer has {len(LAYER)} tasks: "


@torch.inference_mode()
def updates() -> list[str]:
    """Return what the report says of a graph's updates, by the server's pass and by torch_npu's, for graphs of some
    sequences."""
    backend = NpuBackend(torch.device("npu:0"))
    sizes = {n: QuestionSizes(requests=n, kv=128, repeats=100) for n in (1, 16, 256)}
    return [f"{n} sequences: {updates_of_a_graph(backend, size)['found']}" for n, size in sizes.items()]


if __name__ == "__main__":
    main()
