"""The checks of `report --device cuda` in the interpreter, at toy sizes: they pass, and find a kernel that is wrong."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.cuda._utils import _get_device_index as index_of

from app.check import operators
from app.check.operators import Extent
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.cuda import gated_delta
from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend
from app.engine.device.moe import MoeConfig
from app.engine.device.recurrent import GatedDeltaStep
from app.engine.quantised import PackedFp4
from tests.costs import landing_ones
from tests.devices.cuda.engines import GRAPHS, interpreted, use_kernels
from tools.lab.random_weights import TARGETS, draft_for
from tools.report import command, equality, hazards, products
from tools.report import section as report_section
from tools.report.expected import FIGURES
from tools.report.operators import compared, of_graphs, of_torch
from tools.report.part import MODELS, REAL_PAIR, Options, Result
from tools.report.roofline import Chip
from tools.report.sections import SECTIONS

torch.set_num_threads(1)

SIZES = Extent(
    heads=((4, 2, 16),),
    **of_graphs((1, 2), 4, 40),
    page=16,
    past=float("nan"),
    hidden=32,
    intermediate=48,
    num_rows=(1, 2, 4, 8),
    layers=2,
    recurrent=(2, 4, 8),
    block=4,
    batches=(1, 2),
)
KERNELS = (
    "causal_attention bidirectional_attention sliding_attention rms_norm add_rms_norm gated_mlp moe qkv_into_kv "
    "context_into_kv positions_and_slots embed_blocks verify advance_by_accepted commit_and_verify "
    "commit_prompts"
).split()


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend(torch.device("cpu"))


HAZARDS = hazards.HazardSizes(128, 48, MoeConfig(4, 2, 32, norm_topk_prob=True), (2, 40), (2, 17), (20,))


def hazards_found(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    monkeypatch.setattr(hazards, "make_backend", interpreted)
    return {part.name: part.run()["passed"] for part in hazards.parts(Options("cuda"), HAZARDS)}


@pytest.mark.usefixtures("sums_in_order")
def test_products_and_experts_are_checked_in_graphs_alone_and_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hazards_found(monkeypatch)
    # Triton 3.7.1's interpreter reads NaN in e4m3 as 480.
    assert [name for name, passed in found.items() if not passed] == ["NaN in a weight in e4m3"] and len(found) == 13


@pytest.mark.usefixtures("sums_in_order")
def test_what_a_graph_keeps_of_its_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(self: CudaBackend, run: Callable[[], tuple[Tensor, ...]], metas: object) -> SimpleNamespace:
        return SimpleNamespace(outputs=run(), replay=lambda: None)

    monkeypatch.setattr(CudaBackend, "capture", frozen)
    wrong = {name for name, passed in hazards_found(monkeypatch).items() if not passed and "NaN" not in name}
    assert wrong == {
        f"{kind} in {name}, replayed" for kind in ("product", "experts") for name in ("16 bits", "int8", "e4m3")
    }


@pytest.mark.usefixtures("sums_in_order")
def test_a_row_whose_bits_are_the_batchs_and_a_nan_that_is_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CudaBackend, InvariantCudaBackend):

        def of_batch(self: CudaBackend, x: Tensor, *weights: Any, own: Any = kind.linear) -> Tensor:
            out = own(self, x, *weights).nan_to_num(480.0)
            return out + out.abs().amax() * 0.01

        monkeypatch.setattr(kind, "linear", of_batch)
    wrong = {name for name, passed in hazards_found(monkeypatch).items() if not passed}
    alone = {f"rows alone in {name}{end}" for name in ("int8", "e4m3") for end in ("", ", --batch-invariant")}
    assert wrong == alone | {"NaN in a weight in e4m3", "NaN in rows for int8", "NaN in rows for e4m3"}


SIZES_OF_ENGINES = {"max_num_seqs": 2, "max_model_len": 32, "kv_cache_memory": 1 << 20, "page_size": 4}
TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
TINY_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
TINY_HYBRID = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}


KINDS = ["hybrid in FP8", "experts in FP8", "dense in FP8", "gpt-oss", "dense in int8"]


def test_experts_in_mxfp4_have_the_numbers_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TARGETS["gpt-oss-20b"] | TINY | TINY_EXPERTS | {"num_hidden_layers": 2, "head_dim": 16}
    config |= {"layer_types": config["layer_types"][:2]}
    opened = partial(interpreted, "cpu")
    assert products.same_numbers(opened, config, (1, 40))["passed"]
    own = PackedFp4.dequantised
    monkeypatch.setattr(PackedFp4, "dequantised", lambda self: own(self).roll(1, dims=-1))
    assert not products.same_numbers(opened, config, (1, 40))["passed"]


@pytest.mark.parametrize("kind", landing_ones(KINDS, ("hybrid in FP8",)))
def test_texts_of_each_kind_of_target_are_the_same_in_graphs_and_without(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ways = equality.KINDS[kind]
    layers = 4 if "hybrid" in kind else 2
    few = TINY | {"num_hidden_layers": layers, "head_dim": 16}
    few |= {"layer_types": model["layer_types"][:layers]} if "layer_types" in model else {}
    few |= (TINY_HYBRID if "hybrid" in kind else {}) | (TINY_EXPERTS if "experts" in kind or "oss" in kind else {})
    use_kernels(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name, value in {"NUM_REQUESTS": 2, "PROMPT": 5, "SIZES": equality.SIZES | GRAPHS | SIZES_OF_ENGINES}.items():
        monkeypatch.setattr(equality, name, value)
    chosen = {name: way for name, way in ways.items() if name in equality.OF_BITS}
    first, second = [part.run() for part in equality.parts_of(model | few, chosen, "cpu", 6, kind)]
    assert first["of"] == 12 and second["passed"] and second["tokens alike"] == 12


def ran(run: Callable[[], object]) -> float:
    run()
    return 1e-6


def test_every_kind_of_target_has_a_config_and_a_draft() -> None:
    for model, _ in equality.KINDS.values():
        draft_config(draft_for(model), target_config(model))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_every_section_has_its_parts_with_the_options_of_the_command(monkeypatch, device):
    """As its process makes them, but on a CPU. torch's own check says whether the device has a number."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(index_of(device)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {index_of(device)}")
    options, _ = command.parse(["--device", device, "--concurrency", "1", "8"])
    found = {}
    for name, section in command.sections(options).items():
        assert section.command[-2] == name
        given = Options(**json.loads(section.command[-1]))
        assert report_section.chip(given) == f"a GPU, {options.index}"
        found[name] = [part.name for part in SECTIONS[given.kind][name].make(given, 60.0)]
    assert set(chosen) == {options.index} and options.index == (1 if device == "cuda:1" else 0)
    of_model = [name.removeprefix("qwen3-8b, ") for name in found["speeds"] if name.startswith("qwen3-8b, ")]
    assert of_model == [
        *("plain at 1", "plain at 8", "prompts", "a step of plain at 1"),
        *("full blocks at 1", "full blocks at 8", "a step of full blocks at 1", "auto at 1", "auto at 8"),
    ]
    models = dict.fromkeys(name.partition(", ")[0] for name in found["speeds"])
    assert list(models) == [model for model in MODELS if model != REAL_PAIR]
    parts = {name for names in found.values() for name in names}
    assert FIGURES.keys() <= parts | {f"{model}, {way} at 32" for model in models for way in ("plain", "full blocks")}
    assert len(found["operators"]) > 30 and len(found["equality"]) == 41
    assert {"copy", "matmul"} < set(found["roofline"])
    assert len(found["operators"]) == len(set(found["operators"]))


def all_checked(backend: CudaBackend) -> dict[str, list[Result]]:
    """The rows of each operator."""
    cases = operators.cases(SIZES) | of_torch(vocab=300)
    return {name: compared(backend, group, SIZES.past)["cases"] for name, group in cases.items()}


def test_every_kernel_is_checked_and_right(backend: CudaBackend) -> None:
    found = all_checked(backend)
    wrong = {name: row for name, rows in found.items() for row in rows if not row["passed"]}
    assert not wrong
    assert set(KERNELS) < set(found) and all(row["relative"] < 1e-2 for rows in found.values() for row in rows)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_kernel_that_is_wrong_is_found(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    own = CudaBackend.rms_norm
    monkeypatch.setattr(CudaBackend, "rms_norm", lambda *args: own(*args) * wrong)
    found = all_checked(backend)
    assert {name for name, rows in found.items() if not all(row["passed"] for row in rows)} == {"rms_norm"}


def test_a_state_that_is_committed_a_row_short_is_found(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(step: GatedDeltaStep) -> Tensor:
        return gated_delta.commit_and_verify(step._replace(starts=(step.starts - 1).clamp(min=0)))

    monkeypatch.setattr(CudaBackend, "commit_and_verify", lambda self, step: short(step))
    rows = compared(backend, operators.cases(SIZES)["commit_and_verify"], SIZES.past)["cases"]
    assert not any(row["passed"] for row in rows)


def test_times_are_shares_of_the_bandwidth(backend: CudaBackend) -> None:
    group = operators.cases(SIZES)["rms_norm"][:1]
    (found,) = compared(backend, group, SIZES.past, lambda run: 1e-3, Chip(1e6, 1e6))["cases"]
    assert found["us"] == pytest.approx(1000) and 0 < found["share"] < 1


def test_a_kernel_that_cannot_be_timed_is_checked_all_the_same_and_has_failed(backend: CudaBackend) -> None:
    def fail(run: Callable[[], object]) -> float:
        raise RuntimeError("out of graphs")

    found = compared(backend, operators.cases(SIZES)["rms_norm"], SIZES.past, fail)
    assert found["error"]["says"] == "RuntimeError: out of graphs" and not found["passed"]
    assert found["cases"][0]["passed"] and found["cases"][0]["relative"] < 1e-2
