"""Prompts are read without masks where that was timed, by ours or by PyTorch's `varlen_attn`, which has a double."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import app.engine.load.engine as build
from app.engine.cuda import attention, prefill, timed_launches
from app.engine.cuda import backend as backend_module
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.prefill import Ragged
from app.engine.device.base import AttentionMask, Heads
from tests.devices.cuda.pages import Paged
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.lossless import make_engine, run_engine
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


def backend_of(way: tuple[int, ...] | None) -> CudaBackend:
    backend = CudaBackend(CPU)
    backend._prompts = {} if way is None else {False: way, True: way}
    return backend


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("way", [None, *timed_launches.PROMPT_WAYS], ids=str)
@pytest.mark.parametrize("window", [None, 9, 64])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_each_way_is_a_softmax_over_each_sequences_own_tokens(
    lengths: Any, window: int | None, way: tuple[int, ...] | None
) -> None:
    backend = backend_of(way)
    case = Paged(*lengths, window=window, garbage=0.0 if way is None else math.nan)
    plan = case.meta.plans[case.mask] = backend.plan_attention(case.meta, case.mask, 2)
    assert (type(plan) is Ragged, plan is None) == (way == timed_launches.RAGGED, way == timed_launches.OURS)
    if isinstance(plan, Ragged):
        seen = [min(kv, q + (window or kv) - 1) for q, kv in zip(*lengths, strict=True)]
        assert plan.cu_k.tolist() == [0, *itertools.accumulate(seen)] and len(plan.slots) == sum(seen)
    found = backend.attention(case.q, case.kv, case.meta, case.mask)
    torch.testing.assert_close(found.double(), case.expected, atol=2e-6, rtol=2e-6)


def test_pytorchs_own_function_takes_the_arguments() -> None:
    """On tensors without memory, because it has no kernel for a CPU. Windows, and heads that share K and V."""
    for window in (None, 9):
        case = Paged([40, 17], [90, 17], window=window, dtype=torch.bfloat16)
        plan = prefill.ragged(case.meta, window)
        cu_q, cu_k, slots = (x.to("meta") for x in (plan.cu_q, plan.cu_k, plan.slots))
        on_meta = Ragged(cu_q, cu_k, slots, plan.max_q, plan.max_k, window)
        kv = type(case.kv)(case.kv.k.to("meta"), case.kv.v.to("meta"))
        assert prefill.attention(case.q.to("meta"), kv, on_meta).shape == case.q.shape


@pytest.mark.usefixtures("double")
def test_long_prompts_have_a_way_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_launches, "LONG", 90)
    backend = backend_of(None)
    backend._prompts = {True: timed_launches.RAGGED}
    for tokens in (90, 91):
        case = Paged([33, 20], [tokens, 20])
        assert isinstance(backend.plan_attention(case.meta, case.mask, 2), Ragged) == (tokens > 90)
    operands: list[list[int]] = []
    monkeypatch.setattr(
        timed_launches, "_paged", lambda *args: operands.append([max(args[-2])]) or (None, None, case.meta)
    )
    for is_long in (False, True):
        asked = timed_launches.prompts(
            Heads(4, 2, 16), torch.zeros(1), 16, lambda *_: None, lambda *_: torch.zeros(1), is_long=is_long
        )
        asked.run(None)
    assert operands[0] <= [4096] < operands[1], "each is timed on its side of the border"


@pytest.mark.usefixtures("double")
def test_more_tokens_than_may_be_gathered_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, case = backend_of(timed_launches.RAGGED), Paged([33, 20], [90, 20])
    both_ways = AttentionMask(causal=False)
    assert not isinstance(backend.plan_attention(case.meta, both_ways, 2), Ragged)
    monkeypatch.setattr(CudaBackend, "max_gathered_tokens", 109)
    assert not isinstance(backend.plan_attention(case.meta, case.mask, 2), Ragged)


@pytest.mark.parametrize("wrong", [{}, {"aligned": "top left"}, {"wider": 1}], ids=str)
def test_a_kernel_that_counts_rows_from_the_first_token_or_has_other_windows_is_found_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    """Every other way is quicker here. The chunk behind other tokens tells, or a window that is compared too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timed_launches, "PROMPTS", {False: ([40, 20], [40, 50]), True: ([20], [90])})
    monkeypatch.setattr(
        timed_launches, "PROMPT_WAYS", {timed_launches.RAGGED: timed_launches.PROMPT_WAYS[timed_launches.RAGGED]}
    )
    monkeypatch.setattr(prefill, "_kernel", lambda: lambda *args, **how: varlen_attn(*args, **how, **wrong))
    monkeypatch.setattr(timed_launches, "of_engine", lambda *_, **__: {None: None})
    backend, took = backend_of(None), iter((1.0, 0.1, 1.0, 0.1))
    found = backend.questions([Heads(4, 2, 16)], {"o": [torch.zeros(64, 64, dtype=torch.bfloat16)]}, 2, 16)
    _, *keys = found
    assert all(isinstance(key, timed_launches.OfPrompts) for key in keys), "decode steps come first, because time ends"
    monkeypatch.setattr(CudaBackend, "questions", lambda *_: {key: found[key] for key in keys})
    shown = backend.tune([], {}, 2, 16, lambda call: call() is None or next(took))
    assert list(shown.values()) == ["default" if wrong else "PyTorch's varlen_attn"] * 2
    assert backend._prompts == ({} if wrong else {False: timed_launches.RAGGED, True: timed_launches.RAGGED})


def test_nothing_is_asked_about_prompts_of_a_model_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_launches, "of_engine", lambda *_, **__: {None: None})
    backend = backend_of(None)
    of_model = [Heads(4, 2, 16)], {"o": [torch.zeros(64, 64, dtype=torch.bfloat16)]}, 2, 16
    assert len(backend.questions(*of_model)) == 3
    backend.pack_sinks(torch.zeros(4))
    assert len(backend.questions(*of_model)) == 1


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("way", timed_launches.PROMPT_WAYS, ids=str)
def test_texts_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: tuple[int, ...]) -> None:
    """Prompts of 40 and 30 tokens are read in chunks behind one another, with drafts."""
    pair = make_pair(
        tmp_path, seed=34, vocab_size=6, num_layers=2, draft_layers=1, taps=(0,), own_head=True, num_kv_heads=1
    )
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 4, "kv_cache_memory": 1 << 20}
    sizes |= {"enforce_eager": True, "max_num_batched_tokens": 24}
    asked = [flat_request(f"r{i}", tuple(j * j % 3 for j in range(40 - 10 * i)), max_tokens=6) for i in range(2)]
    expected = run_engine(make_engine(pair.target, None, **sizes), asked).texts
    monkeypatch.setattr(build, "make_backend", lambda device, **_: backend_of(way))
    monkeypatch.setattr(build, "check_attention", lambda *_: None)
    monkeypatch.setattr(build, "_warm_up", lambda *_: None)
    used: list[int] = []
    module, name = (prefill, "attention") if way == timed_launches.RAGGED else (backend_module, "paged_attention")
    own = getattr(module, name)
    monkeypatch.setattr(module, name, lambda q, *rest: used.append(len(q)) or own(q, *rest))
    run = run_engine(make_engine(pair.target, pair.draft, **sizes), asked)
    assert run.texts == expected and max(used) > attention.TILE_ROWS
