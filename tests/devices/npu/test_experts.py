"""A mixture of experts on device "npu:0" is the reference's; test_engine.py has the tokens of such targets."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu

from app.engine.device.base import ExpertWeights
from app.engine.device.moe import MoeConfig, mixture
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from tests.devices.npu.engines import engine, requests
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.pairs import GPT_OSS, make_pair

MOE = MoeConfig(num_experts=8, num_experts_per_tok=3, intermediate_size=16, norm_topk_prob=True)
OPERATORS = {
    "aclnnMoeGatingTopKSoftmaxV2": 1,
    "aclnnMoeInitRoutingV3": 1,
    "aclnnGroupedMatmulV5": 2,
    "aclnnSwiGlu": 1,
    "aclnnMoeTokenUnpermute": 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_topk_prob": False}, {"has_bias": True, "swiglu_limit": 0.5}, {"swiglu_limit": math.inf}],
    ids=str,
)
def test_a_mixture_is_the_reference_and_the_host_waits_for_nothing(numerics, changes, dtype):
    moe, backend = replace(MOE, **changes), NpuBackend(torch.device("npu:0"))
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 24), (8, 32, 24), (8, 24, 16), *([(8,), (8, 32), (8, 24)] if moe.has_bias else [])]
    tensors = [torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
    kinds = [torch.float32, dtype, dtype, *[torch.float32] * 3]
    tensors = [tensor.to(kind) for tensor, kind in zip(tensors, kinds, strict=False)]
    x = torch.randn(5, 24, generator=generator).to(dtype)
    on_npu = [tensor.to("npu:0") for tensor in tensors]
    for i in (1, 2):
        on_npu[i] = backend.empty_experts(on_npu[i], *tensors[i].shape).copy_(on_npu[i])
    rows = x.to("npu:0")
    with traced() as trace:
        found = backend.moe(rows, ExpertWeights(*on_npu), moe)
    wanted = mixture(x.float(), ExpertWeights(*(tensor.float() for tensor in tensors)), moe)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(found.cpu().float(), wanted, **close)
    assert trace.waits == []
    if not changes:
        assert {name: trace.launches[name] for name in OPERATORS} == OPERATORS, trace.launches


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 1, "num_experts_per_tok": 1}, "num_experts 1: .* at least 2"),
        ({"num_experts": 2048, "num_experts_per_tok": 1025}, "num_experts_per_tok 1025"),
        ({"intermediate_size": 32768}, "intermediate_size 65536"),
    ],
    ids=str,
)
def test_sizes_that_the_operators_do_not_take_are_refused_by_name(changes: dict[str, int], named: str) -> None:
    backend = NpuBackend(torch.device("npu:0"))

    def check(moe: MoeConfig, hidden_size: int) -> None:
        decoder = SimpleNamespace(head_dim=128, moe=moe, hidden_size=hidden_size)
        backend.check(decoder, 16, 128, torch.bfloat16)

    check(MOE, 24)
    with pytest.raises(UnsupportedError, match=named):
        check(replace(MOE, **changes), 24)
    with pytest.raises(UnsupportedError, match="hidden_size 65536"):
        check(MOE, 65536)


def test_biases_and_sinks_are_cast_once_when_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tmp_path, **GPT_OSS | {"head_dim": 64})
    given: dict[str, set[int]] = {"bias": set(), "learnable_sink": set()}

    def watched(name: str, key: str) -> None:
        called = getattr(torch_npu, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            each = kwargs[key]
            given[key] |= {tensor.data_ptr() for tensor in (each if isinstance(each, list) else [each])}
            return called(*args, **kwargs)

        monkeypatch.setattr(torch_npu, name, call)

    watched("npu_grouped_matmul", "bias")
    watched("npu_fused_infer_attention_score_v2", "learnable_sink")
    with torch.inference_mode(), Numerics():
        core = engine(pair, enforce_eager=True)
        for kept in given.values():
            kept.clear()
        core.run(requests()[:1])
        layers = core.runner.forward.target.layers
    biases = [tensor for layer in layers for tensor in (layer.mixture[1].gate_up_bias, layer.mixture[1].down_bias)]
    assert given["bias"] == {bias.data_ptr() for bias in biases}
    assert given["learnable_sink"] == {layer.attention.sinks.data_ptr() for layer in layers}
