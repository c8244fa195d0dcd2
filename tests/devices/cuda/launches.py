"""Launches of a decode step on a GPU. Prints the tables of docs/cuda.md:

    TRITON_INTERPRET=1 python -m tests.devices.cuda.launches

The target has 36 layers in bfloat16 and the draft 5 in e4m3, like Qwen3-8B and its draft. Weights are tiny and random,
because sizes do not change the number of launches. Graphs are captured on a CPU, and the launches of a capture are
counted: each kernel in Triton, which does not run, and each operator of PyTorch. Not run on a GPU, where cuBLAS may
split a product in two.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

import app.engine.load.engine as build
from app.config.engine import EngineConfig
from app.engine.arrays import with_arrays
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint, read_config
from app.engine.core import EngineCore
from app.engine.cuda import integers
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.launch import counters
from app.engine.device.base import AttentionMetadata, ExpertWeights, Graph
from app.engine.device.moe import MoeConfig
from app.engine.device.torch import RerunGraph
from app.engine.load.loader import CheckpointWeights
from app.engine.models.layers import StepRows
from app.engine.models.qwen3_5 import HybridLayer, TextWeights
from app.engine.models.recurrent_rows import RecurrentRows, prompt_rows, sequence_rows
from app.engine.models.state_pool import StatePool
from app.engine.models.weights import LayerSource
from app.engine.quantised import QuantisedRows, QuantisedWeight, Rows, Weight
from app.engine.sampling.metadata import GRAPH_KINDS, Kind
from app.engine.schedule.batch import Batch, StepResult
from app.engine.step.runner import PendingStep
from tests import UNTIMED
from tests.fast.engine.dialects import as_dflash2, in_deepspec_layout_with, rewrite_draft
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.quantised import quantise

LAYERS, DRAFT_LAYERS, BLOCK, MULTIPROCESSORS = 36, 5, 16, 132
SHAPE: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 16, "block_size": BLOCK}
SHAPE |= {"vocab_size": 128, "dtype": torch.bfloat16, "taps": (1, 9, 17, 25, 33)}
SHAPE |= {"hidden_size": 128, "intermediate_size": 128}  # the least that a draft in e4m3 takes
LAYER = ("norm", "mm", "quantise", "product8", "rope_and_write", "attend", "combine", "gated")
"""Kernels and operators of a layer."""
WITHOUT_LAUNCH = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh")
HEAD = f"| a step, {LAYERS} + {DRAFT_LAYERS} layers | launches | of the draft "
HEAD += "| a layer of the target | a layer of the draft | around layers |"
STEPS = {"plain": 1, "whole blocks": BLOCK, "DFlash2": BLOCK, "DSpark": BLOCK}
REWRITES = {"DFlash2": as_dflash2, "DSpark": in_deepspec_layout_with("vanilla")}
"""Other kinds of draft."""
DRAW_HEAD = "| a draw by | launches | with penalties |"
RECURRENT_HEAD = "| a Gated DeltaNet layer in a step of | launches |"
EXPERTS_HEAD = "| experts of a layer | few rows each | many |"
FILTERS = {"": "temperature", "short": "and top-k to 128", "open": "and top-p or min-p alone"}
Sizes = tuple[str, int, int]


class Operators(TorchDispatchMode):
    """Launches of PyTorch's operators inside of the block, by name."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        name = func.overloadpacket.__name__
        views = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
        if not views and not name.startswith(WITHOUT_LAUNCH):
            self._found[name] += 1
        if name in ("index", "index_put_"):  # PyTorch turns such indices into int64 first
            self._found["index cast"] += sum(one is not None and one.dtype == torch.int32 for one in args[1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count launches in the block, by kernel or operator. Kernels of layers do not run: their outputs hold anything."""
    found: Counter[str] = Counter()
    run = GridExecutor.__call__

    def launch(kernel: GridExecutor, *args: Any, **options: Any) -> None:
        found[kernel.fn.__name__] += 1
        if kernel.fn.__name__ in vars(integers):  # positions and tokens are indices
            with _disable_current_modes():
                run(kernel, *args, **options)

    with patch.object(GridExecutor, "__call__", launch), Operators(found):
        yield found


class Captured(Graph):
    """Graph that is not replayed."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs

    def replay(self) -> None: ...


class CountedBackend(CudaBackend):
    """Backend that counts the launches of each capture. Steps before it have fewer programs, because these run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captured: list[Counter[str]] = []

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        counters(self.device)  # on a GPU a first run makes them
        with patch.object(self, "multiprocessors", MULTIPROCESSORS), launches() as found:
            outputs = run()
        self.captured.append(found)
        return Captured(outputs)


class CopyingBackend(CudaBackend):
    """Backend whose calls between host and device are counted."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: Counter[str] = Counter()

    def upload(self, host: Tensor, to: Tensor) -> None:
        self.calls["copy up"] += 1
        super().upload(host, to)

    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        self.calls["copy down"] += 1
        return super().start_download(x)

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        graph, calls = RerunGraph(run), self.calls
        replay = graph.replay

        def counted() -> None:
            calls["replay"] += 1
            replay()

        graph.replay = counted  # type: ignore[method-assign]
        return graph


def engine(pair: Pair, backend: CudaBackend, *, draft: bool, **wishes: Any) -> EngineCore:
    sizes: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory": 64 << 20, "page_size": 16, "dtype": "bfloat16"}
    config = EngineConfig(target=pair.target, draft=pair.draft if draft else None, **UNTIMED | sizes | wishes)
    with (
        patch.object(build, "make_backend", lambda *_, **__: backend),
        patch.object(build, "check_attention", lambda *_: None),
    ):
        return build.build_engine(config).core


def of_graphs(pair: Pair, num_seqs: int, *, draft: bool) -> dict[Sizes, Counter[str]]:
    """Return the launches of each graph, by ("target" or "draft", sequences, rows)."""
    backend = CountedBackend()
    wishes: dict[str, Any] = {"max_num_seqs": num_seqs, "max_graphs": 4, "verify": BLOCK if draft else "auto"}
    wishes |= {"block_size": BLOCK} if draft else {}
    runner = engine(pair, backend, draft=draft, enforce_eager=False, **wishes).runner
    assert runner.graphs and runner.layout.graphs
    sizes = runner.layout.graphs
    captured: list[Sizes] = []
    for size in reversed(sizes.targets):
        captured += [("target", *size), *(("draw" + name_of(kind), *size) for kind in GRAPH_KINDS)]
    captured += [("draft", blocks, blocks * width) for blocks, width in reversed(sizes.drafts)]
    return dict(zip(captured, backend.captured, strict=True))


def name_of(kind: Kind) -> str:
    return f" {FILTERS[kind.filters]}{' and penalties' * kind.penalised}"


def calls_of_steps(pair: Pair, *, draft: bool, **sampling: Any) -> dict[str, Counter[str]]:
    """Return copies and replays of a launch, by the kind of its step, and how often the host waits in all."""
    backend = CopyingBackend()
    wishes: dict[str, Any] = {"max_num_seqs": 2, "max_graphs": 4, "verify": BLOCK if draft else "auto"}
    core = engine(pair, backend, draft=draft, enforce_eager=False, **wishes)
    found: dict[str, Counter[str]] = {"": Counter()}
    launch = core.launch

    def launched(batch: Batch) -> PendingStep:
        before = backend.calls.copy()
        pending = launch(batch)
        found[batch.kind], read = backend.calls - before, pending.read

        def waited() -> StepResult:
            found[""]["waits"] += 1
            return read()

        pending.read = waited
        return pending

    core.launch = launched  # type: ignore[method-assign]
    core.add(flat_request("first", (1, 2, 3), 40, **sampling))
    while core.step().stats.kind != "decode":
        found[""]["steps"] += 1
    core.add(flat_request("second", (4, 5), 40, **sampling))
    for _ in range(3):
        core.step()
    found[""]["steps"] += 4
    return found


def rows(folder: Path, num_seqs: int, step: str) -> tuple[str, Counter[str]]:
    """Return the row of a step, and its launches that are no layer's."""
    pair = make_pair(folder, num_layers=LAYERS, draft_layers=DRAFT_LAYERS, **SHAPE)
    width, draft = STEPS[step], STEPS[step] > 1
    if step in REWRITES:
        rewrite_draft(pair, {}, REWRITES[step])
    found = of_graphs(pair, num_seqs, draft=draft)
    target = found["target", num_seqs, num_seqs * width]
    of_draft = found["draft", num_seqs, num_seqs * width] if draft else Counter[str]()
    around, a_layer = target + of_draft, []
    for part, count in ((target, LAYERS), (of_draft, DRAFT_LAYERS)):
        layer = Counter({name: part[name] // count for name in LAYER})
        a_layer.append(layer.total() or "-")
        around -= Counter({name: count * each for name, each in layer.items()})
    cells = [(target + of_draft).total(), of_draft.total() or "-", *a_layer, around.total()]
    return f"| {step} at {num_seqs} | " + " | ".join(map(str, cells)) + " |", around


def layer_in_8_bits(folder: Path) -> Counter[str]:
    """Return the launches of a layer of a plain step at 1 whose weights are in 8 bits."""
    pair = make_pair(folder, num_layers=2, draft_layers=1, **SHAPE | {"taps": (0,)})
    pair = replace(pair, target=quantise(pair.target, folder, "fp8 by row")[0])
    target = of_graphs(pair, 1, draft=False)["target", 1, 1]
    return Counter({name: target[name] // 2 for name in LAYER if target[name] > 1})


def mixture_rows() -> list[str]:
    """Return the rows of a mixture of experts, for 16 rows and for many, on tensors without memory."""
    backend, moe = CudaBackend(torch.device("cpu")), MoeConfig(8, 2, intermediate_size=128, norm_topk_prob=True)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def cell(rows: int, kind: torch.dtype | None) -> int:
        weights: list[Weight] = [empty(8, 256, 128), empty(8, 128, 128)]
        x: Rows = empty(rows, 128)
        if kind:
            weights = [
                QuantisedWeight(empty(*w.shape, dtype=kind), empty(*w.shape[:2], 1), torch.bfloat16)
                for w in weights
                if isinstance(w, Tensor)
            ]
            x = QuantisedRows(empty(rows, 128, dtype=kind), empty(1, rows), empty(rows, 128))
        counters(torch.device("meta"))
        with launches() as found:
            backend.moe(x, ExpertWeights(empty(8, 128), *weights), moe)
        return found.total()

    kinds = {"bfloat16": None, "8 bits, of rows that the norm has quantised": torch.float8_e4m3fn}
    return [f"| {name} | {cell(16, kind)} | {cell(512, kind)} |" for name, kind in kinds.items()]


def draw_rows(folder: Path) -> list[str]:
    """Return the rows of the graphs that draw after a target of 16 rows."""
    pair = make_pair(folder, num_layers=2, draft_layers=1, **SHAPE | {"taps": (0,)})
    found = of_graphs(pair, 1, draft=True)

    def cell(filters: str, *, penalised: bool) -> int:
        return found["draw" + name_of(Kind(filters, penalised)), 1, BLOCK].total()

    return [
        f"| {name} | {cell(filters, penalised=False)} | {cell(filters, penalised=True)} |"
        for filters, name in FILTERS.items()
    ]


def recurrent_rows(folder: Path) -> list[str]:
    """Return the launches of a Gated DeltaNet layer with its norms and MLP, for each kind of step."""
    pair, backend = make_hybrid_pair(folder, dtype=torch.bfloat16), CountedBackend()
    config = target_config(read_config(pair.target))
    assert config.gated_delta is not None
    weights = TextWeights(CheckpointWeights(Checkpoint(pair.target), backend.device, torch.bfloat16), config)
    layer = HybridLayer(LayerSource(0, config, weights, backend))
    memory = StatePool(config.gated_delta, 3, BLOCK, torch.bfloat16, backend.zeros).layers[0]
    plain, block = (sequence_rows([(1, 1)], [40], [count], count, static=True) for count in (1, BLOCK))
    prompt, two = prompt_rows([(1, 2, 0)], [40], [[40]]), prompt_rows([(1, 2, 3), (0, 0, 0)], [40, 0], [[16, 24], [40]])
    rows = {
        "plain": RecurrentRows(plain, None),
        "a whole block": RecurrentRows(block, None),
        "a prompt's chunk": RecurrentRows(None, prompt),
        "two chunks and a block": RecurrentRows(block, two),
    }
    lines = []
    for name, each in rows.items():
        recurrent = with_arrays(each, lambda _, array: torch.from_numpy(array))
        count = sum(len(part) for part in (recurrent.decodes and recurrent.decodes.places,) if part is not None)
        count += sum(map(sum, recurrent.prompts.parts)) if recurrent.prompts else 0
        hidden = torch.zeros(count, config.hidden_size, dtype=torch.bfloat16)
        step: Any = StepRows((), torch.empty(0), [], recurrent)
        with torch.inference_mode(), launches() as found:
            layer.forward(*layer.enter(hidden, hidden), step, memory)
        lines.append(f"| {name} | {found.total()} |")
    return lines


def main() -> None:
    """Print Markdown, and below it what is not a layer's."""
    print(HEAD, "|---" * 6 + "|", sep="\n")
    kept = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_seqs in (1, 32):
            for step in STEPS:
                line, kept[line] = rows(Path(folder), num_seqs, step)
                print(line, flush=True)
        print("", RECURRENT_HEAD, "|---" * 2 + "|", *recurrent_rows(Path(folder) / "hybrid"), sep="\n")
        print("", EXPERTS_HEAD, "|---" * 3 + "|", *mixture_rows(), sep="\n")
        print("", DRAW_HEAD, "|---" * 3 + "|", *draw_rows(Path(folder)), "", sep="\n")
    for line, around in kept.items():
        print(line.split("|")[1], dict(around))


if __name__ == "__main__":
    main()
