"""A model whose attention with sinks no graph can hold runs without graphs, and the log says so."""

import logging
from typing import Any

import pytest

from tests.devices.npu.engines import engine, requests
from tests.fast.engine.pairs import GPT_OSS, make_pair

SHAPE: dict[str, Any] = {"head_dim": 64, "num_layers": 2, "draft_layers": 1, "taps": (0,)}
WORKSPACE = "torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace"


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize(("code", "runs"), [(561002, True), (507015, False)])
def test_sinks_that_tiling_refuses_in_a_graph_leave_steps_eager(tmp_path, monkeypatch, caplog, code, runs):
    """Any other error ends the start."""
    pair = make_pair(tmp_path, **GPT_OSS | SHAPE)
    wanted = engine(pair, enforce_eager=True).run(requests())

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"call aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize failed, error code is {code}")

    monkeypatch.setattr(WORKSPACE, refuse)
    if not runs:
        with pytest.raises(RuntimeError, match="507015"):
            engine(pair)
        return
    with caplog.at_level(logging.WARNING):
        core = engine(pair)
    assert core.runner.graphs is None and core.runner.layout.graphs is None
    assert "steps run without graphs: target of 4 sequences" in caplog.text and "561002: " in caplog.text
    assert core.run(requests()) == wanted
