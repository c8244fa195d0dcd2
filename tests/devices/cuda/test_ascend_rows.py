"""Ascend's kernel of `app/engine/npu/rows.py` in Triton's interpreter, against the backend's own composition."""

import pytest
import torch

from app.engine.checkpoint.shapes import RopeConfig
from app.engine.device.base import Backend, LayerKv
from app.engine.device.torch import TorchBackend
from app.engine.models.rope import RotaryTable
from app.engine.npu import rows

REFERENCE = TorchBackend(torch.device("cpu"))
EPS = 1e-5
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
SHAPES = {"Qwen3-8B": (32, 8, 128), "odd heads": (3, 1, 64), "several tiles": (20, 12, 256), "MHA": (4, 4, 64)}


@pytest.mark.parametrize("cores", [1, 3, 40])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_row_is_normed_turned_and_written_by_one_core(
    dtype: torch.dtype, normed: bool, shape: tuple[int, int, int], cores: int
) -> None:
    heads, kv_heads, dim = shape
    noise = torch.Generator().manual_seed(0)
    qkv, *weights = (
        torch.randn(*size, generator=noise).to(dtype) for size in ((5, heads + 2 * kv_heads, dim), (dim,), (dim,))
    )
    norms = weights if normed else [None, None]
    rotation = RotaryTable(RopeConfig(1e4), dim, 100, dtype, REFERENCE).at(torch.arange(5) * 7)
    kv = LayerKv(*(torch.randn(3, 4, kv_heads, dim, generator=noise).to(dtype) for _ in range(2)))
    expected = LayerKv(kv.k.clone().float(), kv.v.clone().float())
    slots = torch.tensor([11, 0, 4, 7, 2], dtype=torch.int32).repeat_interleave(2)[::2]
    wide = [None if norm is None else norm.float() for norm in norms]
    wanted = Backend.qkv_into_kv(
        REFERENCE, qkv.float(), *wide, EPS, tuple(x.float() for x in rotation), expected, slots
    )
    q = rows.qkv_into_kv(qkv, *norms, EPS, rotation, kv, slots, cores=cores)
    assert q.dtype == dtype
    for found, right in ((q, wanted), (kv.k, expected.k)):
        torch.testing.assert_close(found.float(), right, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(kv.v.float(), expected.v)
