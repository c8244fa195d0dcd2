"""A row has the same bits in every batch: at any place, beside any others, behind any context, on any pages."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import attention, eight_bits, products
from app.engine.cuda.backend import InvariantCudaBackend
from app.engine.device.base import AttentionMask, LayerKv, ProjectedRows
from app.engine.errors import UnsupportedError
from app.engine.quantised import QuantisedWeight
from tests.devices.cuda.engines import DENSE, GRAPHS, engine, requests, use_kernels
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.paged import Paged, attended
from tests.fast.engine.pairs import make_pair

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("sums_in_order")

COUNTS = (1, 3, 16, 64, 512)
HIDDEN = 64
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def backend() -> InvariantCudaBackend:
    return InvariantCudaBackend(CPU)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def places(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def assert_rows_alone(run: Any, row: Tensor, counts: Sequence[int] = COUNTS) -> None:
    """`run` of rows gives `row` the same bits among any number of others."""
    alone = run(row[None])[0]
    for count in counts:
        for place in places(count):
            rows = normal(count, *row.shape, seed=count, dtype=row.dtype)
            rows[place] = row
            assert torch.equal(run(rows)[place], alone), (count, place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("multiprocessors", [1, 4, 1000], ids=["whole", "parts for few rows", "parts"])
def test_a_product_of_a_row(dtype: torch.dtype, multiprocessors: int) -> None:
    x, weight, bias = (normal(*shape, dtype=dtype) for shape in ((2 * HIDDEN,), (100, 2 * HIDDEN), (100,)))
    assert (products.product_of(weight, multiprocessors).splits > 1) == (multiprocessors > 1)
    some = bias if multiprocessors == 4 else None
    assert_rows_alone(lambda rows: products.linear(rows, weight, some, multiprocessors), x)


@pytest.mark.parametrize("in_features", [2048, 6144], ids=["whole", "parts"])
def test_a_product_of_few_rows_of_a_row_in_a_block(in_features: int) -> None:
    """Without --batch-invariant too: a plain row and a verified one differ by other products alone."""
    weight = normal(128, in_features, dtype=torch.bfloat16)
    multiprocessors = 2 if in_features == 2048 else 4

    def multiply(rows: Tensor) -> Tensor:
        launch = products.few_rows(weight, len(rows), multiprocessors)
        assert launch and (launch.splits > 1) == (in_features == 6144)
        return products.linear(rows, weight, None, multiprocessors, launch)

    assert_rows_alone(multiply, normal(in_features, dtype=torch.bfloat16), (1, 16, products.FEW_ROWS))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("multiprocessors", [1, 8], ids=["whole", "parts for few rows"])
def test_a_product_of_a_row_by_a_quantised_weight(
    backend: InvariantCudaBackend, kind: torch.dtype, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the setting up to as many rows as one tile has. Results in fp32 show the order of sums."""
    x, numbers, scales = normal(512, dtype=torch.bfloat16), normal(100, 512), normal(4, 100, seed=1)
    weight = QuantisedWeight((20 * numbers).to(kind), scales.T, torch.float32)
    assert eight_bits.product_of(weight, 1, multiprocessors).splits == (1 if multiprocessors == 1 else 4)

    def run(rows: torch.Tensor, *, fixed: bool) -> torch.Tensor:
        return eight_bits.linear(eight_bits.quantised(rows, kind), weight, None, multiprocessors, fixed=fixed)

    assert_rows_alone(lambda rows: run(rows, fixed=True), x)
    assert_rows_alone(lambda rows: run(rows, fixed=len(rows) > eight_bits.ONE_TILE_ROWS), x)
    noted: list[bool] = []
    monkeypatch.setattr(eight_bits, "linear", lambda *_, fixed: noted.append(fixed))
    backend.linear(x[None], weight)
    assert noted == [True]


def test_such_a_product_is_pytorchs_and_its_parts_are_rounded_once(backend: InvariantCudaBackend) -> None:
    x, weight, bias = normal(70, 4 * HIDDEN), normal(200, 4 * HIDDEN, seed=1), normal(200, seed=2)
    for multiprocessors in (1, 1000):
        found = products.linear(x, weight, bias, multiprocessors)
        torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
    assert backend.linear(x[:0], weight).shape == (0, 200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_the_mlp_of_a_row(backend: InvariantCudaBackend, dtype: torch.dtype) -> None:
    x, weight = normal(HIDDEN, dtype=dtype), normal(HIDDEN, seed=1, dtype=dtype)
    gate_up, down = normal(4 * HIDDEN, HIDDEN, dtype=dtype), normal(HIDDEN, 2 * HIDDEN, dtype=dtype)
    assert_rows_alone(lambda rows: backend.rms_norm(rows, weight, 1e-6), x)
    assert_rows_alone(lambda rows: backend.add_rms_norm(rows, rows + 1, weight, 1e-6)[0], x)
    assert_rows_alone(lambda rows: backend.gated_mlp(rows, gate_up, down), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotated_and_normed_heads_of_a_row(backend: InvariantCudaBackend, dtype: torch.dtype) -> None:
    dim, norm = 16, normal(16, seed=1, dtype=dtype)

    def turned(rows: Tensor) -> Tensor:
        rotation = tuple(torch.full((len(rows), 1, dim), turn, dtype=dtype) for turn in (0.6, 0.8))
        pool = LayerKv(*(torch.zeros(len(rows), 1, 2, dim, dtype=dtype) for _ in range(2)))
        slots = torch.arange(len(rows), dtype=torch.int32)
        q = backend.qkv_into_kv(ProjectedRows(rows, norm, norm, 1e-6, rotation, pool, slots))
        return torch.cat((q, pool.k[:, 0], pool.v[:, 0]), dim=1)

    assert_rows_alone(turned, normal(8, dim, dtype=dtype))


def sequence_of(length: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    return tuple(normal(length, heads, 16, seed=seed + i, dtype=dtype) for i, heads in enumerate((4, 2, 2)))


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        pytest.param("full", torch.float32, marks=pytest.mark.slow),
        ("full", torch.bfloat16),
        pytest.param("window and sinks", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_attention_of_a_row(backend, monkeypatch, dtype, how):
    """Decoded alone, verified in a block at any place of it, and read with a prompt, whole and in chunks.

    Parts of 64 tokens are folded by one program, by one each, and by two that take turns.
    """
    monkeypatch.setattr(attention, "CHUNK", 64)
    mask = AttentionMask(causal=True, window=None if how == "full" else 34)
    sinks = None if how == "full" else normal(4)
    sequence, other, third = sequence_of(150, dtype), sequence_of(90, dtype, seed=10), sequence_of(33, dtype, seed=20)
    batches = [
        ([(sequence, 0, 150)], 0, 16, 1),
        ([(other, 89, 90), (sequence, 130, 131)], 1, 16, 2),
        ([(sequence, 120, 136), (other, 74, 90)], 0, 4, 3),
        ([(other, 80, 90), (sequence, 127, 143), (third, 32, 33)], 1, 16, 4),
        ([(third, 0, 33), (sequence, 115, 131)], 1, 128, 5),
        ([(sequence, 87, 150), (third, 32, 33)], 0, 16, 6),
        ([(third, 31 - i, 33 - i) for i in range(15)] + [(sequence, 129, 131)], 15, 16, 7),
    ]
    (alone,) = attended(backend, [(sequence, 130, 131)], mask, sinks=sinks)
    for multiprocessors, (shares, own, page_size, seed) in zip((1000, 1, 8, 1000, 40, 1, 60), batches, strict=True):
        monkeypatch.setattr(backend, "multiprocessors", multiprocessors)
        start = shares[own][1]
        found = attended(backend, shares, mask, sinks=sinks, page_size=page_size, seed=seed)[own]
        assert torch.equal(found[130 - start], alone[0]), seed
    for position in (0, 16, 63, 64, 127, 128):
        monkeypatch.setattr(backend, "multiprocessors", 1000)
        (single,) = attended(backend, [(sequence, position, position + 1)], mask, sinks=sinks)
        monkeypatch.setattr(backend, "multiprocessors", 1)
        (prompt,) = attended(backend, [(sequence, max(0, position - 3), position + 2)], mask, sinks=sinks)
        assert torch.equal(prompt[min(3, position)], single[0]), position


def test_attention_of_a_row_among_512(backend: InvariantCudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK", 32)
    monkeypatch.setattr(backend, "multiprocessors", 132)
    sequence, other = sequence_of(70, torch.float32), sequence_of(64, torch.float32, seed=10)
    (alone,) = attended(backend, [(sequence, 69, 70)], AttentionMask(causal=True))
    for count in COUNTS[1:]:
        rest, whole = (count - 1) % 64, [(other, 0, 64)] * ((count - 1) // 64)
        shares = [*whole, (sequence, 69, 70), (other, 0, rest)]
        found = attended(backend, shares, AttentionMask(causal=True))[len(whole)]
        assert torch.equal(found[0], alone[0]), count


def test_such_attention_is_a_softmax_over_each_sequences_own_tokens(backend, monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", 32)
    for sinks, window, causal, (rows, lens) in itertools.product(
        (None, torch.tensor([-30.0, 0.5, 2.0, 4.0])), (None, 20), (True, False), (([1, 16, 3, 7], [70, 90, 3, 64]),)
    ):
        case = Paged(rows, lens, causal=causal, window=window, sinks=sinks)
        for programs in (1, 2, 99):
            at = dataclasses.replace(backend.geometry(case.q, case.kv, case.meta), splits=programs)
            found = attention.paged_attention(case.q, case.kv, case.meta, case.mask, at, sinks)
            torch.testing.assert_close(found.double(), case.expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("seqs", "width", "tokens", "programs"),
    [
        (1, 1, 40_960, 16),
        (1, 16, 40_960, 16),
        (4, 16, 40_960, 4),
        (1, 1, 1_024, 2),
        (1, 16, 500, 1),
        (16, 16, 40_960, 1),
    ],
)
def test_a_long_context_is_read_by_many_programs_until_these_fill_the_device_or_memory(seqs, width, tokens, programs):
    """8 KV heads of 128 and 132 multiprocessors. 16 blocks would keep 336 MB."""
    at = attention.geometry([width] * seqs, attention.Heads(32, 8, 128), torch.bfloat16, 132, fixed=True)
    assert attention.splits_of_chunks(at, seqs * width * 32 * 128, tokens) == (programs, -(-tokens // attention.CHUNK))


def test_a_weight_whose_columns_are_no_whole_tiles_is_refused_by_name(backend: InvariantCudaBackend) -> None:
    with pytest.raises(UnsupportedError, match="--batch-invariant: a weight of 8 x 40"):
        backend.pack_weight(torch.zeros(8, 40))


def test_texts_in_bfloat16_are_equal_with_drafts_and_without_in_any_batch(tmp_path, monkeypatch):
    use_kernels(monkeypatch, InvariantCudaBackend)
    pair, asked = make_pair(tmp_path, **DENSE), requests(max_tokens=8)
    sizes: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    alone = run_engine(engine(pair, draft=False, max_num_seqs=1, **sizes), asked).texts
    for wishes in (GRAPHS, {"max_num_batched_tokens": 16}):
        run = run_engine(engine(pair, **sizes, **wishes), asked)
        assert run.texts == alone and run.verify_steps > 0
