"""The CPU's own norm and RoPE: right at every size, the same bits for a row in every batch, and refusals."""

import shutil

import pytest
import torch
from torch import Tensor

from app.engine.cpu import attention, library, linear
from app.engine.device.base import LayerKv, ProjectedRows

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not shutil.which(library.compiler()), reason="there is no g++")
HEADS, KV_HEADS, EPS = 4, 2, 1e-6
MANY_ROWS = 300
"""Rows of 8 heads of 128 that several threads share."""


@pytest.fixture(autouse=True)
def operators():
    assert attention.supports(torch.float32)
    linear.set_up(threads=1)
    yield
    linear.set_up(threads=1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows: int, dim: int, dtype: torch.dtype, layers: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return rows, both norms, turns and slots. Slots are shuffled, and every other one is left out."""
    angles = drawn(rows // layers, dim // 2, seed=3)
    slots = 2 * torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).int()
    x, norms = drawn(rows, HEADS + 2 * KV_HEADS, dim).to(dtype), (1 + drawn(1 + layers, dim, seed=1)).to(dtype)
    return x, norms[0], norms[1:].clone(), torch.stack((angles.cos(), angles.sin()), dim=-1), slots


def run(x: Tensor, q_norm: Tensor, k_norm: Tensor, turns: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, and K and V of slots, NaN where nothing was written."""
    kv = LayerKv(*(torch.full((2 * MANY_ROWS, KV_HEADS, x.shape[2]), torch.nan, dtype=x.dtype) for _ in range(2)))
    rotation = (torch.view_as_complex(turns),)
    return attention.rotate_into(ProjectedRows(x, q_norm, k_norm, EPS, rotation, kv, slots)), kv.k, kv.v


def expected(x: Tensor, q_norm: Tensor, k_norm: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, K and V by the formulas in float64."""
    wide, layers = x.double(), len(k_norm)
    q, k, v = wide.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = turns.double().repeat_interleave(layers, dim=0)[:, None].unbind(-1)

    def turned(heads: Tensor, norm: Tensor) -> Tensor:
        heads = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        a, b = heads[..., ::2], heads[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)

    return turned(q, q_norm), turned(k, k_norm.repeat(len(x) // layers, 1)[:, None]), v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [2, 20, 64, 80, 128, 256])
@pytest.mark.parametrize(("rows", "layers"), [(1, 1), (9, 1), (18, 3), (0, 1)])
def test_heads_are_normed_turned_and_written_to_their_slots_alone(rows, layers, dim, dtype):
    x, *norms, turns, slots = inputs(rows, dim, dtype, layers)
    q, *pools = run(x, *norms, turns, slots)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 2**-8}
    found = q, *(pool[slots.long()] for pool in pools)
    for own, right in zip(found, expected(x, *norms, turns), strict=True):
        torch.testing.assert_close(own.double(), right, **near)
    for pool in pools:
        assert int(pool.isnan().all(dim=2).all(dim=1).sum()) == len(pool) - rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_every_thread(dtype):
    x, q_norm, k_norm, turns, slots = inputs(MANY_ROWS, 128, dtype)
    q, *pools = run(x, q_norm, k_norm, turns, slots)
    linear.set_up(threads=3)
    for one, other in zip((q, *pools), run(x, q_norm, k_norm, turns, slots), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    for row in (0, 7, 8, MANY_ROWS - 1):
        one = slice(row, row + 1)
        alone, *own_pools = run(x[one], q_norm, k_norm, turns[one], slots[one])
        assert torch.equal(alone, q[one])
        for own, pool in zip(own_pools, pools, strict=True):
            assert torch.equal(own[slots[row]], pool[slots[row]])


def test_wrong_tensors_are_refused():
    x, q_norm, k_norm, turns, slots = inputs(6, 8, torch.float32)
    right = {"x": x, "q_norm": q_norm, "k_norm": k_norm, "turns": turns, "slots": slots}
    run(**right)
    wrong = [
        {"x": x.transpose(0, 1).contiguous().transpose(0, 1)},
        {"x": x[..., :7].contiguous()},
        {"q_norm": q_norm[:4]},
        {"q_norm": torch.ones(2, 8)},
        {"k_norm": torch.ones(4, 8)},
        {"k_norm": k_norm.double()},
        {"turns": turns[:5]},
        {"turns": turns.double()},
        {"slots": slots.long()},
        {"slots": slots[:5]},
        {"slots": slots - 1},
        {"slots": slots + 2 * MANY_ROWS},
        {"slots": slots.masked_fill(slots == 0, 2 * MANY_ROWS)},
    ]
    for change in wrong:
        with pytest.raises(RuntimeError, match=r"rotate_into takes|slots must be"):
            run(**right | change)
    with pytest.raises(KeyError, match="float64"):
        run(**right | {"x": x.double()})
