"""--batch-invariant on a CPU: a row's bits depend on its own sequence alone. Refusals name what cannot keep that."""

from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.cpu import invariant
from app.engine.cpu.invariant import InvariantCpuBackend
from app.engine.device.base import AttentionMask
from app.engine.device.factory import make_backend
from app.engine.errors import UnsupportedError
from tests.fast.engine.paged import attended

COUNTS = (1, 3, 16, 64, 512)
HIDDEN = 96
DTYPES = [torch.float32, torch.bfloat16]
CAUSAL = AttentionMask(causal=True)


@pytest.fixture(scope="module")
def backend() -> InvariantCpuBackend:
    return InvariantCpuBackend(torch.device("cpu"))


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
def test_a_row_has_the_same_bits_among_any_others(backend: InvariantCpuBackend, dtype: torch.dtype) -> None:
    x, weight, bias = normal(HIDDEN, dtype=dtype), normal(101, HIDDEN, dtype=dtype), normal(101, dtype=dtype)
    gate_up, down, norm = (normal(*s, dtype=dtype) for s in ((2 * 130, HIDDEN), (HIDDEN, 130), (HIDDEN,)))
    assert not differing(lambda rows: backend.linear(rows, weight), x)
    assert not differing(lambda rows: backend.linear(rows, weight, bias), x)
    assert not differing(lambda rows: backend.gated_mlp(rows, gate_up, down), x)
    assert not differing(lambda rows: backend.rms_norm(rows, norm, 1e-6), x)
    assert not differing(lambda rows: backend.add_rms_norm(rows, rows + 1, norm, 1e-6)[0], x)
    heads = x.view(4, -1)  # a view of wider rows, as q and k are
    assert not differing(lambda rows: backend.rms_norm(rows[:, 1:3], norm[:24], 1e-6), heads)


def test_the_usual_backend_does_not_promise_that() -> None:
    """In fp32 a product of one row is a matrix by a vector, so the comparison above can fail."""
    usual, x, weight = make_backend("cpu"), normal(1024), normal(512, 1024)
    packed = usual.pack_weight(weight)
    assert differing(lambda rows: usual.linear(rows, packed), x) and not usual.batch_invariant


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


def test_a_processor_whose_products_depend_on_the_place_is_refused(backend, monkeypatch):
    linear = invariant.F.linear

    def placed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = linear(x, weight, bias)
        y[-1] += 1e-3
        return y

    backend.pack_weight(normal(6, HIDDEN))
    monkeypatch.setattr(invariant.F, "linear", placed)
    with pytest.raises(UnsupportedError, match="this processor's product of 16 rows by a weight of 7 x 96"):
        backend.pack_weight(normal(7, HIDDEN))
