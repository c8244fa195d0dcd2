"""Products of few rows are PyTorch's to rounding, in any launch. A row's bits depend on no other row of its tile."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import products
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
