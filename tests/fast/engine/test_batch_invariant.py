"""--batch-invariant on a CPU: a row's bits depend on its own sequence alone. Refusals name what cannot keep that."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.cpu import linear
from app.engine.cpu.backend import InvariantCpuBackend
from app.engine.device.base import AttentionMask
from app.engine.device.factory import make_backend
from app.engine.errors import UnsupportedError
from app.engine.load.engine import build_engine
from tests.fast.engine.paged import attended
from tests.fast.engine.pairs import make_pair

COUNTS = (1, 3, 16, 64, 512)
HIDDEN = 96
DTYPES = [torch.float32, torch.bfloat16]
CAUSAL = AttentionMask(causal=True)


@pytest.fixture(scope="module")
def backend() -> InvariantCpuBackend:
    made = InvariantCpuBackend(torch.device("cpu"))
    made.make_operators(lambda *_: None)
    return made


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differing(run: Any, row: Tensor) -> list[tuple[int, int]]:
    """Numbers of rows, and places among them, where `run` gives `row` other bits than alone."""
    alone, found = run(row[None])[0], []
    for count in COUNTS:
        for place in sorted({0, count // 2, count - 1}):
            rows = normal(count, *row.shape, seed=count, dtype=row.dtype)
            rows[place] = row
            if not torch.equal(run(rows)[place], alone):
                found.append((count, place))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_has_the_same_bits_among_any_others(backend: InvariantCpuBackend, dtype: torch.dtype) -> None:
    x, weight, bias = normal(HIDDEN, dtype=dtype), normal(101, HIDDEN, dtype=dtype), normal(101, dtype=dtype)
    assert not differing(lambda rows: backend.linear(rows, weight), x)
    assert not differing(lambda rows: backend.linear(rows, weight, bias), x)
    assert not differing(lambda rows: backend.logits(rows, weight), x)


def test_pytorchs_products_do_not_promise_that() -> None:
    """In fp32 a product of one row is a matrix by a vector, so the comparison above can fail."""
    x, weight = normal(1024), normal(512, 1024)
    assert differing(lambda rows: torch.nn.functional.linear(rows, weight), x)
    assert not make_backend("cpu").batch_invariant


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_attends_alike_alone_in_a_block_and_with_its_prompt(backend, dtype, window):
    def sequence(length: int, seed: int) -> tuple[Tensor, ...]:
        return tuple(normal(length, heads, 16, seed=seed + i, dtype=dtype) for i, heads in enumerate((4, 2, 2)))

    mask, own, other, third = CAUSAL._replace(window=window), sequence(700, 0), sequence(90, 5), sequence(33, 9)
    batches: list[tuple[list[Any], int]] = [
        ([(own, 0, 700)], 0),
        ([(other, 89, 90), (own, 600, 601)], 1),
        ([(own, 590, 606), (other, 74, 90)], 0),
        ([(other, 80, 90), (own, 597, 613), (third, 33, 33)], 1),
        ([(third, 0, 33), (own, 585, 601)], 1),
        ([(own, 530, 640), (third, 30, 33)], 0),
    ]
    (alone,) = attended(backend, [(own, 600, 601)], mask, garbage=6.0)
    for seed, (shares, index) in enumerate(batches):
        for page_size in (4, 16, 128):
            found = attended(backend, shares, mask, page_size=page_size, seed=seed, garbage=5.0 + seed)[index]
            assert torch.equal(found[600 - shares[index][1]], alone[0]), (seed, page_size)
    usual = make_backend("cpu")
    torch.testing.assert_close(alone, attended(usual, [(own, 600, 601)], mask, garbage=6.0)[0], atol=1e-2, rtol=1e-2)


def test_without_a_compiler_or_in_float16_it_is_refused(tmp_path, monkeypatch):
    pair = make_pair(tmp_path)
    config = EngineConfig(pair.target, None, device="cpu", batch_invariant=True, dtype="float16")
    with pytest.raises(UnsupportedError, match="--batch-invariant on a CPU needs g"):
        build_engine(config)
    monkeypatch.setattr(linear, "compiled", lambda dtype: None)
    with pytest.raises(UnsupportedError, match="--batch-invariant on a CPU needs g"):
        build_engine(replace(config, dtype="float32"))
