"""Products of rows by weights, both in 8 bits, are those of their numbers, and a row is quantised to the nearest."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from app.engine.cuda import eight_bits
from app.engine.cuda.launch import counters
from app.engine.quantised import QuantisedRows, QuantisedWeight

torch.set_num_threads(1)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
KINDS = [torch.int8, E4M3]
MOST = {torch.int8: 127.0, E4M3: 448.0}
COLUMNS = 640
"""Five groups of 128, which splits do not share evenly."""

by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def rows_of(count: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of which groups of 128 differ widely in size."""
    noise = torch.Generator().manual_seed(count)
    sizes = 10 ** torch.randint(-3, 4, (count, COLUMNS // 128, 1), generator=noise).float()
    return (torch.randn(count, COLUMNS // 128, 128, generator=noise) * sizes).flatten(1).clamp(-6e4, 6e4).to(dtype)


def weight_of(kind: torch.dtype, out: int = 200, dtype: torch.dtype = BF16) -> QuantisedWeight:
    """A weight with every number of `kind` but NaN, and scales that differ widely, packed."""
    noise = torch.Generator().manual_seed(out)
    bits = torch.randint(256, (out, COLUMNS), generator=noise, dtype=torch.uint8)
    bits[0, :256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.rand(COLUMNS // 128, out, generator=noise) ** 4 / 256
    return QuantisedWeight(bits.view(kind).float().nan_to_num(0.0).to(kind), scales.T, dtype)


def numbers(x: QuantisedRows) -> Tensor:
    """The rows that 8 bits and scales hold, in fp64."""
    scales = x.scales[:, : len(x.data)].T.double()
    return x.data.double() * scales.repeat_interleave(128, 1)


def wide(weight: QuantisedWeight) -> Tensor:
    return weight.data.double() * weight.scales.double().repeat_interleave(128, 1)


@by_kind
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_row_is_quantised_by_the_largest_of_128_numbers_to_the_nearest(kind: torch.dtype, dtype: torch.dtype) -> None:
    for count in (1, 5, 8):
        x = rows_of(count, dtype)
        found = eight_bits.quantised(x, kind)
        assert found.data.dtype == kind and found.shape == x.shape and found.plain is None
        assert found.scales.shape == (COLUMNS // 128, -(-count // 4) * 4)
        groups = x.float().unflatten(1, (-1, 128))
        most = groups.abs().amax(2)
        torch.testing.assert_close(found.scales[:, :count].T, most / MOST[kind], rtol=1e-6, atol=0.0)
        scaled = (groups * (torch.tensor(MOST[kind]) / most)[..., None]).flatten(1)
        assert torch.equal(found.data.float(), scaled.round() if kind == torch.int8 else scaled.to(kind).float())


def test_every_number_of_e4m3_is_its_own_nearest_and_halves_go_to_the_even_one() -> None:
    """Next to midpoints rounding goes wrong first, and from 120 to 128 it carries."""
    finite = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = finite[finite.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    nearby = [middles.nextafter(torch.tensor(bound)) for bound in (500.0, -500.0)]
    for value in torch.cat((finite, middles, *nearby)).split(127):
        x = torch.full((1, 128), 448.0)
        x[0, : len(value)] = value
        assert torch.equal(eight_bits.quantised(x, E4M3).data.float(), x.to(E4M3).float())


@by_kind
def test_a_group_of_zeros_and_of_numbers_next_to_zero_is_zeros(kind: torch.dtype) -> None:
    x = rows_of(3)
    x[1], x[2, 128:256] = 0.0, torch.finfo(BF16).smallest_normal / 64
    found = eight_bits.quantised(x, kind)
    assert (
        numbers(found).isfinite().all() and not found.data[1].float().any() and not found.data[2, 128:256].float().any()
    )


@by_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nan_and_no_other_row_does(kind: torch.dtype, bad: float) -> None:
    """A request ends by NaN, and e4m3 has no infinity."""
    x, weight = rows_of(5), weight_of(kind)
    whole = eight_bits.linear(eight_bits.quantised(x, kind), weight, None, 132)
    for multiprocessors, column in product((1, 132), (0, 127, 300)):
        x = rows_of(5)
        x[3, column] = bad
        found = eight_bits.linear(eight_bits.quantised(x, kind), weight, None, multiprocessors)
        assert found[3].isnan().all()
        torch.testing.assert_close(found[[0, 1, 2, 4]], whole[[0, 1, 2, 4]], rtol=2**-7, atol=1e-4)


def test_a_weight_of_nan_gives_nan_in_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a broken file ends requests, and decodes no text. The interpreter takes NaN in e4m3 for 480."""
    widened = interpreter._convert_float

    def convert(bits: Any, kind: Any, to: Any, rounding: Any) -> Any:
        found = widened(bits, kind, to, rounding)
        if kind == tl.float8e4nv:
            found.view(np.float32)[bits.view(np.uint8) & 0x7F == 0x7F] = np.nan
        return found

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    for bits in (0x7F, 0xFF):
        weight = weight_of(E4M3)
        weight.data.view(torch.uint8)[7, 300] = bits
        found = eight_bits.linear(eight_bits.quantised(rows_of(2), E4M3), weight, None, 132)
        assert found[:, 7].isnan().all() and found.isnan().sum() == 2


@by_kind
@pytest.mark.parametrize("fixed", [False, True])
def test_a_product_is_that_of_the_numbers_in_8_bits(kind: torch.dtype, fixed: bool) -> None:
    """Sums are in fp32, and rounded once, which the interpreter does to zero."""
    bias = torch.randn(200)
    for rows, multiprocessors, dtype in (
        (1, 132, BF16),
        (16, 1, torch.float16),
        (17, 132, BF16),
        (64, 2, BF16),
        (200, 132, BF16),
    ):
        weight, x = weight_of(kind, dtype=dtype), eight_bits.quantised(rows_of(rows, dtype), kind)
        some = None if rows == 17 else bias.to(dtype)
        found = eight_bits.linear(x, weight, some, multiprocessors, fixed=fixed)
        expected = numbers(x) @ wide(weight).T + (0.0 if some is None else some.double())
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=1.01 * torch.finfo(dtype).eps)
    assert not counters(x.data.device).any(), "a program that counts wrongly would sum too early or never"


SHAPES = {
    "8b o": (4096, 4096), "8b qkv": (6144, 4096), "8b down": (4096, 12288), "8b gate_up": (24576, 4096),
    "27b qkvz": (16384, 5120), "27b out": (5120, 6144), "27b down": (5120, 17408), "27b gate_up": (34816, 5120),
}  # fmt: skip
LAUNCHES = {  # rows and splits for few rows, splits for 128 rows
    "8b o": (64, 4, 2), "8b qkv": (128, 4, 4), "8b down": (128, 8, 2), "8b gate_up": (64, 1, 1),
    "27b qkvz": (128, 2, 1), "27b out": (128, 4, 3), "27b down": (128, 4, 3), "27b gate_up": (64, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_tiles_are_those_that_an_h200_chose_and_splits_occupy_it(name: str) -> None:
    """Up to 32 rows splits were measured with the tiles, above that tiles alone."""
    weight = QuantisedWeight(torch.empty(SHAPES[name], dtype=E4M3, device="meta"), torch.empty(0), BF16)
    rows, splits, many = LAUNCHES[name]
    for count, x_rows in ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)):
        warps = 8 if (x_rows, rows) == (16, 128) else 4
        assert eight_bits.product_of(weight, count, 132) == (x_rows, rows, splits, warps, 4)
    for count in (65, 128):
        assert eight_bits.product_of(weight, count, 132) == (128, 64, many, 4, 4)
    assert eight_bits.product_of(weight, 8192, 132).splits == 1, "partial results would take half a gigabyte"
