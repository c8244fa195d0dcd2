"""The CPU's own attention: right, the same bits for a row in every batch, and left out where it cannot be made."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from app.engine.cpu import attention, library, linear
from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import AttentionMask, LayerKv
from app.engine.device.torch import TorchBackend
from tests.fast.engine.paged import Paged

torch.set_num_threads(1)
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not shutil.which(library.compiler()), reason="there is no g++")
CAUSAL = AttentionMask(causal=True)
LENGTHS = [1, 1, 16, 5, 0, 3, 70], [1, 300, 17, 1026, 0, 130, 70]
"""Rows and tokens of sequences: of several pieces and chunks, with rows of several blocks, and without any."""


batch_of = partial(Paged, dim=64, filler=10**6)


def run(batch: Paged) -> Tensor:
    return attention.attention(batch.q, batch.kv, batch.meta, batch.mask, batch.sinks)


def check(batch: Paged) -> None:
    found, expected = run(batch), batch.expected
    assert found.dtype == batch.dtype and found.shape == expected.shape
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    assert error < (2e-6 if batch.dtype == torch.float32 else 2**-8), error


@contextmanager
def threads(count: int) -> Iterator[None]:
    linear.set_up(threads=count)
    try:
        yield
    finally:
        linear.set_up(threads=0)


@pytest.fixture(autouse=True, scope="module")
def is_here():
    assert attention.supports(torch.float32) and attention.supports(torch.bfloat16)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"),
    [(4, 2, 64, 16), (3, 3, 96, 1), (7, 1, 128, 3), (6, 2, 256, 64), (4, 2, 8, 4), (2, 1, 80, 16), (5, 5, 17, 16)],
)
def test_attention_is_a_softmax_over_each_sequences_own_tokens(heads, kv_heads, dim, page_size, dtype):
    for causal in (True, False):
        check(Paged(*LENGTHS, heads, kv_heads, dim, page_size, causal, dtype=dtype, filler=10**6))


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_any_context_from_one_token_to_thousands_is_right(dtype):
    for context in (1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 1023, 1024, 1025, 2049, 5000):
        check(batch_of([1], [context], dtype=dtype))
        check(batch_of([min(3, context)], [context], dtype=dtype, causal=False))


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 7, 128, 1500])
def test_windows_and_sinks_are_those_of_a_dense_attention(window, dtype):
    sinks = torch.tensor([-30.0, 0.5, 2.0, 4.0])
    query_lens, seq_lens = [1, 16, 5, 70], [300, 1040, 2500, 70]
    for causal in (True, False):
        for some in (None, sinks):
            check(batch_of(query_lens, seq_lens, dtype=dtype, causal=causal, window=window, sinks=some))


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 90}], ids=str)
def test_a_row_has_the_same_bits_alone_in_every_batch_and_on_any_pages(mask, dtype):
    batch = batch_of(*LENGTHS, dtype=dtype, **mask)
    whole = run(batch)
    for q_len, kv_len, numbers, rows in zip(*LENGTHS, batch.numbers, whole.split(batch.query_lens), strict=True):
        if q_len:
            assert torch.equal(run(replace(batch, query_lens=[q_len], host_seq_lens=[kv_len], numbers=[numbers])), rows)
    for page_size in (1, 3, 64):
        assert torch.equal(run(replace(batch, page_size=page_size)), whole)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("context", [20, 140, 1030])
def test_a_row_that_is_verified_has_the_bits_of_plain_decoding(context, dtype):
    block = batch_of([16], [context], dtype=dtype)
    whole, [(q, k, v)] = run(block), block.numbers
    for row in range(16):
        length = context - 15 + row
        plain = batch_of([1], [length], dtype=dtype, numbers=[(q[row : row + 1], k[:length], v[:length])])
        assert torch.equal(run(plain)[0], whole[row])


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads"),
    [(([1] * 6, [900] * 6), 4, 2), (([2], [4100]), 4, 1), (([80], [1100]), 2, 1), (LENGTHS, 4, 4)],
    ids=["many", "one of few heads", "a prompt", "ragged"],
)
def test_threads_share_attention_and_change_no_bit(lengths, heads, kv_heads, dtype):
    for sinks in (None, torch.linspace(-1, 1, heads)):
        batch = batch_of(*lengths, heads, kv_heads, dtype=dtype, sinks=sinks)
        with threads(1):
            expected = run(batch)
        for count in (2, 3, 3, 40):
            with threads(count):
                assert torch.equal(run(batch), expected)


def test_rows_and_heads_of_q_may_be_parts_of_a_wider_tensor():
    batch = batch_of([3, 2], [20, 40])
    wide = torch.full((5, 6, 64), torch.nan)
    wide[:, :4] = batch.q
    found = attention.attention(wide[:, :4], batch.kv, batch.meta, CAUSAL, None)
    assert torch.equal(found, run(batch)) and found.is_contiguous()


def test_kv_may_be_slots_without_pages():
    batch = batch_of([3, 2], [20, 40])
    slots = LayerKv(batch.kv.k.flatten(0, 1), batch.kv.v.flatten(0, 1))
    assert torch.equal(attention.attention(batch.q, slots, batch.meta, CAUSAL, None), run(batch))


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_what_is_not_finite_stays_so_and_touches_no_other_row_or_sequence(dtype):
    batch = batch_of([4, 1, 1], [9, 40, 40], dtype=dtype)
    expected = run(batch)
    batch.numbers[0][0][1, 2, 5] = torch.nan
    token = batch.meta.page_table[1, 0], 3
    batch.kv.k[token][0, 7] = torch.inf
    batch.kv.v[token][1, 7] = torch.nan
    found = run(batch)
    lost = torch.zeros(6, 4, 64, dtype=torch.bool)
    lost[1, 2] = lost[4, :2] = True
    lost[4, 2:, 7] = True
    finite = found.isfinite()
    assert not finite[1, 2].any() and not finite[4, 2:, 7].any() and not finite[4, :2].all()
    assert torch.equal(found[~lost], expected[~lost]) and finite[~lost].all()


@pytest.mark.parametrize("score", [1e4, -1e4, 80.0])
def test_large_scores_overflow_nowhere(score):
    batch = batch_of([1, 2], [5, 200], heads=2, kv_heads=1, dim=16)
    for q, k, _ in batch.numbers:
        q[..., 0], k[..., 0] = 1.0, score
    batch = replace(batch, numbers=batch.numbers)
    torch.testing.assert_close(run(batch).double(), batch.expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("gap", [86.0, 88.0, 92.0, 97.0, 103.0, 110.0])
def test_a_token_whose_score_is_far_below_the_largest_counts_for_nothing(gap):
    """exp(-gap) is the smallest normal number of float32 at 87.3, and its smallest of all at 103.3."""
    q, k, v = torch.eye(16)[:1].repeat(2, 2, 1), torch.zeros(20, 1, 16), torch.randn(20, 1, 16)
    k[7:, :, 0] = 4 * gap  # scores are divided by 4
    batch = batch_of([2], [20], heads=2, kv_heads=1, dim=16, numbers=[(q, k, v)])
    found = run(batch)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), batch.expected, atol=1e-5, rtol=1e-5)


def test_wrong_tensors_are_refused():
    batch = batch_of([3], [20])
    q, kv = batch.q, batch.kv
    wrong = [
        (q.bfloat16(), kv, batch.meta),
        (q[:, :3], kv, batch.meta),
        (q[..., :32], kv, batch.meta),
        (q, LayerKv(kv.k.transpose(0, 1), kv.v), batch.meta),
        (q, kv, replace(batch.meta, seq_lens=batch.meta.seq_lens.long())),
        (q, kv, replace(batch.meta, query_start_loc=batch.meta.query_start_loc[:1])),
    ]
    for arguments in wrong:
        with pytest.raises(RuntimeError, match="attention takes"):
            attention.attention(*arguments, CAUSAL, None)
    with pytest.raises(KeyError, match="float64"):
        attention.attention(q.double(), kv, batch.meta, CAUSAL, None)
    with pytest.raises(RuntimeError, match="sinks"):
        attention.attention(q, kv, batch.meta, CAUSAL, torch.zeros(3))


@pytest.mark.parametrize("missing", [False, True])
def test_float16_and_all_dtypes_without_the_operator_are_pytorchs(monkeypatch, missing):
    if missing:
        monkeypatch.setattr(linear, "compiled", lambda dtype: None)
    backend = CpuBackend(CPU)
    for dtype in (torch.float16, torch.float32):
        batch = Paged([2, 2], [20, 33], dim=64, dtype=dtype, garbage=0.0)
        backend.check(SimpleNamespace(head_dim=64), 1, 16, dtype)
        batch.meta.plans[CAUSAL] = backend.plan_attention(batch.meta, CAUSAL, 2)
        assert (batch.meta.plans[CAUSAL] is None) == (not missing and dtype == torch.float32)
        found = backend.attention(batch.q, batch.kv, batch.meta, CAUSAL)
        by_pytorch = batch.run(TorchBackend(CPU))
        assert torch.equal(found, by_pytorch) == (missing or dtype == torch.float16)
        torch.testing.assert_close(found, by_pytorch)
