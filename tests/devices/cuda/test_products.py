"""Products of few rows and with fixed tiles are PyTorch's to rounding, with splits of K as programs and in one."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import products
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.launch import counters, dot_size
from app.engine.cuda.products import FEW_ROWS, ROWS, Product, few_rows, linear, product_of
from tests.devices.cuda.engines import DENSE, GRAPHS, engine, requests, use_kernels
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import make_pair

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
    assert not counters(x.device).any(), "a program that counts wrongly would sum too early or never"


MEASURED = {
    "o": (4096, 4096, 2),
    "qkv": (6144, 4096, 1),
    "down": (4096, 12288, 4),
    "lm_head": (151936, 4096, 1),
    "fc": (4096, 20480, 4),
    "the context's k and v": (10240, 4096, 1),
    "gate_up": (24576, 4096, 0),
}
"""Qwen3-8B's weights, and the splits with which an H200 was faster than cuBLAS, or 0."""
SMALL = {"a gate": (1, 4096), "a router": (128, 4096), "qkv of a 0.6B": (4096, 1024), "its head": (151936, 1024)}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("name", MEASURED)
def test_few_rows_are_multiplied_as_an_h200_was_fastest(name: str) -> None:
    out_features, in_features, splits = MEASURED[name]
    for rows in (1, 16, 17, 32):
        launch = few_rows(empty(out_features, in_features), rows, 132)
        assert launch == (Product(dot_size(rows), 64, 128, splits, 4) if splits else None)
    assert few_rows(empty(out_features, in_features), 33, 132) is None


def test_small_weights_those_without_whole_tiles_and_fp32_are_left_to_cublas() -> None:
    for shape in (*SMALL.values(), (4096, 4096 + 64)):
        assert few_rows(empty(*shape), 1, 132) is None
    assert few_rows(empty(4096, 4096, dtype=torch.float32), 1, 132) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features", "splits"), [(200, 2048, 1), (100, 6144, 2)])
def test_a_product_of_few_rows_is_pytorchs_rounded_once(
    dtype: torch.dtype, out_features: int, in_features: int, splits: int
) -> None:
    noise = torch.Generator().manual_seed(in_features)
    weight, bias = (torch.randn(*s, generator=noise).to(dtype) for s in ((out_features, in_features), (out_features,)))
    for rows, some in ((1, None), (16, bias), (17, None), (32, bias)):
        x = torch.randn(rows, in_features, generator=noise).to(dtype)
        launch = few_rows(weight, rows, 4)
        assert launch and launch.splits == splits
        found = linear(x, weight, some, 4, launch)
        expected = F.linear(x.double(), weight.double(), None if some is None else some.double())
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1.01 * torch.finfo(dtype).eps)


def test_the_backend_takes_them_on_hopper_and_cublas_above_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend(torch.device("cpu"))
    noise = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(rows, 2048, generator=noise).to(torch.bfloat16) for rows in (256, FEW_ROWS + 1))
    few, ours = x[:5], linear(x[:5], weight, None, 4, few_rows(weight, 5, 4))
    assert not torch.equal(ours, F.linear(few, weight)), "or this test sees nothing: the interpreter rounds to zero"
    assert torch.equal(backend.linear(few, weight), ours)
    assert torch.equal(backend.linear(x, weight), F.linear(x, weight))
    for capability in ((8, 0), (10, 0)):
        monkeypatch.setattr(backend, "capability", capability)
        assert torch.equal(backend.linear(few, weight), F.linear(few, weight))


def test_drafts_change_no_token_where_our_products_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, which the rule leaves to cuBLAS, so that no margin decides."""
    taken: list[int] = []

    def always(weight: Tensor, num_rows: int, multiprocessors: int) -> Product | None:
        taken.append(num_rows)
        return Product(dot_size(num_rows), 64, 64, 1, 4) if num_rows <= FEW_ROWS else None

    use_kernels(monkeypatch)
    monkeypatch.setattr(products, "few_rows", always)
    pair = make_pair(tmp_path, **DENSE, hidden_size=64, intermediate_size=64)
    off = run_engine(engine(pair, draft=False), requests(max_tokens=6))
    on = run_engine(engine(pair, **GRAPHS), requests(max_tokens=6))
    assert on.texts == off.texts and on.verify_steps > 0 and min(taken) == 1
