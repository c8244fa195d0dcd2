"""`--npu-chunk-prefill` on device "npu:0": prompts through the NPU's own operator, with states in bfloat16.

Checked with torch_npu 2.13.0 on the null device; not run on an Ascend device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

import app.engine.load.engine as build
from app.engine.device.delta_rule import delta_rule
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from app.engine.npu.gated_delta import TOLERANCE, check_chunk_operator, chunk_delta_rule
from app.engine_config import EngineConfig
from app.messages import Request
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import Pair, make_pair

NPU = torch.device("npu:0")
WIDE = {"k_heads": 1, "v_heads": 2, "k_dim": 128, "v_dim": 128, "head_dim": 64, "block_size": 8, "vocab_size": 5}
LAUNCH = "aclnnChunkGatedDeltaRule"


def engine(pair: Pair, **config: Any) -> Any:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "kv_cache_memory": 8 << 20, "max_model_len": 256}
    wishes = {"target": pair.target, "draft": pair.draft, "device": "npu:0", "npu_chunk_prefill": True}
    return build.build_engine(EngineConfig(**wishes | sizes | config, enforce_eager=True)).core


@pytest.mark.usefixtures("numerics")
def test_rows_are_the_references_but_for_bfloat16_and_the_host_waits_for_none() -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 40, heads, 128, generator=draw) for heads in (2, 2, 6))
    gates = -torch.rand(1, 40, 6, generator=draw), torch.rand(1, 40, 6, generator=draw)
    state = torch.randn(1, 6, 128, 128, generator=draw)
    given = [x.to(NPU) for x in (q, k, v, *gates, state)]
    chunk_delta_rule(*given)  # makes the weight of the norm
    with traced() as trace:
        found = chunk_delta_rule(*given)
    assert trace.waits == [] and trace.launches[LAUNCH] == 1
    for x, wanted in zip(found, delta_rule(q, k, v, *gates, state), strict=True):
        assert 0 < float((x.cpu() - wanted).abs().max() / wanted.abs().max()) < TOLERANCE


@pytest.mark.usefixtures("numerics")
def test_the_probe_takes_the_operator_and_refuses_a_missing_or_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    check_chunk_operator(NPU)
    right = torch_npu.npu_chunk_gated_delta_rule

    def of_other_heads(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        return right(*(torch.cat((x[:, 1:], x[:, :1]), dim=1) for x in (q, k)), v, **rest)

    for wrong in (lambda q, k, v, **rest: right(k, q, v, **rest), of_other_heads):
        monkeypatch.setattr(torch_npu, right.__name__, wrong)
        with pytest.raises(UnsupportedError, match=r"--npu-chunk-prefill: .* of the largest value away from PyTorch"):
            check_chunk_operator(NPU)

    def silent(*args: Any, **rest: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(torch_npu, right.__name__, silent)
    with pytest.raises(UnsupportedError, match="does not run here: RuntimeError"):
        check_chunk_operator(NPU)
    monkeypatch.delattr(torch_npu, right.__name__)
    with pytest.raises(UnsupportedError, match="--npu-chunk-prefill: npu_chunk_gated_delta_rule does not run here"):
        check_chunk_operator(NPU)


def test_prompts_alone_go_through_it_and_one_that_runs_alone_is_cut_alike_with_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    pair = make_hybrid_pair(tmp_path, **WIDE)
    request = Request("long", tuple(i * i % 5 for i in range(150)), 12)
    launches, texts = [], []
    for wishes in ({}, {"draft": None}, {"npu_chunk_prefill": False}):
        with torch.inference_mode(), Numerics(lift=["N7"]), traced() as trace:
            texts.append(engine(pair, dtype="float32", **wishes).run([request]))
        launches.append(trace.launches[LAUNCH])
    assert texts[0] == texts[1]
    assert launches[0] == launches[1] > 3 * 3, "three chunks in each of three layers, and the probe"
    assert launches[2] == 0


def test_wishes_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--npu-chunk-prefill: --device cpu is no NPU"):
        engine(make_hybrid_pair(tmp_path / "cpu", **WIDE), device="cpu")
    with pytest.raises(UnsupportedError, match="--npu-chunk-prefill: 2 heads of 64 and 128 in recurrent layers"):
        engine(make_hybrid_pair(tmp_path / "narrow", **WIDE | {"k_dim": 64}))
    with pytest.raises(UnsupportedError, match="--npu-chunk-prefill: the target has no recurrent layers"):
        engine(make_pair(tmp_path / "dense", head_dim=64, block_size=8))
