"""Prompts are read without masks by PyTorch's `varlen_attn`, which has a double, or else by attention with masks."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.cuda import attention, prefill
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.prefill import Packed
from app.engine.device.base import AttentionMask
from tests.devices.cuda.engines import DENSE, engine, use_kernels
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.paged import Paged
from tests.fast.engine.pairs import make_pair

torch.set_num_threads(1)

CPU = torch.device("cpu")
LENGTHS = {
    "whole prompts": ([40, 17], [40, 17]),
    "a chunk behind others, beside a whole prompt": ([33, 20], [90, 20]),
    "one long chunk": ([35], [120]),
}


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    aligned: str = "bottom right",
    wider: int = 0,
) -> Tensor:
    """Return what PyTorch's documents: rows are the last of their sequence's tokens, and windows are (left, right)."""
    assert q.is_contiguous() and cu_q.dtype == cu_k.dtype == torch.int32 and window_size[1] == 0
    parts = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        assert q1 - q0 <= max_q and k1 - k0 <= max_k
        rows, tokens = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
        distance = rows + (len(tokens) - len(rows) if aligned == "bottom right" else 0) - tokens
        seen = (distance >= 0) & (distance <= (window_size[0] + wider if window_size[0] >= 0 else math.inf))
        own_k, own_v = (x[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1].float(), own_k.float()) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=2)
        parts.append(torch.einsum("hqk,khd->qhd", weights, own_v.float()).to(q.dtype))
    return torch.cat(parts)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_kernel", lambda: varlen_attn)


def backend_of(*, packs: bool) -> CudaBackend:
    backend = CudaBackend(CPU)
    backend.packs_prompts = packs
    return backend


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("window", [None, 9, 64])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_prompts_are_a_softmax_over_each_sequences_own_tokens(lengths: Any, window: int | None, packs: bool) -> None:
    backend = backend_of(packs=packs)
    case = Paged(*lengths, window=window, garbage=math.nan if packs else 0.0)
    plan = case.meta.plans[case.mask] = backend.plan_attention(case.meta, case.mask, 2)
    assert isinstance(plan, Packed) == packs and plan is not None
    if isinstance(plan, Packed):
        seen = [min(kv, q + (window or kv) - 1) for q, kv in zip(*lengths, strict=True)]
        assert plan.cu_k.tolist() == [0, *itertools.accumulate(seen)] and len(plan.slots) == sum(seen)
    found = backend.attention(case.q, case.kv, case.meta, case.mask)
    torch.testing.assert_close(found.double(), case.expected, atol=2e-6, rtol=2e-6)


def test_pytorchs_own_function_takes_the_arguments() -> None:
    """On tensors without memory, because it has no kernel for a CPU. Windows, and heads that share K and V."""
    for window in (None, 9):
        case = Paged([40, 17], [90, 17], window=window, dtype=torch.bfloat16)
        plan = prefill.pack(case.meta, window)
        cu_q, cu_k, slots = (x.to("meta") for x in (plan.cu_q, plan.cu_k, plan.slots))
        on_meta = Packed(cu_q, cu_k, slots, plan.max_q, plan.max_k, window)
        kv = type(case.kv)(case.kv.k.to("meta"), case.kv.v.to("meta"))
        assert prefill.attention(case.q.to("meta"), kv, on_meta).shape == case.q.shape


@pytest.mark.usefixtures("double")
def test_more_tokens_than_may_be_gathered_and_bidirectional_layers_have_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, case = backend_of(packs=True), Paged([33, 20], [90, 20])
    assert not isinstance(backend.plan_attention(case.meta, AttentionMask(causal=False), 2), Packed)
    monkeypatch.setattr(CudaBackend, "max_gathered_tokens", 109)
    assert not isinstance(backend.plan_attention(case.meta, case.mask, 2), Packed)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({}, ""), ({"aligned": "top left"}, "window None"), ({"wider": 1}, "window 16"), ({"not_there": 1}, "TypeError")],
    ids=str,
)
def test_start_up_tries_the_kernel_and_one_that_is_wrong_or_raises_is_not_used(monkeypatch, caplog, wrong, reason):
    """The chunk after other tokens shows rows that count from the first token, and its window another width."""
    monkeypatch.setattr(prefill, "_kernel", lambda: lambda *args, **how: varlen_attn(*args, **how, **wrong))
    backend = backend_of(packs=True)
    with caplog.at_level("INFO"):
        backend.check(SimpleNamespace(head_dim=16, gated_delta=None), 16, 16, torch.bfloat16)
    assert backend.packs_prompts == (not wrong) and ("varlen_attn" in caplog.text) == bool(wrong)
    assert reason in prefill.why_not(CPU, torch.bfloat16, 16)


def test_a_torch_or_a_device_without_the_kernel_float32_and_sinks_have_masks() -> None:
    assert prefill.why_not(CPU, torch.bfloat16, 16), "there is no kernel for a CPU"
    assert "16 bits" in prefill.why_not(CPU, torch.float32, 16)
    backend = backend_of(packs=True)
    backend.pack_sinks(torch.zeros(4))
    assert not backend.packs_prompts and not CudaBackend(CPU).packs_prompts


@pytest.mark.usefixtures("double")
def test_texts_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 40 and 30 tokens are read in chunks, one after another, with drafts."""
    pair, sizes = make_pair(tmp_path, **DENSE), {"page_size": 4, "max_num_batched_tokens": 24}
    asked = [flat_request(f"r{i}", tuple(j * j % 3 for j in range(40 - 10 * i)), max_tokens=6) for i in range(2)]
    expected = run_engine(engine(pair, draft=False, **sizes), asked).texts
    monkeypatch.setattr(prefill, "why_not", lambda *_: "")
    use_kernels(monkeypatch, lambda _: backend_of(packs=True))
    used: list[int] = []
    own = prefill.attention
    monkeypatch.setattr(prefill, "attention", lambda q, *rest: used.append(len(q)) or own(q, *rest))
    run = run_engine(engine(pair, **sizes), asked)
    assert run.texts == expected and max(used) > attention.TILE_ROWS
