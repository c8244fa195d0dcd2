"""Every kernel conforms (app/check/operators.py) in each dtype, and what the suite does not ask."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from app.check.operators import Extent, cases, difference
from app.engine.checkpoint.shapes import RopeConfig
from app.engine.cuda.backend import CudaBackend
from app.engine.device.base import Backend, LayerKv, ProjectedRows, Rotation
from app.engine.device.torch import TorchBackend
from app.engine.models.rope import RotaryTable

torch.set_num_threads(1)

CPU = torch.device("cpu")
REFERENCE = TorchBackend(CPU)
EPS = 1e-5
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = {"GQA 2:1": (4, 2, 16), "GQA 4:1, wide heads": (8, 2, 128), "one KV head": (3, 1, 32), "MHA": (4, 4, 64)}

pytestmark = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend(CPU)


class Values:
    """Seeded values, rounded to `dtype`; `wide` is the same in fp32 for the reference."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.noise = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.noise).to(self.dtype)

    def slot_mapping(self, count: int, below: int) -> Tensor:
        return torch.randperm(below, generator=self.noise)[:count].to(torch.int32)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


SIZES = Extent(
    heads=((3, 1, 32),),
    causal={},
    both_ways={},
    page=3,
    hidden=1100,
    intermediate=1030,
    num_rows=(1, 5),
    layers=2,
    block=5,
    batches=(1, 7, 40),
)
NAMES = (
    "rms_norm add_rms_norm gated_mlp qkv_into_kv context_into_kv embed_blocks positions_and_slots verify "
    "advance_by_accepted"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_conforms(backend, dtype, name):
    for heads in SHAPES.values():
        for case in cases(replace(SIZES, heads=(heads,), tolerance=TOLERANCES[dtype]))[name]:
            relative = difference(backend, case.operator, dtype=dtype)[1]
            assert relative <= (TOLERANCES[dtype] if case.tolerance else 0.0), case.shape


def test_a_norm_of_rows_that_lie_apart_leaves_its_inputs(backend, dtype):
    values = Values(dtype)
    apart, weight = values.normal(3, 32)[:, :16], values.normal(16)
    before = apart.clone()
    assert_close(backend.rms_norm(apart, weight, EPS), REFERENCE.rms_norm(apart.float(), weight.float(), EPS), dtype)
    backend.add_rms_norm(apart.contiguous(), apart.contiguous(), weight, EPS)
    assert torch.equal(apart, before)


def rotation(dim: int, rows: int, dtype: torch.dtype, backend: Backend) -> Rotation:
    return RotaryTable(RopeConfig(1e4), dim, 100, dtype, backend).at(torch.arange(rows) * 7)


def wide(rotation: Rotation) -> Rotation:
    return tuple(x.float() for x in rotation)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_qkv_into_kv_without_norms_turns_and_writes_and_touches_no_other_slot(backend, dtype, shape):
    heads, kv_heads, dim = shape
    values, rows = Values(dtype), 5
    qkv = values.normal(rows, heads + 2 * kv_heads, dim)
    turns = rotation(dim, rows, dtype, backend)
    kv = LayerKv(*(values.normal(3, 4, kv_heads, dim) for _ in range(2)))
    expected = LayerKv(kv.k.clone().float(), kv.v.clone().float())
    slot_mapping = values.slot_mapping(rows, 12)
    wanted = Backend.qkv_into_kv(
        REFERENCE, ProjectedRows(qkv.float(), None, None, EPS, wide(turns), expected, slot_mapping)
    )
    assert_close(backend.qkv_into_kv(ProjectedRows(qkv, None, None, EPS, turns, kv, slot_mapping)), wanted, dtype)
    assert_close(kv.k, expected.k, dtype)
    assert torch.equal(kv.v.float(), expected.v)


def test_a_step_without_sampled_rows_verifies_nothing(backend, dtype):
    none = torch.zeros(0, dtype=torch.int32)
    for drafts in (None, torch.zeros(1, 3, dtype=torch.int32)):
        lengths = (none.long(), drafts, none, none, none)
        assert backend.verify(*lengths).shape == REFERENCE.verify(*lengths).shape


@pytest.mark.parametrize(("blocks", "width", "hidden", "group"), [(3, 5, 48, 16), (1, 1, 1040, 8), (2, 8, 2048, 16)])
def test_a_convolution_crosses_no_block(backend: CudaBackend, dtype: torch.dtype, blocks, width, hidden, group) -> None:
    values, groups = Values(dtype), hidden // group
    rows, base = values.normal(blocks * width, hidden), values.normal(2, 2, groups, group)
    change = values.normal(blocks, width, 2, 2, groups, 1)
    between, seen = values.normal(blocks * width, hidden), list[Tensor]()

    def part(x: Tensor) -> Tensor:
        seen.append(x)
        return between.to(x.dtype)

    expected = Backend.convolve(REFERENCE, part, rows.float(), base.float(), change.float())
    found = backend.convolve(part, rows, base, change)
    assert_close(seen[1], seen[0], dtype)
    assert_close(found, expected, dtype)
