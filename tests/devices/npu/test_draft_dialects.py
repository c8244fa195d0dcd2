"""Drafts with sliding layers on device "npu:0" are the dense reference's, eagerly and from graphs (sparse_mode 4)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

from app.config.engine import EngineConfig
from app.engine.load.engine import Engine, build_engine
from app.engine.npu.backend import NpuBackend
from tests import UNTIMED
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.dialects import DIALECTS, WINDOW
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.pairs import Pair

SLIDING = "one sliding layer, causal inside the block"
BOTH_WAYS = "sliding and not causal, by is_causal"


def engine(pair: Pair, **settings: Any) -> Engine:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "kv_cache_memory": 8 << 20, "max_model_len": 200}
    wishes = {"device": "npu:0", "dtype": "float32", "max_graphs": 2} | sizes | settings
    return build_engine(EngineConfig(pair.target, pair.draft, **UNTIMED | wishes))


@pytest.mark.parametrize(
    ("name", "eager"), [(SLIDING, True), (SLIDING, False), (BOTH_WAYS, False), ("speculators", False)]
)
def test_drafts_are_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, eager: bool) -> None:
    """Contexts are longer than the window and cross a page of 128 tokens."""
    pair = DIALECTS[name].make(tmp_path, head_dim=64)
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        blocks = drafted_by(engine(pair, enforce_eager=eager), requests_about_the_window(2, 8, shared=100))
    lengths = {len(block.token_ids) for block in blocks}
    assert min(lengths) < 128 < max(lengths)
    assert share_of_right_drafts(blocks, pair) == 1.0


def test_calls_of_sliding_and_of_full_layers_differ_in_the_mask_alone(tmp_path, monkeypatch):
    pair = DIALECTS[SLIDING].make(tmp_path, head_dim=64)
    calls: list[dict[str, Any]] = []
    attend = torch_npu.npu_fused_infer_attention_score

    def attended(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return attend(*args, **kwargs)

    with torch.inference_mode(), Numerics():
        eager = engine(pair, dtype="bfloat16", enforce_eager=True)
        monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", attended)
        eager.core.run(requests_about_the_window(1, 8))
    kinds = {(call["sparse_mode"], call["pre_tokens"], call["next_tokens"]) for call in calls}
    everything = 2**31 - 1
    assert kinds == {(3, everything, everything), (0, everything, everything), (4, WINDOW - 1, 0)}
