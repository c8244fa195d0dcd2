"""The whole engine on device "npu:0": what it takes from a backend, and that its tokens are the CPU engine's.

`OnNpu` is the torch backend moved there; `Fused` calls the operators of docs/npu-contract.md instead. Both are as small
as they can be, to prove the harness; the server's own backend is app/engine/npu.
"""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

import app.engine.build as build
from app.engine.backend import AttnMeta, Backend, Defaults, LayerKv
from app.engine.config import EngineConfig
from app.engine.sequence import Request
from app.engine.torch_backend import TorchBackend
from tests.engine.pairs import Pair, make_pair
from tests.npu.calls import causal_mask
from tests.npu.null_device import traced
from tests.npu.numerics import Numerics

PAGE = 128


class OnNpu(TorchBackend):
    def __init__(self, device: torch.device) -> None:
        Backend.__init__(self, device)
        self.defaults = Defaults(dtype=torch.float32, page_size=PAGE, max_num_seqs=4)

    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        copied = torch.npu.Event()
        copied.record()

        def wait() -> Tensor:
            copied.synchronize()
            return host

        return wait

    def memory(self) -> tuple[int, int]:
        return torch.npu.mem_get_info(self.device)


class Fused(OnNpu):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._mask = causal_mask()

    def plan_attention(self, meta: AttnMeta, group: int) -> dict[str, Any]:
        mask = {"atten_mask": self._mask, "sparse_mode": 3} if meta.causal else {"sparse_mode": 0}
        ends, kv_lens = list(accumulate(meta.q_lens)), list(meta.kv_lens)
        return {"actual_seq_lengths": ends, "actual_seq_lengths_kv": kv_lens, "block_table": meta.page_table, **mask}

    def attention(self, q_thd: Tensor, kv: LayerKv, meta: AttnMeta) -> Tensor:
        pages, page, kv_heads, dim = kv.k.shape
        k, v = (pool.view(pages, page, kv_heads * dim) for pool in (kv.k, kv.v))
        more = {"scale": dim**-0.5, "input_layout": "TND", "block_size": page, **meta.plan}
        heads = {"num_heads": q_thd.shape[1], "num_key_value_heads": kv_heads}
        return torch_npu.npu_fused_infer_attention_score(q_thd.contiguous(), k, v, **heads, **more)[0]

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slots: Tensor) -> None:
        k, v = k_thd.contiguous(), v_thd.contiguous()
        torch_npu.npu_scatter_pa_kv_cache(k, v, kv.k, kv.v, slots.contiguous(), cache_mode="Norm")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch_npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return y, total

    def rope(self, x_thd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch_npu.npu_rotary_mul(x_thd.contiguous(), cos, sin)

    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return self.linear(torch_npu.npu_swiglu(self.linear(x, gate_up)), down)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, head_dim=64, num_layers=3, draft_layers=1, taps=(0, 1))


def engine(pair: Pair, **config: Any) -> Any:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory": 8 << 20, "dtype": "float32"}
    return build.build_engine(EngineConfig(target=pair.target, draft=pair.draft, **sizes | config)).core


def requests() -> list[Request]:
    prompts = [tuple(range(1, 12)), tuple(range(30, 75)), (5, 6, 5, 6, 5, 6), tuple(range(1, 90))]
    return [
        Request(f"r{i}", prompt, max_tokens=12, temperature=0.7 * (i == 2), seed=i) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("backend", [OnNpu, Fused])
def test_tokens_on_the_null_device_are_the_cpu_engines(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, backend: type[Backend]
) -> None:
    wanted = engine(pair, device="cpu").run(requests())
    monkeypatch.setattr(build, "make_backend", lambda name: backend(torch.device(name)))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        assert engine(pair, device="npu:0").run(requests()) == wanted


def test_every_rule_holds_for_the_engine_in_bfloat16(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "make_backend", lambda name: Fused(torch.device(name)))
    with torch.inference_mode(), Numerics():
        tokens = engine(pair, device="npu:0", dtype="bfloat16").run(requests())
    assert {len(ids) for ids in tokens.values()} == {12}


def test_the_fused_operators_are_what_a_step_launches(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "make_backend", lambda name: Fused(torch.device(name)))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        core = engine(pair, device="npu:0")
        for request in requests():
            core.add(request)
        while core.step().kind != "decode":
            pass
        with traced() as trace:
            core.step()
    layers = 3 + 1
    assert trace.launches["aclnnFusedInferAttentionScoreV3"] == layers
    assert trace.launches["aclnnSwiGlu"] == layers
    assert [wait for wait in trace.waits if wait.startswith("d2h")] == []
    assert trace.waits.count("aclrtSynchronizeEvent") == 1
