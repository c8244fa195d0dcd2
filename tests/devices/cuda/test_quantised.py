"""Rows meet quantised weights in 8 bits, by launches of the norm before them, and drafts change no token of a target
that has such weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import eight_bits, rows
from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend
from app.engine.device.torch import TorchBackend
from app.engine.quantised import QuantisedRows, QuantisedWeight, Rows, Weight, plain
from tests.devices.cuda.engines import DENSE, GRAPHS, engine, requests, use_kernels
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.quantised import E4M3, quantise

torch.set_num_threads(1)
BF16 = torch.bfloat16
COLUMNS = 640
KINDS = [torch.int8, E4M3]
EPS = 1e-6
WHOLE_GROUPS: dict[str, Any] = DENSE | {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 128,
    "expert_size": 128,
}
"""A pair whose weights all have columns in groups of 128."""

by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend(torch.device("cpu"))


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def weight_of(kind: torch.dtype, group: int, out: int = 208) -> QuantisedWeight:
    """A weight with scales that differ widely, packed."""
    noise = torch.Generator().manual_seed(group)
    scales = torch.rand(out, COLUMNS // group, generator=noise) ** 4 / 256
    data = (30 * torch.randn(out, COLUMNS, generator=noise)).to(kind)
    packed = CudaBackend(torch.device("cpu")).pack_linear(QuantisedWeight(data, scales, BF16))
    assert isinstance(packed, QuantisedWeight) and torch.equal(packed.data.float(), data.float())
    assert torch.equal(packed.scales.repeat_interleave(128, 1), scales.repeat_interleave(group, 1))
    return packed


def same_rows(one: QuantisedRows, other: QuantisedRows) -> bool:
    count = len(one.data)
    bits = (x.data.view(torch.int8) for x in (one, other))
    return torch.equal(*bits) and torch.equal(one.scales[:, :count], other.scales[:, :count])


@by_kind
def test_rows_are_quantised_for_a_quantised_weight_and_a_scale_a_row_is_one_of_each_group(
    backend: CudaBackend, kind: torch.dtype
) -> None:
    bias = normal(208)
    for group in (128, COLUMNS):
        weight = weight_of(kind, group)
        for count in (1, 64, 130):
            x = normal(count, COLUMNS)
            wanted = eight_bits.linear(eight_bits.quantised(x, kind), weight, bias, backend.multiprocessors)
            assert torch.equal(backend.linear(x, weight, bias), wanted)


@by_kind
def test_a_norm_quantises_its_rows_as_a_launch_of_its_own_would(backend: CudaBackend, kind: torch.dtype) -> None:
    weight, quantised = normal(COLUMNS), weight_of(kind, 128)
    other = normal(4, COLUMNS)
    for count in (1, 5):
        x, residual = normal(count, COLUMNS), normal(count, COLUMNS) + 1
        for before in (None, residual):
            wanted, stream = backend.norm_for(x, before, weight, EPS, (other,))
            for readers in ((quantised,), (quantised, other), (other, quantised)):
                found, total = backend.norm_for(x, before, weight, EPS, readers)
                assert isinstance(found, QuantisedRows) and torch.equal(total, stream)
                assert same_rows(found, eight_bits.quantised(plain(wanted), kind))
                assert (found.plain is None) == (len(readers) == 1)
                assert found.plain is None or torch.equal(found.plain, plain(wanted))
                assert torch.equal(backend.linear(found, quantised), backend.linear(wanted, quantised))


def test_a_reader_of_another_kind_takes_the_plain_rows(backend: CudaBackend) -> None:
    first, second = (weight_of(kind, 128) for kind in KINDS)
    found, _ = backend.norm_for(normal(3, COLUMNS), None, normal(COLUMNS), EPS, (first, second))
    assert torch.equal(backend.linear(found, second), backend.linear(plain(found), second))


@by_kind
def test_a_gated_mlp_quantises_between_its_products(backend: CudaBackend, kind: torch.dtype) -> None:
    gate_up, down = normal(2 * COLUMNS, 16), weight_of(kind, 128)
    for count in (1, 5):
        x = normal(count, 16)
        inner = rows.silu_mul(backend.linear(x, gate_up))
        assert isinstance(inner, Tensor)
        found = rows.silu_mul(backend.linear(x, gate_up), kind)
        assert isinstance(found, QuantisedRows) and same_rows(found, eight_bits.quantised(inner, kind))
        assert torch.equal(backend.gated_mlp(x, gate_up, down), backend.linear(inner, down))


@by_kind
def test_heads_of_attention_are_quantised_with_their_gates(backend: CudaBackend, kind: torch.dtype) -> None:
    weight = torch.ones(1)
    for count in (1, 5):
        gate, x = normal(count, 2 * COLUMNS)[:, COLUMNS:], normal(count, COLUMNS)
        found = backend.sigmoid_mul(x, gate, weight)
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, (x.float() * gate.float().sigmoid()).to(x.dtype), rtol=2**-7, atol=0)
        quantised = backend.sigmoid_mul(x, gate, QuantisedWeight(weight.to(kind), weight, BF16))
        assert isinstance(quantised, QuantisedRows) and same_rows(quantised, eight_bits.quantised(found, kind))


@by_kind
def test_heads_of_whole_groups_are_quantised_with_their_gates(backend: CudaBackend, kind: torch.dtype) -> None:
    weight = torch.ones(1)
    for count, heads, dim in ((1, 4, 128), (5, 2, 256), (3, 4, 32)):
        z, norm = normal(count, 2 * heads * dim)[:, : heads * dim], normal(dim, dtype=torch.float32)
        o = normal(count, heads, dim, dtype=torch.float32)
        wanted = backend.gated_norm(o, z, norm, EPS, weight)
        composed = TorchBackend(torch.device("cpu")).gated_norm(o, z, norm, EPS, weight)
        torch.testing.assert_close(wanted, composed, rtol=2**-7, atol=1e-6)
        found = backend.gated_norm(o, z, norm, EPS, QuantisedWeight(torch.ones(1).to(kind), weight, BF16))
        assert isinstance(wanted, Tensor) and isinstance(found, QuantisedRows) == (dim >= 128)
        if isinstance(found, QuantisedRows):
            assert same_rows(found, eight_bits.quantised(wanted, kind)) and found.plain is None


@pytest.mark.parametrize(("kind", "least", "most"), [(E4M3, 0.022, 0.028), (torch.int8, 0.005, 0.008)], ids=str)
def test_the_error_of_rows_in_8_bits_is_what_the_docs_say(
    backend: CudaBackend, kind: torch.dtype, least: float, most: float
) -> None:
    weight, x = weight_of(kind, 128), normal(16, COLUMNS)
    wanted = x.float() @ replace(weight, dtype=torch.float32).dequantised().T
    error = (backend.linear(x, weight).float() - wanted).norm() / wanted.norm()
    assert least < error < most


class Cublas:
    """Stands for F.scaled_mm, which no CPU has: it takes what ScaledBlas takes, and multiplies in fp32."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self, a: Tensor, b: Tensor, a_scales: Tensor, a_kind: Any, b_scales: Tensor, b_kind: Any, **how: Any
    ) -> Tensor:
        (rows, size), out, groups = a.shape, b.shape[1], a.shape[1] // 128
        assert a_kind == b_kind == F.ScalingType.BlockWise1x128 and a.dtype == b.dtype == E4M3
        assert rows % 4 == 0 and size % 128 == 0 and out % 16 == 0 and a.is_contiguous() and b.t().is_contiguous()
        assert (a_scales.shape, a_scales.stride()) == ((rows, groups), (1, rows))
        assert (b_scales.shape, b_scales.stride()) == ((out, groups), (1, out))
        assert a_scales.dtype == b_scales.dtype == torch.float32
        self.calls.append(rows)
        wide = (x.float() * scales.repeat_interleave(128, 1) for x, scales in ((a, a_scales), (b.t(), b_scales)))
        found = F.linear(*wide, how["bias"] if how["bias"] is None else how["bias"].float())
        return found.to(how["output_dtype"])


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> Cublas:
    monkeypatch.setattr(F, "scaled_mm", stands := Cublas())
    return stands


@pytest.mark.parametrize("group", [128, COLUMNS])
def test_cublas_takes_rows_weight_and_scales_as_they_are(backend: CudaBackend, cublas: Cublas, group: int) -> None:
    backend.has_scaled_mm, weight, bias = True, weight_of(E4M3, group), normal(208)
    for count, some in ((32, None), (33, None), (64, None), (65, bias), (127, None)):
        x = normal(count, COLUMNS)
        found = backend.linear(x, weight, some)
        wanted = eight_bits.linear(eight_bits.quantised(x, E4M3), weight, some, backend.multiprocessors)
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=1e-3)
        assert found.shape == (count, 208)
    assert cublas.calls == [36, 64, 68, 128]


def test_cublas_multiplies_neither_int8_nor_in_float16_nor_where_rows_keep_their_bits(cublas: Cublas) -> None:
    for backend, weight in (
        (CudaBackend(torch.device("cpu")), weight_of(torch.int8, 128)),
        (CudaBackend(torch.device("cpu")), replace(weight_of(E4M3, 128), dtype=torch.float16)),
        (CudaBackend(torch.device("cpu")), weight_of(E4M3, 128, out=200)),
        (InvariantCudaBackend(torch.device("cpu")), weight_of(E4M3, 128)),
    ):
        backend.has_scaled_mm = True
        backend.linear(normal(70, COLUMNS, dtype=weight.dtype), weight)
    assert not cublas.calls


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_weights_are_dequantised_if_128_numbers_share_no_scale_or_the_engine_is_in_fp32(dtype: torch.dtype) -> None:
    for columns, group in ((COLUMNS, 64), (COLUMNS, 320), (192, 192)) if dtype == BF16 else ((COLUMNS, 128),):
        weight = QuantisedWeight(torch.ones(4, columns, dtype=torch.int8), torch.ones(4, columns // group), dtype)
        found = CudaBackend(torch.device("cpu")).pack_linear(weight, weight)
        assert isinstance(found, Tensor) and found.dtype == dtype and found.shape == (8, columns)


@pytest.mark.parametrize(
    ("how", "is_kept"),
    [
        ("fp8 by row", True),
        pytest.param("int8 by row", True, marks=pytest.mark.slow),
        pytest.param("fp8 in blocks", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_change_no_token_of_a_quantised_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, is_kept: bool
) -> None:
    """Blocks of the tiny pair are no whole groups."""
    kept: list[QuantisedWeight] = []

    class Noted(InvariantCudaBackend):
        def pack_quantised(self, weight: QuantisedWeight) -> QuantisedWeight:
            kept.append(weight)
            return super().pack_quantised(weight)

    use_kernels(monkeypatch, Noted)
    pair = make_pair(tmp_path / "pair", **WHOLE_GROUPS)
    pair = replace(pair, target=quantise(pair.target, tmp_path, how)[0])
    sizes: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    off = run_engine(engine(pair, draft=False, **sizes), requests(max_tokens=6))
    on = run_engine(engine(pair, **sizes, **GRAPHS), requests(max_tokens=6))
    assert on.texts == off.texts and on.verify_steps > 0
    assert bool(kept) == is_kept


def test_drafts_change_no_token_of_a_hybrid_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recurrent layers have plain gates beside quantised products, and heads of whole groups."""
    seen: list[bool] = []

    class Noted(CudaBackend):
        def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float, reader: Weight) -> Rows:
            found = super().gated_norm(o, z, weight, eps, reader)
            seen.append(isinstance(found, QuantisedRows))
            return found

    use_kernels(monkeypatch, Noted)
    sizes = {name: value for name, value in WHOLE_GROUPS.items() if name not in ("num_layers", "expert_size")}
    heads: dict[str, Any] = {"k_heads": 1, "v_heads": 2, "k_dim": 16, "v_dim": 128}
    layers = ("linear_attention", "full_attention")
    pair = make_hybrid_pair(tmp_path / "pair", **sizes | {"seed": 11, "vocab_size": 5}, **heads, layer_types=layers)
    pair = replace(pair, target=quantise(pair.target, tmp_path, "fp8 by row")[0])
    off, on = (
        run_engine(engine(pair, draft=draft, dtype="bfloat16"), requests(max_tokens=5)) for draft in (False, True)
    )
    assert on.texts == off.texts and on.verify_steps > 0 and all(seen) and seen


@pytest.mark.slow
def test_drafts_change_no_token_of_64_short_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --batch-invariant, in steps of up to 32 sequences."""
    use_kernels(monkeypatch)
    pair = make_pair(tmp_path / "pair", **WHOLE_GROUPS)
    pair = replace(pair, target=quantise(pair.target, tmp_path, "fp8 by row")[0])
    prompts = [tuple((7 * i + j * j) % 5 for j in range(1 + i % 4)) for i in range(64)]
    asked = [flat_request(f"r{i}", prompt, 5) for i, prompt in enumerate(prompts)]
    sizes: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 32}
    off, on = run_engine(engine(pair, draft=False, **sizes), asked), run_engine(engine(pair, **sizes), asked)
    assert on.texts == off.texts and len(on.texts) == 64 and on.verify_steps > 0


def test_drafts_change_no_token_of_a_target_whose_experts_are_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch)
    pair = make_pair(tmp_path / "pair", **WHOLE_GROUPS, experts=4)
    pair = replace(pair, target=quantise(pair.target, tmp_path, "fp8 by row")[0])
    plain, drafting = engine(pair, draft=False, dtype="bfloat16"), engine(pair, dtype="bfloat16", **GRAPHS)
    for layer in drafting.core.runner.forward.target.layers:
        assert {weight.data.dtype.itemsize for weight in (layer.mixture[1].gate_up, layer.mixture[1].down)} == {1}
    off, on = run_engine(plain, requests(max_tokens=6)), run_engine(drafting, requests(max_tokens=6))
    assert on.texts == off.texts and on.verify_steps > 0


@pytest.mark.parametrize(("capability", "multiplied"), [((8, 9), False), ((9, 0), True)])
def test_before_hopper_weights_are_dequantised(
    capability: tuple[int, int], multiplied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of e4m3 are instructions of sm_90."""
    backend = CudaBackend(torch.device("cpu"))
    monkeypatch.setattr(backend, "capability", capability)
    weight = QuantisedWeight.rounded(torch.ones(64, 128, dtype=torch.bfloat16), torch.int8)
    assert isinstance(backend.pack_linear(weight), QuantisedWeight) is multiplied
