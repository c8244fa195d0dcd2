"""The CPU's own attention: right, the same bits for a row in every batch, and left out where it cannot be made."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from app.engine.cpu import attention, library, linear
from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv
from app.engine.device.torch import TorchBackend

torch.set_num_threads(1)
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not shutil.which(library.compiler()), reason="there is no g++")
CAUSAL, BOTH_WAYS = AttentionMask(causal=True), AttentionMask(causal=False)
LENGTHS = [1, 1, 16, 5, 0, 3, 70], [1, 300, 17, 1026, 0, 130, 70]
"""Rows and tokens of sequences: of several pieces and chunks, with rows of several blocks, and without any."""


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Batch:
    """Sequences on shuffled pages, whose unused slots are not even numbers."""

    query_lens: list[int]
    seq_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        counts = [-(-length // self.page_size) for length in self.seq_lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(len(counts)))
        table = torch.full((len(counts), max(counts) + 1), 10**6, dtype=torch.int32)
        shape = (max(1, sum(counts)), self.page_size, self.kv_heads, self.dim)
        self.kv = LayerKv(*(torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2)))
        self.q = [drawn(n, self.heads, self.dim, dtype=self.dtype, seed=i) for i, n in enumerate(self.query_lens)]
        self.k, self.v = (
            [drawn(n, self.kv_heads, self.dim, dtype=self.dtype, seed=seed + i) for i, n in enumerate(self.seq_lens)]
            for seed in (100, 200)
        )
        for seq, pages in enumerate(order.split(counts)):
            table[seq, : len(pages)] = pages
            for pool, own in ((self.kv.k, self.k[seq]), (self.kv.v, self.v[seq])):
                token = torch.arange(len(own))
                pool[pages[token // self.page_size], token % self.page_size] = own
        starts, lengths = [0, *accumulate(self.query_lens)], self.seq_lens
        tensors = [torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, lengths)]
        self.meta = AttentionMetadata(*tensors, table, self.query_lens, self.seq_lens, self.page_size)

    def run(self, mask: AttentionMask = CAUSAL) -> Tensor:
        return attention.attention(torch.cat(self.q), self.kv, self.meta, mask, self.sinks)

    def by_sequence(self, mask: AttentionMask = CAUSAL) -> tuple[Tensor, ...]:
        return self.run(mask).split(self.query_lens)

    def alone(self, seq: int) -> "Batch":
        """Return the batch of one sequence, on pages of its own."""
        one = replace(self, query_lens=[self.query_lens[seq]], seq_lens=[self.seq_lens[seq]])
        return one.filled(self.q[seq], self.k[seq], self.v[seq])

    def filled(self, q: Tensor, k: Tensor, v: Tensor) -> "Batch":
        """Return this batch of one sequence with these numbers."""
        self.q, self.k, self.v = [q], [k], [v]
        token = torch.arange(len(k))
        for pool, own in ((self.kv.k, k), (self.kv.v, v)):
            pool[self.meta.page_table[0, token // self.page_size].long(), token % self.page_size] = own
        return self

    def expected(self, mask: AttentionMask) -> Tensor:
        """Return a dense attention in float64."""
        return torch.cat([self._of_one(*parts, mask) for parts in zip(self.q, self.k, self.v, strict=True)])

    def _of_one(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        group = self.heads // self.kv_heads
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        scores = q @ k.repeat_interleave(group, dim=0).transpose(1, 2) / math.sqrt(self.dim)
        rows, tokens = scores.shape[1:]
        ahead = torch.arange(tokens) - torch.arange(tokens - rows, tokens)[:, None]
        hidden = (ahead > 0) & mask.causal
        if mask.window is not None:
            hidden |= ahead.abs() >= mask.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, rows, 1)), dim=2)
        shares = scores.softmax(dim=-1)[..., :tokens]
        return (shares @ v.repeat_interleave(group, dim=0)).transpose(0, 1)

    def check(self, mask: AttentionMask = CAUSAL) -> None:
        found, expected = self.run(mask), self.expected(mask)
        assert found.dtype == self.dtype and found.shape == expected.shape
        error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
        assert error < (2e-6 if self.dtype == torch.float32 else 2**-8), error


@contextmanager
def threads(count: int) -> Iterator[None]:
    linear.set_threads(count)
    try:
        yield
    finally:
        linear.set_threads(0)


@pytest.fixture(autouse=True, scope="module")
def is_here():
    assert attention.is_own(torch.float32) and attention.is_own(torch.bfloat16)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"),
    [(4, 2, 64, 16), (3, 3, 96, 1), (7, 1, 128, 3), (6, 2, 256, 64), (4, 2, 8, 4), (2, 1, 80, 16), (5, 5, 17, 16)],
)
def test_attention_is_a_softmax_over_each_sequences_own_tokens(heads, kv_heads, dim, page_size, dtype):
    batch = Batch(*LENGTHS, heads, kv_heads, dim, page_size, dtype)
    for mask in (CAUSAL, BOTH_WAYS):
        batch.check(mask)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_any_context_from_one_token_to_thousands_is_right(dtype):
    """Ends of vectors, of pieces, and of chunks."""
    for context in (1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 1023, 1024, 1025, 2049, 5000):
        Batch([1], [context], dtype=dtype).check()
        Batch([min(3, context)], [context], dtype=dtype).check(BOTH_WAYS)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 7, 128, 1500])
def test_windows_and_sinks_are_those_of_a_dense_attention(window, dtype):
    sinks = torch.tensor([-30.0, 0.5, 2.0, 4.0])
    query_lens, seq_lens = [1, 16, 5, 70], [300, 1040, 2500, 70]
    for causal in (True, False):
        mask = AttentionMask(causal, window)
        Batch(query_lens, seq_lens, dtype=dtype).check(mask)
        Batch(query_lens, seq_lens, dtype=dtype, sinks=sinks).check(mask)


def test_pages_behind_a_window_are_not_read():
    batch = Batch([4, 1], [300, 400])
    batch.meta.page_table[0, : (300 - 4 - 5) // 16] = batch.meta.page_table[1, : (400 - 1 - 5) // 16] = 10**6
    batch.check(AttentionMask(causal=True, window=6))


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("mask", [CAUSAL, BOTH_WAYS, AttentionMask(causal=True, window=90)], ids=str)
def test_a_row_has_the_same_bits_alone_in_every_batch_and_on_any_pages(mask, dtype):
    batch = Batch(*LENGTHS, dtype=dtype)
    for seq, whole in enumerate(batch.by_sequence(mask)):
        if batch.query_lens[seq]:
            assert torch.equal(batch.alone(seq).run(mask), whole)
    for page_size in (1, 3, 64):
        assert torch.equal(replace(batch, page_size=page_size).run(mask), batch.run(mask))


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("context", [20, 140, 1030])
def test_a_row_that_is_verified_has_the_bits_of_plain_decoding(context, dtype):
    """The rows of a block lie on both sides of the end of a piece, or of a chunk."""
    block = Batch([16], [context], dtype=dtype)
    whole = block.run()
    for row in range(16):
        length = context - 15 + row
        plain = Batch([1], [length], dtype=dtype).filled(
            block.q[0][row : row + 1], block.k[0][:length], block.v[0][:length]
        )
        assert torch.equal(plain.run()[0], whole[row])


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads"),
    [(([1] * 6, [900] * 6), 4, 2), (([2], [4100]), 4, 1), (([80], [1100]), 2, 1), (LENGTHS, 4, 4)],
    ids=["many", "one of few heads", "a prompt", "ragged"],
)
def test_threads_share_attention_and_change_no_bit(lengths, heads, kv_heads, dtype):
    for sinks in (None, torch.linspace(-1, 1, heads)):
        batch = Batch(*lengths, heads, kv_heads, dtype=dtype, sinks=sinks)
        with threads(1):
            expected = batch.run()
        for count in (2, 3, 3, 40):
            with threads(count):
                assert torch.equal(batch.run(), expected)


def test_rows_and_heads_of_q_may_be_parts_of_a_wider_tensor():
    batch = Batch([3, 2], [20, 40])
    expected = batch.run()
    wide = torch.full((5, 6, 64), torch.nan)
    wide[:, :4] = torch.cat(batch.q)
    found = attention.attention(wide[:, :4], batch.kv, batch.meta, CAUSAL, None)
    assert torch.equal(found, expected) and found.is_contiguous()


def test_kv_may_be_slots_without_pages():
    batch = Batch([3, 2], [20, 40])
    slots = LayerKv(batch.kv.k.flatten(0, 1), batch.kv.v.flatten(0, 1))
    assert torch.equal(attention.attention(torch.cat(batch.q), slots, batch.meta, CAUSAL, None), batch.run())


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_what_is_not_finite_stays_so_and_touches_no_other_row_or_sequence(dtype):
    batch = Batch([4, 1, 1], [9, 40, 40], dtype=dtype)
    expected = batch.run()
    batch.q[0][1, 2, 5] = torch.nan
    token = batch.meta.page_table[1, 0], 3
    batch.kv.k[token][0, 7] = torch.inf
    batch.kv.v[token][1, 7] = torch.nan
    found = batch.run()
    lost = torch.zeros(6, 4, 64, dtype=torch.bool)
    lost[1, 2] = lost[4, :2] = True
    lost[4, 2:, 7] = True
    finite = found.isfinite()
    assert not finite[1, 2].any() and not finite[4, 2:, 7].any() and not finite[4, :2].all()
    assert torch.equal(found[~lost], expected[~lost]) and finite[~lost].all()


@pytest.mark.parametrize("score", [1e4, -1e4, 80.0])
def test_large_scores_overflow_nowhere(score):
    batch = Batch([1, 2], [5, 200], heads=2, kv_heads=1, dim=16)
    for k in batch.k:
        k[:, 0, 0] = score
    batch.kv.k[..., 0] = score
    for q in batch.q:
        q[..., 0] = 1.0
    found = batch.run()
    torch.testing.assert_close(found.double(), batch.expected(CAUSAL), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("gap", [86.0, 88.0, 92.0, 97.0, 103.0, 110.0])
def test_a_token_whose_score_is_far_below_the_largest_counts_for_nothing(gap):
    """exp(-gap) is the smallest normal number of float32 at 87.3, and its smallest of all at 103.3."""
    batch = Batch([2], [20], heads=2, kv_heads=1, dim=16)
    k = torch.zeros(20, 1, 16)
    k[7:, :, 0] = 4 * gap  # scores are divided by 4
    batch.filled(torch.eye(16)[:1].repeat(2, 2, 1), k, batch.v[0])
    found = batch.run()
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), batch.expected(CAUSAL), atol=1e-5, rtol=1e-5)


def test_its_shape_is_known_without_numbers_and_wrong_tensors_are_refused():
    batch = Batch([3], [20])
    q, kv = torch.cat(batch.q), batch.kv
    fake = attention.attention(q.to("meta"), LayerKv(kv.k.to("meta"), kv.v.to("meta")), batch.meta, CAUSAL, None)
    assert fake.shape == q.shape and fake.device.type == "meta"
    wrong = [
        (q.double(), kv, batch.meta),
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
    with pytest.raises(RuntimeError, match="sinks"):
        attention.attention(q, kv, batch.meta, CAUSAL, torch.zeros(3))


@pytest.mark.parametrize("missing", [False, True])
def test_float16_and_all_dtypes_without_the_operator_are_pytorchs(monkeypatch, missing):
    if missing:
        monkeypatch.setattr(linear, "_operator", lambda: None)
    backend = CpuBackend(CPU)
    for dtype in (torch.float16, torch.float32):
        batch = Batch([2, 2], [20, 33], dtype=dtype)
        for pool in (batch.kv.k, batch.kv.v):
            pool.nan_to_num_(0)
        batch.meta.page_table[batch.meta.page_table == 10**6] = 0
        backend.check(64, 1, 16, dtype)
        batch.meta.plans[CAUSAL] = backend.plan_attention(batch.meta, CAUSAL, 2)
        assert (batch.meta.plans[CAUSAL] is None) == (not missing and dtype == torch.float32)
        found = backend.attention(torch.cat(batch.q), batch.kv, batch.meta, CAUSAL)
        expected = replace(batch.meta, plans={CAUSAL: TorchBackend(CPU).plan_attention(batch.meta, CAUSAL, 2)})
        by_pytorch = TorchBackend(CPU).attention(torch.cat(batch.q), batch.kv, expected, CAUSAL)
        assert torch.equal(found, by_pytorch) == (missing or dtype == torch.float16)
        torch.testing.assert_close(found, by_pytorch)
