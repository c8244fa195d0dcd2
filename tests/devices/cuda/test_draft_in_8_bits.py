"""A draft in bfloat16 is in e4m3 on a GPU from Hopper on: it drafts nearly the same, and no text changes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.config.engine import EngineConfig
from app.engine.checkpoint.files import Checkpoint
from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend
from app.engine.dflash.model import DFlashModel
from app.engine.load.engine import Engine
from app.engine.load.loader import CheckpointWeights
from app.engine.load.plan import draft_kind
from app.engine.quantised import QuantisedWeight
from tests.devices.cuda.engines import EAGER, GRAPHS, engine, requests, use_kernels
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.quantised import E4M3, is_linear

torch.set_num_threads(1)
SHAPE: dict[str, Any] = {
    "seed": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_layers": 2,
    "draft_layers": 1,
    "taps": (0,),
}
"""Columns of all products are groups of 128."""


def made(folder: Path, **changed: int) -> Pair:
    return make_pair(folder, **SHAPE | changed)


def draft_of(made: Engine) -> DFlashModel:
    drafter = made.core.runner.forward.drafter
    assert drafter
    return drafter.model


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden", "multiplies"),
    [
        ((9, 0), torch.bfloat16, 128, True),
        ((10, 0), torch.bfloat16, 128, True),
        ((8, 9), torch.bfloat16, 128, False),
        ((9, 0), torch.float16, 128, True),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 192, False),
    ],
    ids=str,
)
def test_auto_is_e4m3_in_bfloat16_where_columns_are_groups_on_hopper_and_later_and_else_nothing_is_rounded(
    capability: tuple[int, int], dtype: torch.dtype, hidden: int, multiplies: bool, caplog
) -> None:
    backend = CudaBackend(torch.device("cpu"))
    backend.capability = capability
    draft: Any = SimpleNamespace(decoder=SimpleNamespace(hidden_size=hidden))
    auto = E4M3 if dtype == torch.bfloat16 else None
    for asked, kind in (("auto", auto), ("none", None), ("int8", torch.int8), ("fp8", E4M3)):
        config = EngineConfig(Path("target"), draft_quantization=asked)
        caplog.clear()
        assert draft_kind(config, draft, dtype, backend) == (kind if multiplies else None)
        is_told = asked in ("int8", "fp8") and not multiplies
        assert (f"--draft-quantization {asked}: left out" in caplog.text) == is_told


@pytest.mark.parametrize(("asked", "kind", "group"), [("auto", E4M3, 128), ("int8", torch.int8, 0)])
def test_layers_and_a_copy_of_the_head_are_in_8_bits_and_what_reads_features_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, kind: torch.dtype, group: int
) -> None:
    """Their bytes, with those of scales, are counted before they are loaded and after."""
    use_kernels(monkeypatch)
    pair = made(tmp_path, hidden_size=256)
    loaded = engine(pair, dtype="bfloat16", draft_quantization=asked)
    draft = draft_of(loaded)
    layer = draft.layers[0]
    products = [layer.attention.qkv, layer.attention.o, layer.gate_up, layer.down, draft.lm_head]
    assert all(isinstance(weight, QuantisedWeight) and weight.data.dtype == kind for weight in products)
    target = loaded.core.runner.forward.target
    stored = load_file(pair.draft / "model.safetensors")
    shapes = [tensor.shape for name, tensor in stored.items() if is_linear(name)]

    def in_8_bits(out: int, size: int) -> int:
        return out * (size + 4 * (size // (group or size)))

    layers = sum(in_8_bits(*shape) for shape in shapes)
    others = sum(tensor.numel() * 2 for name, tensor in stored.items() if not is_linear(name))
    weights = CheckpointWeights(Checkpoint(pair.draft), torch.device("cpu"), torch.bfloat16)
    backend = loaded.core.runner.backend
    assert weights.num_bytes(backend.multiplies, to=kind) == layers + others
    assert backend.quantised_bytes == layers + in_8_bits(*target.lm_head.shape)
    assert all(isinstance(weight, torch.Tensor) for weight in (draft.fc, draft.context_kv, target.lm_head))


def test_its_weights_are_the_nearest_of_e4m3_with_a_scale_for_128_numbers() -> None:
    """Groups are tenfold apart, so that another's scale would show. One is of zeros."""
    weight = torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 4)[:, None]
    weight[0, 0] = 0.0
    rounded = QuantisedWeight.rounded(weight.flatten(1).bfloat16(), E4M3)
    groups, scales = weight.bfloat16().float(), rounded.scales[..., None]
    assert torch.equal(rounded.scales[1:], groups[1:].abs().amax(2) / 448)
    finite = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = finite[finite.isfinite()]
    least = (groups[..., None] / scales[..., None] - finite).abs().amin(-1)
    assert torch.equal((groups / scales - rounded.data.float().view(3, 4, 128)).abs(), least)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_it_drafts_nearly_what_the_reference_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    use_kernels(monkeypatch)
    pair = made(tmp_path)
    blocks = drafted_by(engine(pair, dtype="bfloat16", draft_quantization=kind).core, requests_about_the_window(1, 5))
    share = share_of_right_drafts(blocks, pair)
    print(f"{share:.2f} of the drafts of {len(blocks)} blocks")
    assert len(blocks) >= 2 and share >= 0.75


@pytest.mark.parametrize("how", [EAGER, pytest.param(GRAPHS, marks=pytest.mark.slow)], ids=["eager", "graphs"])
def test_drafts_in_8_bits_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    use_kernels(monkeypatch, InvariantCudaBackend)
    pair = made(tmp_path, vocab_size=6)
    sizes = {"dtype": "bfloat16", "batch_invariant": True}
    off = run_engine(engine(pair, draft=False, **sizes), requests(max_tokens=5))
    drafting = engine(pair, **sizes, **how)
    assert isinstance(draft_of(drafting).lm_head, QuantisedWeight)
    on = run_engine(drafting, requests(max_tokens=5))
    assert on.texts == off.texts and on.verify_steps > 0
