"""Products of few rows are PyTorch's to rounding, in any launch. A row's bits depend on no other row of its tile."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import launch, products
from app.engine.cuda.products import MAX_ROWS, Product, linear

torch.set_num_threads(1)

VARIANTS = [Product(64, 32, 1), Product(64, 32, 4), Product(32, 64, 2)]


def numbers(rows: int, out_features: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 256, generator=noise), torch.randn(out_features, 256, generator=noise) / 16
    return x.to(dtype), weight.to(dtype)


def silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, MAX_ROWS])
def test_a_product_is_pytorchs_whatever_its_launch(variant: Product, rows: int) -> None:
    for out_features in (128, 100):  # the last tile has columns that the weight has not
        x, weight = numbers(rows, out_features)
        torch.testing.assert_close(linear(x, weight, variant), F.linear(x, weight), atol=3e-6, rtol=3e-6)
        torch.testing.assert_close(linear(x, weight, variant, gated=True), silu_mul(x, weight), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_in_16_bits_sums_are_in_fp32_and_rounded_once(variant: Product) -> None:
    x, weight = numbers(5, 64, torch.bfloat16)
    for gated, reference in ((False, F.linear), (True, silu_mul)):
        found = linear(x, weight, variant, gated=gated)
        assert found.dtype == torch.bfloat16
        expected = reference(x.float(), weight.float())
        torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-2)  # the interpreter truncates


def test_a_row_has_the_same_bits_beside_any_others_of_its_tile() -> None:
    x, weight = numbers(MAX_ROWS, 96)
    for variant, gated in itertools.product(VARIANTS, (False, True)):
        alone = linear(x[:1], weight, variant, gated=gated)
        for rows in (2, 5, 16):
            beside = linear(x[:rows].flip(0), weight, variant, gated=gated)
            assert torch.equal(beside[-1:], alone), (variant, rows)


def test_a_launch_finds_the_counters_as_the_last_one_left_them() -> None:
    x, weight = numbers(3, 128)
    first = linear(x, weight, VARIANTS[1])
    assert torch.equal(linear(x, weight, VARIANTS[1]), first)
    assert not products.counters(x.device).any(), "a program that counts wrongly would sum too early or never"


@pytest.mark.parametrize("ahead", [64 << 10, 4 << 10], ids=["whole parts", "a share of each"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_chained_program_prefetches_the_first_of_its_own_weights_and_nothing_else(monkeypatch, variant, gated, ahead):
    """The interpreter has no assembly, so a double is told what is asked for."""
    asked: list[tuple[int, int]] = []

    def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], *_: Any, **options: Any) -> None:
        assert "prefetch.L2" in asm and not options["is_pure"], "what is pure and has no use is left out"
        at, size = (arg.handle.data for arg in args)
        asked.extend((int(one), int(size.item())) for one in at.flatten())

    monkeypatch.setattr(products.tl, "inline_asm_elementwise", inline_asm_elementwise)
    monkeypatch.setattr(products, "PREFETCHED", products.tl.constexpr(ahead))
    monkeypatch.setattr(products, "chain", lambda *, on: {"CHAINED": on})
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(launch, name, lambda: None)
    x, weight = numbers(5, 200, torch.bfloat16)
    linear(x, weight, variant, gated=gated, chained=True)
    got = torch.zeros(weight.numel() + 1, dtype=torch.int64)
    for at, size in asked:
        begin = at - weight.data_ptr()
        assert begin % 16 == size % 16 == 0 and begin >= 0 and begin + size <= 2 * weight.numel()
        got[begin // 2 : (begin + size) // 2] += 1
    part = 256 // variant.splits
    count = min(part, ahead // (2 * variant.rows * (1 + gated)))
    expected = (torch.arange(256) % part < count).expand(200, 256).flatten()
    assert torch.equal(got[:-1] > 0, expected)
    assert 2 * count * variant.rows * (1 + gated) <= ahead


def test_a_weight_whose_rows_cannot_be_prefetched_is_not_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    chained: list[bool] = []
    monkeypatch.setattr(products, "chain", lambda *, on: chained.append(on) or {"CHAINED": False})
    x, weight = numbers(3, 128, torch.bfloat16)
    shifted = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:].view_as(weight).copy_(weight)
    both = [linear(x, own, VARIANTS[1], chained=True) for own in (weight, shifted)]
    assert torch.equal(*both) and chained == [True, False]
