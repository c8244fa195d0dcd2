"""Experts on our kernels, in the interpreter: the reference's mixture, row by row, in every dtype."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.cuda import experts, products
from app.engine.cuda.backend import CudaBackend
from app.engine.device.base import ExpertWeights
from app.engine.device.moe import MoeConfig, Routing, mixture, route, routed
from app.engine.device.torch import TorchBackend
from app.engine.quantised import QuantisedWeight
from tests.costs import landing_ones
from tests.fast.engine.quantised import E4M3

torch.set_num_threads(1)

MOE = MoeConfig(num_experts=6, num_experts_per_tok=3, intermediate_size=24, norm_topk_prob=True)
HIDDEN = 40
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def made(moe: MoeConfig, rows: int, dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[Tensor, ExpertWeights]:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    count, inner = moe.num_experts, moe.intermediate_size
    tensors = [
        normal(count, hidden),
        normal(count, 2 * inner, hidden).to(dtype),
        normal(count, hidden, inner).to(dtype),
    ]
    biases = (
        [normal(count), normal(count, 2 * inner).to(dtype), normal(count, hidden).to(dtype)] if moe.has_bias else []
    )
    return torch.randn(rows, hidden, generator=generator).to(dtype), ExpertWeights(*tensors, *biases)


def wide(weights: ExpertWeights) -> ExpertWeights:
    names = ("router", "gate_up", "down", "router_bias", "gate_up_bias", "down_bias")
    tensors = (getattr(weights, name) for name in names)
    return ExpertWeights(*(None if tensor is None else tensor.float() for tensor in tensors))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1},
        {"has_bias": True, "swiglu_limit": 0.5},
        {"swiglu_limit": math.inf},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [1, 30])
def test_a_mixture_is_the_reference(rows: int, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    moe = replace(MOE, **changes)
    x, weights = made(moe, rows, dtype)
    found, wanted = experts.mixture(x, weights, moe), mixture(x.float(), wide(weights), moe)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def quantised(weight: Tensor, kind: torch.dtype, group: int) -> QuantisedWeight:
    """Return experts [E, out, in] in 8 bits, packed, with scales that differ widely between rows and groups."""
    count, out, size = weight.shape
    noise = torch.Generator().manual_seed(out)
    spread = torch.rand(count, out, size // group, generator=noise) * 4 + 0.25
    most = 127 if kind == torch.int8 else 448
    scales = weight.float().unflatten(2, (-1, group)).abs().amax(3) * spread / most
    data = (weight.float() / scales.repeat_interleave(group, 2)).clamp(-most, most)
    data = data.round() if kind == torch.int8 else data
    return QuantisedWeight(data.to(kind), scales.mT.contiguous().mT, weight.dtype)


@pytest.mark.parametrize("limit", [None, 0.5], ids=str)
@pytest.mark.parametrize(("kind", "group"), [(torch.int8, 0), (E4M3, 0), (E4M3, 16), (torch.int8, 32)], ids=str)
@pytest.mark.parametrize("dtype", landing_ones([torch.bfloat16, torch.float16], (torch.bfloat16,)), ids=str)
def test_experts_in_8_bits_are_those_of_their_numbers(
    dtype: torch.dtype, kind: torch.dtype, group: int, limit: float | None
) -> None:
    """By our kernel with few rows an expert, and in bfloat16 by PyTorch's with many."""
    moe, backend = replace(MOE, intermediate_size=96, swiglu_limit=limit), CudaBackend(torch.device("cpu"))
    for rows in (1, 30, 40):
        x, weights = made(moe, rows, dtype, hidden=64)
        gate_up, down = (quantised(w, kind, group or w.shape[2]) for w in (weights.gate_up, weights.down))
        own = ExpertWeights(weights.router, gate_up, down)
        numbers = (replace(weight, dtype=torch.float32).dequantised() for weight in (gate_up, down))
        found, wanted = backend.moe(x, own, moe), mixture(x.float(), ExpertWeights(weights.router, *numbers), moe)
        torch.testing.assert_close(found.float(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        half = ExpertWeights(weights.router, gate_up, weights.down)
        numbers = (replace(gate_up, dtype=torch.float32).dequantised(), weights.down.float())
        wanted = mixture(x.float(), ExpertWeights(weights.router, *numbers), moe)
        torch.testing.assert_close(backend.moe(x, half, moe).float(), wanted, atol=TOLERANCES[dtype], rtol=0.03)


@pytest.mark.parametrize("group", [16, 96, 48])
@pytest.mark.parametrize("kind", [torch.int8, E4M3], ids=str)
def test_a_launch_dequantises_every_number_of_every_expert(kind: torch.dtype, group: int) -> None:
    noise = torch.Generator().manual_seed(group)
    for shape in ((3, 100, 96), (1, 64, 96), (130, 96)):
        bits = torch.randint(256, shape, generator=noise, dtype=torch.uint8).view(kind).float().nan_to_num(0.0)
        scales = torch.rand(*shape[:-1], shape[-1] // group, generator=noise) ** 4
        weight = QuantisedWeight(bits.to(kind), scales, torch.bfloat16)
        found, wanted = products.dense(weight), replace(weight, dtype=torch.float64).dequantised()
        assert found.dtype == torch.bfloat16  # the interpreter rounds to zero
        torch.testing.assert_close(found.double(), wanted, atol=0.0, rtol=2**-7)
        packed = replace(weight, scales=weight.scales.mT.contiguous().mT)
        assert torch.equal(products.dense(packed), found)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_expert_of_all_rows_is_added_by_one_launch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    out, shared, x = (torch.randn(5, 70, generator=generator).to(dtype) for _ in range(3))
    gate = torch.randn(1, 70, generator=generator).to(dtype)
    found = CudaBackend(torch.device("cpu")).add_shared_expert(out, shared, x, gate)
    wanted = TorchBackend(torch.device("cpu")).add_shared_expert(*(t.float() for t in (out, shared, x, gate)))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_all_rows_may_have_the_same_experts() -> None:
    x, weights = made(MOE, 1, torch.float32)
    alike = x.expand(40, -1).contiguous()
    torch.testing.assert_close(experts.mixture(alike, weights, MOE), mixture(alike, weights, MOE), atol=1e-5, rtol=1e-5)


def by_logits(logits: Tensor) -> tuple[Tensor, ExpertWeights]:
    """Return rows and a router whose product they are."""
    nothing = torch.empty(0)
    return logits, ExpertWeights(torch.eye(logits.shape[1]), nothing, nothing)


def test_the_first_of_equal_experts_is_taken_and_a_row_of_nan_has_experts_that_exist() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0], [torch.nan] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    shares, chosen, *_ = experts.routed(*by_logits(logits), MOE)
    assert chosen[0].tolist() == [1, 2, 4] and chosen[2].tolist() == [5, 4, 3]
    assert shares[1].isnan().all() and 0 <= int(chosen[1].min()) <= int(chosen[1].max()) < 6
    torch.testing.assert_close(shares[2], route(logits[2:], MOE)[0][0])


@pytest.mark.parametrize(
    ("rows", "count", "k", "hidden", "has_bias"),
    [(1, 256, 8, 200, False), (20, 512, 10, 70, True), (300, 128, 8, 200, True), (70, 6, 3, 2050, False)],
)
def test_rows_find_their_experts_and_experts_their_rows(rows, count, k, hidden, has_bias):
    moe = MoeConfig(count, k, intermediate_size=1, norm_topk_prob=has_bias, has_bias=has_bias)
    x, weights = made(moe, rows, torch.bfloat16, hidden)
    found, wanted = experts.routed(x, weights, moe), routed(x, weights, moe)
    torch.testing.assert_close(found.shares, wanted.shares, atol=1e-6, rtol=1e-5)
    assert torch.equal(found.chosen.long(), wanted.chosen)
    assert torch.equal(found.order, wanted.order) and torch.equal(found.ends, wanted.ends)
    assert found.order.dtype == wanted.order.dtype and found.ends.dtype == wanted.ends.dtype


def test_a_rows_experts_have_the_same_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By programs of a share of K each, and by one that makes all shares."""
    moe = replace(MOE, num_experts=70)
    x, weights = made(moe, 40, torch.bfloat16, hidden=600)
    apart = experts.routed(x, weights, moe)
    alone = [experts.routed(row[None], weights, moe) for row in x[::8]]
    monkeypatch.setattr(experts, "MANY_TILES", 1)
    for found in (Routing(*map(torch.cat, zip(*alone, strict=True))), experts.routed(x[::8], weights, moe)):
        assert torch.equal(found.shares, apart.shares[::8]) and torch.equal(found.chosen, apart.chosen[::8])


def test_pairs_of_more_than_one_block_stay_in_order() -> None:
    chosen = torch.randint(0, 5, (1500, 3), generator=torch.Generator().manual_seed(0))
    x, weights = by_logits(torch.zeros(1500, 5).scatter_(1, chosen, 1.0) - torch.arange(5) * 0.01)
    moe = replace(MOE, num_experts=5)
    found, wanted = experts.routed(x, weights, moe), routed(x, weights, moe)
    assert torch.equal(found.order, wanted.order) and torch.equal(found.ends, wanted.ends)


def test_a_row_of_nan_reaches_no_other_row() -> None:
    x, weights = made(MOE, 30, torch.float32)
    wanted = mixture(x, weights, MOE)
    x[7] = torch.nan
    found = experts.mixture(x, weights, MOE)
    others = [i for i in range(30) if i != 7]
    assert found[7].isnan().all()
    torch.testing.assert_close(found[others], wanted[others], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "is_ours"), [(32, True), (33, False)])
def test_many_bfloat16_rows_go_through_pytorchs_grouped_product(monkeypatch, rows, is_ours):
    moe = replace(MOE, num_experts_per_tok=3)
    x, weights = made(moe, rows, torch.bfloat16)
    called = []
    monkeypatch.setattr(experts, "mixture", lambda *_: called.append(1))
    CudaBackend(torch.device("cpu")).moe(x, weights, moe)
    assert bool(called) == is_ours
