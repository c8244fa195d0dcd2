"""Products by quantised weights are those of their dequantised numbers, and drafts change no token of such a target."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.cuda import backend as cuda
from app.engine.cuda import products
from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend
from app.engine.quantised import QuantisedWeight
from tests.devices.cuda.engines import DENSE, GRAPHS, engine, requests, use_kernels
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.quantised import E4M3, quantise

torch.set_num_threads(1)
BF16 = torch.bfloat16
COLUMNS = 512
KINDS = [(kind, group) for kind in (torch.int8, E4M3) for group in (128, COLUMNS)] + [(torch.int8, 32)]
EVERY_NUMBER = torch.arange(256, dtype=torch.uint8)


def weight_of(kind: torch.dtype, group: int, out: int = 200, dtype: torch.dtype = BF16) -> QuantisedWeight:
    """Return a weight with every number of `kind` and scales that differ widely, packed."""
    noise = torch.Generator().manual_seed(group)
    bits = torch.randint(256, (out, COLUMNS), generator=noise, dtype=torch.uint8)
    bits[0, :256] = EVERY_NUMBER
    data = bits.view(kind).float()
    scales = torch.rand(out, COLUMNS // group, generator=noise) ** 4 / 256
    return packed(QuantisedWeight(data.nan_to_num(0.0).to(kind), scales, dtype))


def packed(weight: QuantisedWeight) -> QuantisedWeight:
    found = CudaBackend(torch.device("cpu")).pack_linear(weight)
    assert isinstance(found, QuantisedWeight)
    return found


def rows_of(count: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_is_product(found: Tensor, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> None:
    """Sums are in fp32, and rounded once, which the interpreter does to zero."""
    numbers = replace(weight, dtype=torch.float64).dequantised()
    expected = x.double() @ numbers.T + (0.0 if bias is None else bias.double())
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1.01 * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("kind", "group"), KINDS, ids=str)
def test_a_product_is_that_of_the_dequantised_weight(kind: torch.dtype, group: int, fixed: bool) -> None:
    weight, bias = weight_of(kind, group), torch.randn(200).to(BF16)
    for rows, multiprocessors in ((1, 132), (16, 1), (17, 132), (65, 1), (300, 132)):
        assert (products.product_of(weight, multiprocessors, rows).splits > 1) == (multiprocessors > 1)
        x, some = rows_of(rows), None if rows == 17 else bias
        assert_is_product(products.linear(x, weight, some, multiprocessors, fixed=fixed), x, weight, some)


def test_so_it_is_in_float16_and_by_scales_that_were_not_packed() -> None:
    for kind, group in KINDS:
        weight, x = weight_of(kind, group, dtype=torch.float16), rows_of(5, torch.float16)
        found = products.linear(x, weight, None, 132)
        assert_is_product(found, x, weight, None)
        assert torch.equal(products.linear(x, replace(weight, scales=weight.scales.contiguous()), None, 132), found)


def test_a_tile_lies_in_one_group_and_fewer_rows_have_deeper_tiles() -> None:
    depths = {group: products.product_of(weight_of(E4M3, group), 132, 1).depth for group in (16, 64, 128, COLUMNS)}
    assert depths == {16: 16, 64: 64, 128: 128, COLUMNS: 128}
    assert products.product_of(weight_of(E4M3, 128), 132).depth == 64


def test_many_rows_are_multiplied_by_the_dequantised_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, on_cuda = weight_of(E4M3, 128), rows_of(5), CudaBackend(torch.device("cpu"))
    assert_is_product(on_cuda.linear(x, weight), x, weight, None)
    monkeypatch.setattr(cuda, "MANY_ROWS", 4)
    assert torch.equal(on_cuda.linear(x, weight), x @ products.dense(weight).T)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_weights_are_dequantised_if_their_groups_are_no_tiles_or_the_engine_is_in_fp32(dtype: torch.dtype) -> None:
    group = 8 if dtype == BF16 else 128
    weight = QuantisedWeight(torch.ones(4, COLUMNS, dtype=torch.int8), torch.ones(4, COLUMNS // group), dtype)
    found = CudaBackend(torch.device("cpu")).pack_linear(weight, weight)
    assert isinstance(found, Tensor) and found.dtype == dtype and found.shape == (8, COLUMNS)


@pytest.mark.parametrize(
    ("how", "is_kept"),
    [("int8 by row", True), pytest.param("fp8 by row", True, marks=pytest.mark.slow), ("fp8 in blocks", False)],
    ids=str,
)
def test_drafts_change_no_token_of_a_quantised_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, is_kept: bool
) -> None:
    """Blocks of the tiny pair are no whole tiles."""
    kept: list[QuantisedWeight] = []

    class Noted(InvariantCudaBackend):
        def pack_quantised(self, weight: QuantisedWeight) -> QuantisedWeight:
            kept.append(weight)
            return super().pack_quantised(weight)

    use_kernels(monkeypatch, Noted)
    pair = make_pair(tmp_path / "pair", **DENSE)
    pair = replace(pair, target=quantise(pair.target, tmp_path, how)[0])
    sizes: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    off = run_engine(engine(pair, draft=False, **sizes), requests(max_tokens=6))
    on = run_engine(engine(pair, **sizes, **GRAPHS), requests(max_tokens=6))
    assert on.texts == off.texts and on.verify_steps > 0
    assert bool(kept) == is_kept


def test_drafts_change_no_token_of_a_target_whose_experts_are_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch)
    pair = make_pair(tmp_path / "pair", **DENSE, experts=4)
    pair = replace(pair, target=quantise(pair.target, tmp_path, "fp8 by row")[0])
    plain, drafting = engine(pair, draft=False, dtype="bfloat16"), engine(pair, dtype="bfloat16", **GRAPHS)
    for layer in drafting.core.runner.forward.target.layers:
        assert {weight.data.dtype.itemsize for weight in (layer.mixture[1].gate_up, layer.mixture[1].down)} == {1}
    off, on = run_engine(plain, requests(max_tokens=6)), run_engine(drafting, requests(max_tokens=6))
    assert on.texts == off.texts and on.verify_steps > 0


@pytest.mark.parametrize(("capability", "multiplied"), [((8, 9), False), ((9, 0), True)])
def test_before_hopper_weights_are_dequantised(
    capability: tuple[int, int], multiplied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversions of two numbers at a time are instructions of sm_90."""
    backend = CudaBackend(torch.device("cpu"))
    monkeypatch.setattr(backend, "capability", capability)
    weight = QuantisedWeight.int8(torch.ones(64, 64, dtype=torch.bfloat16))
    assert isinstance(backend.pack_linear(weight), QuantisedWeight) is multiplied
