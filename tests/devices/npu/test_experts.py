"""A target with experts on device "npu:0": its tokens are the CPU engine's, eager and from graphs.

Checked with torch_npu 2.13.0 on the null device; not run on an Ascend device.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

import app.engine.load.engine as build
from app.config.engine import EngineConfig
from app.engine.device.base import ExpertWeights
from app.engine.device.moe import MoeConfig, mixture
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from app.messages import Request, SamplingParams
from tests import UNTIMED
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.pairs import GPT_OSS, Pair, make_pair

MOE = MoeConfig(num_experts=8, num_experts_per_tok=3, intermediate_size=16, norm_topk_prob=True)
OPERATORS = {
    "aclnnMoeGatingTopKSoftmaxV2": 1,
    "aclnnMoeInitRoutingV3": 1,
    "aclnnGroupedMatmulV5": 2,
    "aclnnSwiGlu": 1,
    "aclnnMoeTokenUnpermute": 1,
}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    shape = {"seed": 22, "vocab_size": 5, "num_kv_heads": 4, "head_dim": 64, "tied": True, "own_head": True}
    return make_pair(tmp_path, block_size=16, num_layers=3, draft_layers=1, taps=(0, 1), experts=8, **shape)


def engine(pair: Pair, **config: Any) -> Any:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory": 8 << 20, "dtype": "float32"}
    return build.build_engine(EngineConfig(target=pair.target, draft=pair.draft, **UNTIMED | sizes | config)).core


def requests() -> list[Request]:
    prompts = [(1, 2, 3, 4), tuple(i % 5 for i in range(45)), (0, 1) * 3, tuple(i * i % 5 for i in range(90))]
    return [
        Request(f"r{i}", prompt, sampling=SamplingParams(temperature=0.7 * (i == 2), seed=i), max_tokens=16)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("eager", [True, False])
def test_tokens_on_the_null_device_are_the_cpu_engines(pair, monkeypatch, eager):
    wanted = engine(pair, device="cpu").run(requests())
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        assert engine(pair, device="npu:0", enforce_eager=eager).run(requests()) == wanted


def test_every_rule_holds_for_the_engine_in_bfloat16(pair: Pair) -> None:
    with torch.inference_mode(), Numerics():
        tokens = engine(pair, device="npu:0", dtype="bfloat16").run(requests())
    assert {len(ids) for ids in tokens.values()} == {16}


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
    kinds = [torch.float32, dtype, dtype, torch.float32, dtype, dtype]
    tensors = [tensor.to(kind) for tensor, kind in zip(tensors, kinds, strict=False)]
    x = torch.randn(5, 24, generator=generator).to(dtype)
    on_npu = [tensor.to("npu:0") for tensor in tensors]
    for i in (1, 2):
        on_npu[i] = backend.empty_experts(on_npu[i], *tensors[i].shape).copy_(on_npu[i])
    on_npu[4:] = map(backend.pack_expert_bias, on_npu[4:])
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
    backend.check_experts(MOE, 24)
    with pytest.raises(UnsupportedError, match=named):
        backend.check_experts(replace(MOE, **changes), 24)
    with pytest.raises(UnsupportedError, match="hidden_size 65536"):
        backend.check_experts(MOE, 65536)


def test_one_expert_alone_is_refused_before_weights_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tmp_path, head_dim=64, experts=1, experts_per_tok=1, num_layers=3, draft_layers=1, taps=(0, 1))
    monkeypatch.setattr(build, "_load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UnsupportedError, match="num_experts 1: "):
        engine(pair, device="npu:0", dtype="bfloat16")


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
        core = engine(pair, device="npu:0", dtype="bfloat16", enforce_eager=True)
        for kept in given.values():
            kept.clear()
        core.run(requests()[:1])
        layers = core.runner.forward.target.layers
    biases = [tensor for layer in layers for tensor in (layer._mixture[1].gate_up_bias, layer._mixture[1].down_bias)]
    assert given["bias"] == {bias.data_ptr() for bias in biases}
    assert given["learnable_sink"] == {layer.attention.sinks.data_ptr() for layer in layers}
