"""A model whose attention with sinks no graph can hold runs without graphs, and the log says so."""

import logging
from typing import Any

import pytest
import torch_npu
from torch.utils._python_dispatch import _get_current_dispatch_mode

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


@pytest.mark.usefixtures("numerics")
def test_attention_without_sinks_that_tiling_refuses_in_a_graph_ends_the_start(tmp_path, monkeypatch) -> None:
    """It is a bug of this server, and must not hide in a slower one."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("call aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize failed, error code is 561002")

    monkeypatch.setattr(WORKSPACE.replace("_v2", ""), refuse)
    with pytest.raises(RuntimeError, match="561002"):
        engine(make_pair(tmp_path, **SHAPE))


@pytest.mark.usefixtures("numerics")
def test_a_refused_capture_that_cannot_be_ended_either_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    """The refusal is told, not the end's error. An eager call on the capture's stream or in its mode would hang."""
    pair = make_pair(tmp_path, **GPT_OSS | SHAPE)
    wanted = engine(pair, enforce_eager=True).run(requests())
    stream, mode, end = torch_npu.npu.current_stream(), _get_current_dispatch_mode(), torch_npu.npu.NPUGraph.capture_end

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("call aclnnFusedInferAttentionScoreV4 failed, error code is 561002")

    def fail(graph: Any) -> None:
        end(graph)
        raise RuntimeError("AclmdlRICaptureEnd, error code is 507903")

    monkeypatch.setattr(WORKSPACE, refuse)
    monkeypatch.setattr(torch_npu.npu.NPUGraph, "capture_end", fail)
    with caplog.at_level(logging.WARNING):
        core = engine(pair)
    assert core.runner.graphs is None and "561002: " in caplog.text
    assert core.runner.backend._attended is None, "eager calls would be noted for ever"
    assert torch_npu.npu.current_stream() == stream and _get_current_dispatch_mode() is mode
    assert core.run(requests()) == wanted
