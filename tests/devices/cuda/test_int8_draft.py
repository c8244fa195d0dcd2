"""A draft in bfloat16 is in int8 on a GPU from Hopper on: it drafts nearly the same, and no text changes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend
from app.engine.dflash.model import DFlashModel
from app.engine.load.engine import Engine
from app.engine.load.plan import rounds_draft
from app.engine.quantised import QuantisedWeight
from tests.devices.cuda.engines import GRAPHS, engine, requests, use_kernels
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import Pair, make_pair

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
    ("capability", "dtype", "hidden", "is_rounded"),
    [
        ((9, 0), torch.bfloat16, 128, True),
        ((10, 0), torch.bfloat16, 128, True),
        ((8, 9), torch.bfloat16, 128, False),
        ((9, 0), torch.float16, 128, False),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 192, False),
    ],
    ids=str,
)
def test_auto_rounds_a_draft_in_bfloat16_whose_columns_are_groups_on_hopper_and_later(
    capability: tuple[int, int], dtype: torch.dtype, hidden: int, is_rounded: bool
) -> None:
    backend = CudaBackend(torch.device("cpu"))
    backend.capability = capability
    draft: Any = SimpleNamespace(decoder=SimpleNamespace(hidden_size=hidden))
    for asked, expected in (("auto", is_rounded), ("none", False), ("int8", True)):
        config = EngineConfig(Path("target"), draft_quantization=asked)
        assert rounds_draft(config, draft, dtype, backend) == expected


def test_layers_and_a_copy_of_the_head_are_in_int8_and_what_reads_features_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch)
    loaded = engine(made(tmp_path), dtype="bfloat16")
    draft = draft_of(loaded)
    layer = draft.layers[0]
    products = [layer.attention.qkv, layer.attention.o, layer.gate_up, layer.down, draft.lm_head]
    assert all(isinstance(weight, QuantisedWeight) and weight.data.dtype == torch.int8 for weight in products)
    target = loaded.core.runner.forward.target
    assert all(isinstance(weight, torch.Tensor) for weight in (draft.fc, draft.context_kv, target.lm_head))


def test_it_drafts_nearly_what_the_reference_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    pair = made(tmp_path)
    blocks = drafted_by(engine(pair, dtype="bfloat16").core, requests_about_the_window(1, 5))
    share = share_of_right_drafts(blocks, pair)
    print(f"{share:.2f} of the drafts of {len(blocks)} blocks")
    assert len(blocks) >= 2 and share >= 0.75


def test_drafts_in_int8_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, InvariantCudaBackend)
    pair = made(tmp_path, vocab_size=6)
    sizes = {"dtype": "bfloat16", "batch_invariant": True}
    off = run_engine(engine(pair, draft=False, **sizes), requests(max_tokens=5))
    drafting = engine(pair, **sizes, **GRAPHS)
    assert isinstance(draft_of(drafting).lm_head, QuantisedWeight)
    on = run_engine(drafting, requests(max_tokens=5))
    assert on.texts == off.texts and on.verify_steps > 0
