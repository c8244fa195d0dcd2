"""Every kernel against the operators that it stands for: the backend's own compositions, in fp32 and to rounding."""

import pytest
import torch
from torch import Tensor

from app.engine.checkpoint.shapes import RopeConfig
from app.engine.cuda.backend import CudaBackend
from app.engine.device.base import Backend, ContextRows, LayerKv, ProjectedRows, Rotation
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


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 8), (2, 2560)], ids=str)
def test_rms_norm(backend, dtype, shape):
    values = Values(dtype)
    x, weight = values.normal(*shape), values.normal(shape[-1])
    assert_close(backend.rms_norm(x, weight, EPS), REFERENCE.rms_norm(x.float(), weight.float(), EPS), dtype)
    apart = values.normal(shape[0], 2 * shape[-1])[:, : shape[-1]]
    assert_close(backend.rms_norm(apart, weight, EPS), REFERENCE.rms_norm(apart.float(), weight.float(), EPS), dtype)


@pytest.mark.parametrize("shape", [(3, 16), (2, 2560)], ids=str)
def test_add_rms_norm_returns_the_sum_and_its_norm(backend, dtype, shape):
    values = Values(dtype)
    x, residual, weight = values.normal(*shape), values.normal(*shape), values.normal(shape[-1])
    before = x.clone(), residual.clone()
    normed, total = backend.add_rms_norm(x, residual, weight, EPS)
    if dtype == torch.bfloat16:  # which the interpreter cuts where others round
        assert_close(total, x + residual, dtype)
    else:
        assert torch.equal(total, x + residual)
    assert_close(normed, REFERENCE.rms_norm((x + residual).float(), weight.float(), EPS), dtype)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("inner", [24, 1100])
def test_gated_mlp(backend, dtype, inner):
    values = Values(dtype)
    x, gate_up, down = values.normal(3, 8), values.normal(2 * inner, 8), values.normal(8, inner) * inner**-0.5
    expected = REFERENCE.gated_mlp(x.float(), gate_up.float(), down.float())
    found = backend.gated_mlp(x, gate_up, down)
    torch.testing.assert_close(found.float(), expected, atol=8 * TOLERANCES[dtype], rtol=8 * TOLERANCES[dtype])


def rotation(dim: int, rows: int, dtype: torch.dtype, backend: Backend) -> Rotation:
    return RotaryTable(RopeConfig(1e4), dim, 100, dtype, backend).at(torch.arange(rows) * 7)


def wide(rotation: Rotation) -> Rotation:
    return tuple(x.float() for x in rotation)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_qkv_into_kv_norms_turns_and_writes_and_touches_no_other_slot(backend, dtype, shape, normed):
    heads, kv_heads, dim = shape
    values, rows = Values(dtype), 5
    qkv = values.normal(rows, heads + 2 * kv_heads, dim)
    norms = (values.normal(dim), values.normal(dim)) if normed else (None, None)
    turns = rotation(dim, rows, dtype, backend)
    kv = LayerKv(*(values.normal(3, 4, kv_heads, dim) for _ in range(2)))
    expected = LayerKv(kv.k.clone().float(), kv.v.clone().float())
    slot_mapping = values.slot_mapping(rows, 12)
    widened = (x.float() if x is not None else None for x in norms)
    wanted = Backend.qkv_into_kv(
        REFERENCE, ProjectedRows(qkv.float(), *widened, EPS, wide(turns), expected, slot_mapping)
    )
    assert_close(backend.qkv_into_kv(ProjectedRows(qkv, *norms, EPS, turns, kv, slot_mapping)), wanted, dtype)
    assert_close(kv.k, expected.k, dtype)
    assert torch.equal(kv.v.float(), expected.v)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_context_of_all_layers_goes_to_the_slots_of_each_in_one_launch(backend, dtype, kv_heads):
    values, rows, layers, dim = Values(dtype), 3, 2, 32
    kv_tl2hd, k_norm = values.normal(rows, layers, 2, kv_heads, dim), values.normal(layers, dim)
    turns = rotation(dim, rows, dtype, backend)
    kv = LayerKv(*(values.normal(6, 4, kv_heads, dim) for _ in range(2)))
    expected = LayerKv(kv.k.clone().float(), kv.v.clone().float())
    slot_mapping = values.slot_mapping(rows * layers, 24)
    Backend.context_into_kv(
        REFERENCE,
        ContextRows(kv_tl2hd.float(), k_norm.float(), torch.ones(dim), EPS, wide(turns), expected, slot_mapping),
    )
    ones = torch.ones(dim, dtype=dtype)
    backend.context_into_kv(ContextRows(kv_tl2hd, k_norm, ones, EPS, turns, kv, slot_mapping))
    assert_close(kv.k, expected.k, dtype)
    assert torch.equal(kv.v.float(), expected.v)


@pytest.mark.parametrize("hidden", [8, 1100])
def test_blocks_are_an_anchor_and_masks(backend, dtype, hidden):
    values = Values(dtype)
    embedding, anchors = values.normal(20, hidden), torch.tensor([3, 19, 0], dtype=torch.int32)
    found = backend.embed_blocks(anchors, 7, 4, embedding)
    assert found.dtype == dtype and torch.equal(found, REFERENCE.embed_blocks(anchors, 7, 4, embedding))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_positions_and_slots_of_ragged_rows(backend, dtype, page_size):
    noise = torch.Generator().manual_seed(page_size)
    counts, starts = [1, 16, 3, 130], [0, 15, 40, 7]
    query_start_loc = torch.tensor([0, *counts]).cumsum(0)
    seq_ids = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).to(torch.int32)
    position_offsets = (torch.tensor(starts) - query_start_loc[:-1]).to(torch.int32)
    table = torch.randint(1 << 20, (4, 140), generator=noise).to(torch.int32)
    numbers = torch.arange(sum(counts), dtype=torch.int32)
    arguments = (seq_ids, position_offsets, numbers, table, page_size)
    found, expected = (made.positions_and_slots(*arguments) for made in (backend, REFERENCE))
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == torch.int32 and torch.equal(got, want)


def test_verify_is_the_reference_whatever_is_accepted(backend, dtype):
    """-1 is a choice that was not to be had; it equals no draft."""
    noise = torch.Generator().manual_seed(1)
    for width in (2, 5, 16):
        num_drafts = torch.randint(width, (7,), generator=noise)
        first = (num_drafts + 1).cumsum(0) - num_drafts - 1
        choices = torch.randint(-1, 2, (int((num_drafts + 1).sum()),), generator=noise)
        drafts = torch.randint(2, (4, width - 1), generator=noise).to(torch.int32)
        draft_index = torch.where(num_drafts > 0, torch.randint(4, (7,), generator=noise), 0)
        lengths = [x.to(torch.int32) for x in (first, num_drafts, draft_index)]
        for some in (drafts, None):
            found, expected = (made.verify(choices, some, *lengths) for made in (backend, REFERENCE))
            assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_sequences_begin_where_the_step_before_has_brought_them(backend, dtype):
    """Those without a line in it stay as they are, and so do all other rows; a token that is not to be had is 0."""
    noise = torch.Generator().manual_seed(2)
    for num_seqs, width in ((1, 1), (5, 4), (40, 16)):
        verified = torch.randint(-1, 9, (num_seqs + 2, width + 1), generator=noise)
        verified[:, -1] = torch.randint(width, (num_seqs + 2,), generator=noise)
        lines = torch.randperm(num_seqs + 2, generator=noise)[:num_seqs].to(torch.int32)
        lines[1::3] = -1
        places = (torch.arange(num_seqs + 1) * width).to(torch.int32)[:-1]
        before = [torch.randint(90, (size,), generator=noise).to(torch.int32) for size in (700, num_seqs, num_seqs)]
        found, expected = ([x.clone() for x in before] for _ in range(2))
        for run, (token_ids, position_offsets, kv_len) in ((backend, found), (REFERENCE, expected)):
            run.advance_by_accepted(verified, lines, token_ids, places, position_offsets, kv_len)
        assert all(map(torch.equal, found, expected))
        tokens, *lengths = found
        for i, line in enumerate(lines.tolist()):
            accepted = int(verified[line, -1]) if line >= 0 else 0
            at = int(places[i])
            assert tokens[at] == (max(int(verified[line, accepted]), 0) if line >= 0 else before[0][at])
            assert [int(x[i]) for x in lengths] == [int(x[i]) + accepted for x in before[1:]]
        untouched = torch.ones(700, dtype=torch.bool).index_fill(0, places.long(), False)
        assert torch.equal(tokens[untouched], before[0][untouched])


def test_a_step_without_sampled_rows_verifies_nothing(backend, dtype):
    none = torch.zeros(0, dtype=torch.int32)
    for drafts in (None, torch.zeros(1, 3, dtype=torch.int32)):
        lengths = (none.long(), drafts, none, none, none)
        assert backend.verify(*lengths).shape == REFERENCE.verify(*lengths).shape
