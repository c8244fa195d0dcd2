"""The torch backend, and the CPU's on top of it, against the formulas; the sampler's noise against the reference."""

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.checkpoint.shapes import DecoderConfig, RopeConfig
from app.engine.cpu import attention, library
from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend, LayerKv, ProjectedRows
from app.engine.device.comparison import check_attention
from app.engine.device.factory import make_backend
from app.engine.device.torch import Call, TorchBackend
from app.engine.device.transfer import Packed
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool
from app.engine.models.rope import RotaryTable
from app.engine.sampling.metadata import Kind, SamplingMetadata
from app.engine.sampling.noise import noise_states
from app.engine.sampling.sampler import Sampler
from tests.fast.engine.paged import Paged
from tests.fast.engine.reference import gumbel

torch.set_num_threads(1)

CPU = torch.device("cpu")
GARBAGE = 1e4


@pytest.fixture(scope="module", params=[TorchBackend, CpuBackend])
def backend(request) -> TorchBackend:
    return request.param(CPU)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


# Attention

ragged = partial(Paged, dim=8, page_size=4, garbage=GARBAGE, extra_columns=0)


def check(case: Paged, backend: TorchBackend) -> None:
    torch.testing.assert_close(case.run(backend), case.expected.float(), atol=2e-5, rtol=2e-5)


def calls_of(case: Paged) -> list[Call]:
    return case.meta.plans[case.mask]


SINKS = torch.tensor([-30.0, 0.5, 2.0, 4.0])
"""Logits of four heads: one without weight, and one that takes most of it."""
LENGTHS = {
    "one whole prompt": ([7], [7]),
    "one block over its context": ([5], [22]),
    "one row": ([1], [9]),
    "rows of equal length": ([3, 3, 3], [8, 8, 8]),
    "plain decoding": ([1, 1, 1], [5, 17, 1]),
    "plain decoding at equal lengths": ([1, 1], [6, 6]),
    "blocks at different lengths": ([4, 4, 4], [9, 30, 4]),
    "ragged widths": ([1, 5, 2, 4], [16, 5, 33, 12]),
    "ragged widths at equal lengths": ([1, 3], [12, 12]),
    "chunks of prompts": ([12, 3, 7], [12, 20, 8]),
    "a sequence without rows": ([4, 1, 0], [9, 30, 0]),
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_sink_takes_its_share_of_every_rows_softmax(backend, lengths, window):
    check(ragged(*lengths, window=window, sinks=SINKS), backend)
    assert not torch.allclose(ragged(*lengths, sinks=SINKS).run(backend), ragged(*lengths).run(backend))


def test_scores_with_sinks_are_of_few_heads_at_once_where_they_are_many(monkeypatch):
    """PyTorch's own attention keeps no scores. With sinks there are scores of every head that goes at once."""
    backend, softmaxes = TorchBackend(CPU), []
    case = ragged([4], [9], sinks=SINKS)
    check(case, backend)
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: softmaxes.append(x.shape[1]) or torch.softmax(x, dim))
    whole = case.run(backend)
    monkeypatch.setattr("app.engine.device.torch.MAX_SCORES", 2 * 4 * 9)
    assert torch.equal(case.run(backend), whole) and softmaxes == [2, 1, 1]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_attention_is_a_softmax_over_each_sequences_own_tokens(backend, lengths, causal):
    check(ragged(*lengths, causal=causal), backend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("scores", "tokens", "small"), [(40, 10**6, 0), (10**6, 30, 0), (60, 40, 20), (1, 1, 1)])
def test_attention_split_into_bounded_calls_is_the_same(monkeypatch, scores, tokens, small, causal):
    """Long prompts are cut by rows, and sequences of different sizes go to different calls."""
    backend = TorchBackend(CPU)
    for name, bound in (("MAX_SCORES", scores), ("SMALL_CALL", small)):
        monkeypatch.setattr(f"app.engine.device.torch.{name}", bound)
    monkeypatch.setattr(backend, "max_gathered_tokens", tokens)
    num_calls = []
    for query_lens, host_seq_lens in LENGTHS.values():
        case = ragged(query_lens, host_seq_lens, causal=causal)
        check(case, backend)
        num_calls.append(len(calls_of(case)))
    assert max(num_calls) > 1


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("window", [1, 3, 8, 1000])
def test_a_row_sees_its_window_by_absolute_positions(backend, monkeypatch, window, causal):
    """However the rows are cut into calls."""
    for lengths in LENGTHS.values():
        check(ragged(*lengths, causal=causal, window=window, page_size=3), backend)
    monkeypatch.setattr("app.engine.device.torch.MAX_SCORES", 40)
    for lengths in LENGTHS.values():
        check(ragged(*lengths, causal=causal, window=window), backend)


def test_pages_behind_every_rows_window_are_not_read(backend):
    case = ragged([4, 1], [30, 40], window=6)
    case.meta.page_table[0, : (30 - 4 - 5) // 4] = case.meta.page_table[1, : (40 - 1 - 5) // 4] = 10**6
    check(case, backend)


def test_sequences_share_a_call_unless_contexts_differ_much(monkeypatch):
    backend = TorchBackend(CPU)
    monkeypatch.setattr(backend, "max_gathered_tokens", 64)
    monkeypatch.setattr("app.engine.device.torch.SMALL_CALL", 0)
    alike = ragged([2] * 6, [30, 28, 32, 29, 31, 27])
    check(alike, backend)
    assert [call.rows.tolist() for call in calls_of(alike)] == [[10, 11, 2, 3], [6, 7, 0, 1], [8, 9, 4, 5]]
    mixed = ragged([2] * 6, [4, 60, 4, 60, 4, 60])
    check(mixed, backend)
    assert [len(call.pages) for call in calls_of(mixed)] == [3, 1, 1, 1]


def test_one_long_prompt_beside_many_short_rows_is_not_padded_to_all_of_them():
    """64 rows of decoding beside a chunk of 500 would be 64 x 500 x 600 scores in one call."""
    case = ragged([500, *[1] * 64], [600, *range(20, 84)], heads=2, kv_heads=1, page_size=16)
    check(case, TorchBackend(CPU))
    assert len(calls_of(case)) > 1


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_attention_knows_any_page_size_and_a_page_table_wider_than_needed(backend, page_size, causal):
    for extra_columns in (0, 3):
        check(ragged([2, 4, 1], [18, 16, 17], page_size=page_size, causal=causal, extra_columns=extra_columns), backend)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (6, 3), (8, 1)])
@pytest.mark.parametrize("query_lens", [[3, 3], [2, 5]], ids=str)
def test_query_heads_share_kv_heads_in_neighbouring_groups(backend, heads, kv_heads, query_lens):
    for causal in (True, False):
        check(ragged(query_lens, [9, 9], heads=heads, kv_heads=kv_heads, causal=causal), backend)


def test_what_others_left_in_unused_slots_and_pages_changes_no_bit(backend):
    for causal in (True, False):
        for query_lens, host_seq_lens in LENGTHS.values():
            outputs = []
            for garbage in (0.0, GARBAGE, -1e18):
                case = ragged(query_lens, host_seq_lens, causal=causal, garbage=garbage, extra_columns=1)
                outputs.append(case.run(backend))
            assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_one_meta_serves_every_layer(backend):
    first, second = (ragged([2, 4], [9, 14], seed=seed) for seed in (0, 1))
    check(first, backend)
    moved = LayerKv(torch.zeros_like(second.kv.k), torch.zeros_like(second.kv.v))
    for mine, theirs in zip(first.pages, second.pages, strict=True):
        moved.k[mine], moved.v[mine] = second.kv.k[theirs], second.kv.v[theirs]
    found = backend.attention(second.q, moved, first.meta, first.mask)
    torch.testing.assert_close(found, second.expected.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("lengths", "calls"), [(([40, 7], [60, 7]), 1), (([3, 300, 5], [9, 900, 9]), 2)])
def test_no_copy_of_a_prompts_plan_is_waited_for(monkeypatch, lengths, calls):
    """As one of `torch.tensor(..., device=...)` is."""
    case, backend, uploads, make = ragged(*lengths), TorchBackend(CPU), [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values: make(values))
    monkeypatch.setattr(TorchBackend, "upload", lambda self, host, to: uploads.append(to.copy_(host)))
    assert len(backend.plan_attention(case.meta, case.mask, 2)) == calls and uploads


def test_the_block_of_a_draft_sees_itself_both_ways_and_a_verify_row_never_what_follows(backend):
    both, causal = (ragged([4], [10], causal=causal) for causal in (False, True))
    changed, changed_causal = (ragged([4], [10], causal=causal) for causal in (False, True))
    for case in (changed, changed_causal):
        page, offset = case.pages[0][9 // 4], 9 % 4
        case.kv.k[page, offset] += 1.0
        case.kv.v[page, offset] += 1.0
    before, after = both.run(backend), changed.run(backend)
    assert ((before - after).abs().amax(dim=(1, 2)) > 1e-3).all()
    before, after = causal.run(backend), changed_causal.run(backend)
    assert torch.equal(before[:3], after[:3]) and not torch.equal(before[3], after[3])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_start_up_refuses_a_device_whose_draft_attention_stays_causal_or_uses_the_wrong_pages(page_size):
    decoder = DecoderConfig(16, 16, 2, 4, 2, 8, 10, 1e-6, 1e4, 64, False, "float32", ())

    class Causal(TorchBackend):
        def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> object:
            return super().plan_attention(meta, mask._replace(causal=True), group)

    class Sorted(TorchBackend):
        def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> object:
            return super().plan_attention(replace(meta, page_table=meta.page_table.sort(dim=1).values), mask, group)

    class Astray(TorchBackend):
        def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
            super().write_kv(k_thd, v_thd, kv, slot_mapping.sort().values)

    for wrong, said in ((Causal, "bidirectional"), (Sorted, "causal"), (Astray, "causal")):
        with pytest.raises(UnsupportedError, match=f"{said} attention .*pages of {page_size}"):
            check_attention(wrong(CPU), decoder, page_size, rows=8, dtype=torch.float32)
    for rows in (1, 8):
        for dtype in (torch.float32, torch.bfloat16):
            check_attention(TorchBackend(CPU), decoder, page_size, rows, dtype)


# KV memory


def test_write_kv_fills_the_named_slots_and_no_others(backend):
    kv = LayerKv(normal(5, 4, 2, 8, seed=1), normal(5, 4, 2, 8, seed=2))
    expected_k, expected_v = kv.k.clone(), kv.v.clone()
    fused = normal(6, 4, 8, seed=3)  # K and V are views into one projection, like in the layer
    k, v = fused.split_with_sizes([2, 2], dim=1)
    slot_mapping = [19, 0, 7, 8, 5, 12]
    for row, slot in enumerate(slot_mapping):
        expected_k[slot // 4, slot % 4], expected_v[slot // 4, slot % 4] = k[row], v[row]
    backend.write_kv(k, v, kv, torch.tensor(slot_mapping, dtype=torch.int32))
    assert torch.equal(kv.k, expected_k) and torch.equal(kv.v, expected_v)


def test_a_write_to_all_layers_at_once_lands_in_the_same_slots_of_each(backend):
    config = DecoderConfig(16, 16, 3, 2, 2, 8, 10, 1e-6, 1e4, 64, False, "float32", ())
    pool = KvPool(config, num_pages=5, page_size=4, dtype=torch.float32, backend=backend)
    slot_mapping = torch.tensor([6, 19, 4], dtype=torch.int32)
    k, v = normal(3 * 3, 2, 8, seed=1), normal(3 * 3, 2, 8, seed=2)
    backend.write_kv(k, v, pool.all_layers, pool.slots_in_all_layers(slot_mapping))
    for layer, kv in enumerate(pool.layers):
        expected_k, expected_v = torch.zeros_like(kv.k), torch.zeros_like(kv.v)
        expected_k.view(-1, 2, 8)[slot_mapping] = k[layer::3]
        expected_v.view(-1, 2, 8)[slot_mapping] = v[layer::3]
        assert torch.equal(kv.k, expected_k) and torch.equal(kv.v, expected_v)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells a process its resident memory")
def test_kv_memory_is_zero_and_taken_as_it_is_written(backend):
    before = resident_bytes()
    half = backend.zeros((2, 64 << 20), torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.data_ptr() % 64 == 0
    assert resident_bytes() - before < 16 << 20
    half[0] = 1
    assert resident_bytes() - before > 120 << 20
    assert not half[1, :: 1 << 12].any() and half[0].min() == 1


# AttentionInputs


@pytest.mark.parametrize("shape", [(5, 32), (5, 4, 8)], ids=str)
def test_rms_norm_is_over_the_last_axis_with_its_weight(backend, shape):
    x, weight = normal(*shape) * 0.01, normal(shape[-1], seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(backend.rms_norm(x, weight, 1e-5), expected.float(), atol=1e-6, rtol=1e-5)


def test_add_rms_norm_returns_the_norm_and_the_stream_it_is_of(backend):
    x, residual, weight = normal(5, 32), normal(5, 32, seed=1), normal(32, seed=2)
    normed, stream = backend.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(stream, x + residual)
    assert torch.equal(normed, backend.rms_norm(x + residual, weight, 1e-6))


def test_rope_turns_pair_i_by_position_times_theta_to_the_minus_2i_over_d(backend):
    dim, theta = 16, 5000.0
    positions = torch.tensor([0, 1, 2, 77, 511])
    x = normal(5, 3, dim)
    found = backend.rope(x, RotaryTable(RopeConfig(theta), dim, 512, torch.float32, backend).at(positions))
    angles = positions.double()[:, None] * theta ** (-2 * torch.arange(dim // 2).double() / dim)
    pair_axis = -1 if backend.interleaved_rope else -2
    turned = torch.complex(*x.double().unflatten(-1, (-1, 2) if pair_axis == -1 else (2, -1)).unbind(pair_axis))
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.stack((turned.real, turned.imag), dim=pair_axis).flatten(-2).float()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(found[0], x[0])


@pytest.mark.parametrize("normed", [True, False, torch.float32], ids=["normed", "plain", "normed in float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_q_k_and_v_are_what_their_operators_give_one_by_one(backend, dtype, normed):
    qkv, slot_mapping = normal(5, 4 + 2 * 2, 8).to(dtype), torch.tensor([3, 17, 4, 8, 0], dtype=torch.int32)
    kind_of_norm = dtype if normed is True else torch.float32
    norms = [(1 + normal(8, seed=seed)).to(kind_of_norm) if normed else None for seed in (1, 2)]
    results = []
    for way, kind in ((backend.qkv_into_kv, dtype), (Backend.qkv_into_kv.__get__(backend), torch.float32)):
        rotation = RotaryTable(RopeConfig(1e4), 8, 50, kind, backend).at(torch.tensor([0, 7, 3, 49, 20]))
        kv = LayerKv(*(torch.zeros(5, 4, 2, 8, dtype=kind) for _ in range(2)))
        weights = [None if norm is None else norm.to(torch.promote_types(kind, norm.dtype)) for norm in norms]
        rows = ProjectedRows(qkv.to(kind, copy=True), *weights, 1e-6, rotation, kv, slot_mapping)
        results.append((way(rows), kv.k, kv.v))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, **rounded(backend, dtype))


@pytest.mark.skipif(not shutil.which(library.compiler()), reason="there is no g++")
@pytest.mark.parametrize("norms", [(None, None), (normal(8), normal(8))], ids=["plain", "normed"])
def test_fused_q_k_and_v_are_one_operator_on_a_cpu(norms):
    """Each operator and each view costs microseconds in each layer of a small model's step."""
    backend, qkv, slots = CpuBackend(CPU), normal(5, 4 + 2 * 2, 8), torch.arange(5, dtype=torch.int32)
    kv = LayerKv(*(torch.zeros(5, 4, 2, 8) for _ in range(2)))
    rotation = RotaryTable(RopeConfig(1e4), 8, 5, torch.float32, backend).at(slots)
    with Called() as called:
        backend.qkv_into_kv(ProjectedRows(qkv, *norms, 1e-6, rotation, kv, slots))
    assert called.operators == [
        torch.ops.aten.view_as_real.default,
        library.operators(torch.float32).rotate_into.default,
    ]


class Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def _is_own(backend: Backend, dtype: torch.dtype) -> bool:
    return isinstance(backend, CpuBackend) and attention.supports(dtype)


def rounded(backend: Backend, dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerances of a result beside that of float32. A CPU rounds to bfloat16 once, behind norm and RoPE."""
    if dtype == torch.float32:
        return {"atol": 1e-5, "rtol": 1e-5}
    return {"atol": 1e-5, "rtol": 2**-8} if _is_own(backend, dtype) else {"atol": 2**-5, "rtol": 2**-6}


def test_a_norm_on_a_cpu_is_rounded_to_bfloat16_once():
    x, weight = normal(7, 1024).bfloat16(), (1 + normal(1024, seed=1)).bfloat16()
    exact = torch.nn.functional.rms_norm(x.double(), (1024,), weight.double(), 1e-6)
    found = CpuBackend(CPU).rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=2**-8 * 1.001)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_weight_that_was_laid_out_gives_the_same(backend, rows):
    x, weight = normal(rows, 6), normal(10, 6, seed=1)
    laid = backend.pack_weight(weight)
    assert torch.equal(laid, weight)
    torch.testing.assert_close(backend.linear(x, laid), x @ weight.T)
    bias = normal(10, seed=2)
    torch.testing.assert_close(backend.linear(x, laid, bias), x @ weight.T + bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_weight_are_laid_out_as_one(backend, dtype):
    weight = normal(1300, 70).to(dtype)
    for sizes in ([1300], [3, 1, 1296], [700, 600]):
        assert torch.equal(backend.pack_weight(*weight.split(sizes)), weight)


def test_gated_mlp_takes_the_gate_first(backend):
    x, gate, up, down = normal(5, 8), normal(12, 8, seed=1), normal(12, 8, seed=2), normal(8, 12, seed=3)
    a, b = x.double() @ gate.double().T, x.double() @ up.double().T
    expected = (a / (1 + (-a).exp()) * b) @ down.double().T
    found = backend.gated_mlp(x, torch.cat((gate, up)), down)
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)


def test_memory_is_some_and_no_more_than_there_is(backend):
    free, total = backend.memory()
    assert 0 < free <= total


def test_a_device_that_is_not_here_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("npu", "npu:1", "cuda", "cuda:0"):
        with pytest.raises(UnsupportedError, match=f"--device {device}"):
            make_backend(device)
    assert make_backend("auto").device == make_backend("cpu").device == CPU


# The target's own choice

VOCAB = 97
DRAWS = [
    (0, 0),
    (0, 1),
    (1, 0),
    (2**31, 5),
    (2**32 - 1, 5),
    (2**32, 5),
    (2**63, 5),
    (2**64 - 1, 2**20),
    (0x1234_5678_9ABC_DEF0, 4097),
]


def states(draws: list[tuple[int, int]]) -> Tensor:
    """The noise states of (seed, index of the token drawn)."""
    return torch.tensor([int(noise_states(seed, index, 1)[0]) for seed, index in draws], dtype=torch.int32)


def test_gumbel_noise_equals_the_reference_bit_for_bit(backend):
    found = Sampler(VOCAB, backend).gumbel(states(DRAWS))
    for row, state, (seed, position) in zip(found, states(DRAWS), DRAWS, strict=True):
        assert torch.equal(row, gumbel(seed, position, VOCAB))
        some = Sampler(VOCAB, backend).gumbel(state[None], torch.tensor([[49, 0, 7]]))
        assert torch.equal(some[0], row[[49, 0, 7]]), "of some tokens"
    assert found.isfinite().all()
    assert len({tuple(row.tolist()) for row in found}) == len(DRAWS), "every bit of seed and position counts"


def test_logits_are_never_made_for_more_rows_than_a_chunk_has(backend, monkeypatch):
    monkeypatch.setattr("app.engine.sampling.sampler.LOGITS_CHUNK_BYTES", 3 * 4 * VOCAB)
    counting = Counting(CPU)
    Sampler(VOCAB, counting).choose(normal(8, 4), normal(VOCAB, 4))
    assert counting.made == [3, 3, 2]


def test_an_accelerator_reads_the_lm_head_once_for_32_whole_blocks_and_again_for_drawn_rows_of_many():
    counting = Counting(CPU)
    counting.device, counting.memory_is_host = torch.device("meta"), False
    vocab_size, rows = 151_936, 32 * 16 + 1
    sampler = Sampler(vocab_size, counting)
    hidden, lm_head = (torch.empty(size, 4, device="meta") for size in (rows, vocab_size))
    drawn = torch.ones(1, device="meta")
    draws = SamplingMetadata(Kind("", penalised=False), drawn.long(), temperature=drawn, state=drawn.int())
    sampler.choose(hidden, lm_head)
    sampler.propose(hidden, lm_head)
    sampler.choose(hidden, lm_head, [draws])
    sampler.choose(hidden[:441], lm_head, [draws])
    assert counting.made == [rows, rows, rows, 1, 441]


class Counting(TorchBackend):
    """Remembers how many rows each `linear` is given."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.made: list[int] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.made.append(x.shape[0])
        return super().linear(x, weight, bias)


def test_fewer_numbers_than_there_is_room_for_go_on_with_the_last_and_tables_with_zeros(backend):
    room = {"table": np.ones((2, 3), np.int32), "rows": np.ones(5, np.int32), "shares": np.ones(3, np.float32)}
    packed = Packed(room | {"slots": np.ones(2, np.int64)}, backend)
    given = {"table": np.array([[1, 2], [3, 4]], np.int32), "rows": np.array([7, 8], np.int32)}
    packed.send(given | {"shares": np.array([0.5], np.float32), "slots": np.array([5, 6], np.int64)})
    found = {name: tensor.tolist() for name, tensor in packed.tensors.items()}
    assert found == {"table": [[1, 2, 0], [3, 4, 0]], "rows": [7, 8, 8, 8, 8], "shares": [0.5] * 3, "slots": [5, 6]}


def test_greedy_ties_go_to_the_lowest_id(backend):
    lm_head = torch.zeros(VOCAB, 4)
    lm_head[[3, 40, 90], 0] = 1.0
    assert Sampler(VOCAB, backend).choose(torch.ones(2, 4), lm_head).tolist() == [3, 3]


def test_no_rows_yield_no_choices(backend):
    assert Sampler(VOCAB, backend).choose(torch.empty(0, 4), normal(VOCAB, 4)).tolist() == []


# Memory


@pytest.mark.parametrize(
    ("accepted", "asked"),
    [
        ((-3, -1), [(-3, 1 << 30), (-1, 2**31 - 1)]),
        ((), [(-3, 1 << 30), (-3, 32 << 20)]),
    ],
)
def test_glibc_is_asked_to_keep_what_a_step_gives_back(monkeypatch, accepted, asked):
    """First large blocks are to come from the heap; only where that is granted is the heap not to be trimmed."""
    calls = []
    glibc = SimpleNamespace(mallopt=lambda name, value: calls.append((name, value)) or int(name in accepted))
    monkeypatch.setattr("app.engine.cpu.backend.ctypes.CDLL", lambda _: glibc)
    backend = make_backend("cpu")
    assert calls == []  # what is freed while weights are read goes back
    backend.end_of_load(tune=False)
    assert calls == asked
