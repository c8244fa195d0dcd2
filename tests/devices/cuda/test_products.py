"""Products with fixed tiles are PyTorch's to rounding, with splits of K as programs and in one program."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import products
from app.engine.cuda.products import ROWS, linear, product_of

torch.set_num_threads(1)
PROGRAMS = (1, 132)
"""Multiprocessors, of which one makes all splits of a tile, and many one split each."""


def numbers(rows: int, out_features: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 256, generator=noise), torch.randn(out_features, 256, generator=noise) / 16
    return x.to(dtype), weight.to(dtype), torch.randn(out_features, generator=noise).to(dtype)


@pytest.mark.parametrize("multiprocessors", PROGRAMS)
@pytest.mark.parametrize("rows", [1, 16, ROWS, ROWS + 1])
def test_a_product_is_pytorchs_whatever_its_launch(multiprocessors: int, rows: int) -> None:
    for out_features in (128, 100):  # the last tile has columns that the weight has not
        x, weight, bias = numbers(rows, out_features)
        assert (product_of(weight, multiprocessors).splits > 1) == (multiprocessors > 1)
        for some in (None, bias):
            found, expected = linear(x, weight, some, multiprocessors), F.linear(x, weight, some)
            torch.testing.assert_close(found, expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("multiprocessors", PROGRAMS)
def test_in_16_bits_sums_are_in_fp32_and_rounded_once(multiprocessors: int) -> None:
    x, weight, _ = numbers(5, 64, torch.bfloat16)
    found = linear(x, weight, None, multiprocessors)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), F.linear(x.float(), weight.float()), atol=1e-2, rtol=1e-2)


def test_a_launch_finds_the_counters_as_the_last_one_left_them() -> None:
    x, weight, _ = numbers(3, 128)
    first = linear(x, weight, None, 132)
    assert torch.equal(linear(x, weight, None, 132), first)
    assert not products.counters(x.device).any(), "a program that counts wrongly would sum too early or never"
