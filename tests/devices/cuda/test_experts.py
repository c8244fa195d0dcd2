"""Experts on our kernels, in the interpreter: the reference's mixture, row by row, in every dtype."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.cuda import experts
from app.engine.cuda.backend import CudaBackend
from app.engine.device.base import ExpertWeights
from app.engine.device.moe import MoeConfig, Routing, grouped, mixture, route, routed
from app.engine.device.torch import TorchBackend
from app.engine.quantised import QuantisedWeight, Weight
from tests.costs import landing_ones
from tests.fast.engine.quantised import E4M3

torch.set_num_threads(1)

MOE = MoeConfig(num_experts=6, num_experts_per_tok=3, intermediate_size=24, norm_topk_prob=True)
HIDDEN = 40
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
IN_8_BITS = {torch.float16: 8e-3, torch.bfloat16: 1.5e-2}
"""Relative errors of a mixture. With plain rows it would be 2.5 % in e4m3."""


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
    packed = CudaBackend(torch.device("cpu")).pack_linear(QuantisedWeight(data.to(kind), scales, weight.dtype))
    assert isinstance(packed, QuantisedWeight)
    return packed


def in_8_bits(rows: Tensor, kind: torch.dtype) -> Tensor:
    """Return fp32 rows rounded to 8 bits, by a scale for each 128 numbers."""
    groups, most = rows.unflatten(1, (-1, 128)), 127 if kind == torch.int8 else 448
    scales = groups.abs().amax(2, keepdim=True) / most
    bits = (groups / scales).round() if kind == torch.int8 else (groups / scales).to(kind).float()
    return (bits * scales).flatten(1)


def by_8_bits(rows: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return grouped(rows, weight.float(), ends)
    return grouped(in_8_bits(rows, weight.data.dtype), replace(weight, dtype=torch.float32).dequantised(), ends)


@pytest.mark.parametrize(
    ("kind", "group", "changes"),
    [
        (torch.int8, 0, {}),
        (torch.int8, 128, {"swiglu_limit": 0.5, "intermediate_size": 256}),
        (E4M3, 0, {"num_experts": 20}),
        (E4M3, 128, {"has_bias": True, "intermediate_size": 256}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", landing_ones([torch.bfloat16, torch.float16], (torch.bfloat16,)), ids=str)
def test_experts_in_8_bits_multiply_rows_in_8_bits(
    dtype: torch.dtype, kind: torch.dtype, group: int, changes: dict[str, Any]
) -> None:
    """In tiles of 16 pairs and of 64, and beside a weight that is not quantised."""
    moe, backend = replace(MOE, **{"intermediate_size": 128} | changes), CudaBackend(torch.device("cpu"))
    for rows in (1, 30, 70):
        x, weights = made(moe, rows, dtype, hidden=256)
        plain = {"gate_up": weights.gate_up, "down": weights.down}
        both = {name: quantised(weight, kind, group or weight.shape[2]) for name, weight in plain.items()}
        for names in (("gate_up", "down"), ("gate_up",), ("down",)) if rows == 30 else (("gate_up", "down"),):
            own = replace(weights, **{name: both[name] for name in names})
            found, wanted = backend.moe(x, own, moe), mixture(x.float(), own, moe, by_8_bits)
            assert found.dtype == dtype
            assert (found.float() - wanted).norm() < IN_8_BITS[dtype] * wanted.norm()


def test_a_row_by_experts_in_8_bits_has_the_same_bits_alone() -> None:
    moe, backend = replace(MOE, intermediate_size=128), CudaBackend(torch.device("cpu"))
    x, weights = made(moe, 5, torch.bfloat16, hidden=256)
    own = replace(weights, gate_up=quantised(weights.gate_up, E4M3, 128), down=quantised(weights.down, E4M3, 128))
    alone = torch.cat([backend.moe(row[None], own, moe) for row in x])
    assert torch.equal(backend.moe(x, own, moe), alone)


@pytest.mark.parametrize(("hidden", "inner", "name"), [(256, 72, "gate_up"), (200, 128, "down")])
def test_columns_of_experts_in_8_bits_may_be_no_whole_tiles(hidden: int, inner: int, name: str) -> None:
    moe, backend = replace(MOE, intermediate_size=inner), CudaBackend(torch.device("cpu"))
    x, weights = made(moe, 9, torch.bfloat16, hidden)
    own = replace(weights, **{name: quantised(getattr(weights, name), torch.int8, 128)})
    found, wanted = backend.moe(x, own, moe), mixture(x.float(), own, moe, by_8_bits)
    assert (found.float() - wanted).norm() < IN_8_BITS[x.dtype] * wanted.norm()


def test_a_row_of_nan_reaches_no_other_row_by_experts_in_8_bits() -> None:
    moe, backend = replace(MOE, intermediate_size=128), CudaBackend(torch.device("cpu"))
    x, weights = made(moe, 9, torch.bfloat16, hidden=256)
    own = replace(weights, gate_up=quantised(weights.gate_up, E4M3, 128), down=quantised(weights.down, E4M3, 128))
    wanted = backend.moe(x, own, moe)
    x[7] = torch.nan
    found, others = backend.moe(x, own, moe), [i for i in range(9) if i != 7]
    assert found[7].isnan().all() and torch.equal(found[others], wanted[others])


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
