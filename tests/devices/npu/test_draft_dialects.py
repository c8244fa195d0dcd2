"""Drafts with sliding layers on device "npu:0" are the dense reference's, eagerly and from graphs (sparse_mode 4)."""

from typing import Any

import pytest
import torch_npu

from tests.costs import landing_ones
from tests.devices.npu.engines import engine
from tests.fast.engine.dialects import DIALECTS, WINDOW
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts

SLIDING = "one sliding layer, causal inside the block"
BOTH_WAYS = "sliding and not causal, by is_causal"


SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 200, "max_graphs": 2}


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize(
    ("name", "eager"),
    [
        *((SLIDING, True), (BOTH_WAYS, False), ("DFlash2, sliding", False)),
        *(("DSpark, gated", False), ("DSpark, speculators, reduced vocabulary", False)),
        *(
            pytest.param(name, eager, marks=pytest.mark.slow)
            for name, eager in (
                *((SLIDING, False), ("speculators", False), ("DFlash2, sliding", True), ("DFlash2 with a cap", False)),
                *(("DSpark, vanilla", True), ("DSpark, rnn", False)),
            )
        ),
    ],
)
def test_drafts_are_the_references(tmp_path, name, eager):
    """Contexts are longer than the window and cross a page of 128 tokens."""
    pair = DIALECTS[name].make(tmp_path, head_dim=64)
    core = engine(pair, dtype="float32", enforce_eager=eager, **SIZES)
    blocks = drafted_by(core, requests_about_the_window(2, 8, shared=100))
    lengths = {len(block.token_ids) for block in blocks}
    assert min(lengths) < 128 < max(lengths)
    assert share_of_right_drafts(blocks, pair) == 1.0


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("eager", landing_ones([True, False], (False,)))
def test_drafts_from_separate_pages_are_the_references(tmp_path, eager):
    """The page before the window is released while the prompt is read, and others take it."""
    pair = DIALECTS["use_swa"].make(tmp_path, head_dim=64)
    sizes = {"max_num_seqs": 2, "max_model_len": 500, "max_graphs": 2, "max_num_batched_tokens": 64}
    core = engine(pair, dtype="float32", enforce_eager=eager, **sizes)
    assert core.scheduler.draft_pages
    blocks = drafted_by(core, requests_about_the_window(3, 8, shared=260))
    assert len(blocks) > 15 and share_of_right_drafts(blocks, pair) == 1.0


@pytest.mark.usefixtures("numerics")
def test_calls_of_sliding_and_of_full_layers_differ_in_the_mask_alone(tmp_path, monkeypatch):
    pair = DIALECTS[SLIDING].make(tmp_path, head_dim=64)
    calls: list[dict[str, Any]] = []
    attend = torch_npu.npu_fused_infer_attention_score

    def attended(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return attend(*args, **kwargs)

    eager = engine(pair, enforce_eager=True, **SIZES)
    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", attended)
    eager.run(requests_about_the_window(1, 8))
    kinds = {(call["sparse_mode"], call["pre_tokens"], call["next_tokens"]) for call in calls}
    everything = 2**31 - 1
    assert kinds == {(3, everything, everything), (0, everything, everything), (4, WINDOW - 1, 0)}
