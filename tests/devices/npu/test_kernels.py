"""The npu operators on the null device against their definitions. Shapes, dtypes: torch_npu 2.13.0's own."""

import math

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.devices.npu.calls import BLOCK, Sequences, normal

pytestmark = pytest.mark.usefixtures("numerics")

RAGGED = {
    "one token": ([1], [1]),
    "last block partly filled": ([3], [130]),
    "last block full": ([2], [2 * BLOCK]),
    "mixed": ([1, 16, 5], [129, 300, 5]),
}


@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, None), (True, 7), (False, 7), (True, 130), (False, 130)],
    ids=["sparse_mode 3", "sparse_mode 0", *["sparse_mode 4"] * 4],
)
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 128), (4, 4, 64), (8, 1, 128)])
def test_attention_is_the_dense_one(lengths, heads, kv_heads, dim, causal, window):
    sequences = Sequences(*lengths, heads=heads, kv_heads=kv_heads, dim=dim)
    found = sequences.attend(causal=causal, window=window)
    assert found.dtype == torch.bfloat16
    # Two roundings to bfloat16 (the result's, and none of the sums') are far below 1/128.
    torch.testing.assert_close(
        found.cpu().double(), sequences.dense(causal=causal, window=window), rtol=2**-7, atol=2**-9
    )


def test_attention_in_float32_is_the_dense_one_to_rounding(numerics: object) -> None:
    numerics.lift = frozenset({"N7"})  # type: ignore
    sequences = Sequences([4, 2], [140, 7], dtype=torch.float32)
    wanted = sequences.dense(causal=True)
    torch.testing.assert_close(sequences.attend(causal=True).cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_attention_into_given_memory_is_the_same() -> None:
    sequences = Sequences([4, 2], [140, 7])
    call = sequences.arguments(causal=True)
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(**call)
    out = [torch.empty_like(call["query"]), torch.empty(1, device="npu:0")]
    found, _ = torch_npu.npu_fused_infer_attention_score.out(**call, workspace=workspace, out=out)
    assert found.data_ptr() == out[0].data_ptr()
    assert torch.equal(out[0].cpu(), sequences.attend(causal=True).cpu())


def test_kv_rows_go_to_their_slots_and_nowhere_else() -> None:
    k, v = normal(3, 2, 128, seed=1), normal(3, 2, 128, seed=2)
    slot_mapping = torch.tensor([130, 5, 383], dtype=torch.int32)
    caches = [torch.zeros(3, BLOCK, 2, 128, dtype=torch.bfloat16, device="npu:0") for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(
        k.to("npu:0"), v.to("npu:0"), *caches, slot_mapping.to("npu:0"), cache_mode="Norm"
    )
    for rows, cache in zip((k, v), caches, strict=True):
        wanted = torch.zeros(3 * BLOCK, 2, 128, dtype=torch.bfloat16)
        wanted[slot_mapping.long()] = rows
        assert torch.equal(cache.cpu().flatten(0, 1), wanted)


def test_the_portable_scatter_writes_the_same() -> None:
    rows, places = normal(3, 2, 128), torch.tensor([[130], [5], [383]], dtype=torch.int32)
    cache = torch.zeros(3 * BLOCK, 2, 128, dtype=torch.bfloat16, device="npu:0")
    assert torch_npu.npu_scatter_nd_update_(cache, places.to("npu:0"), rows.to("npu:0")).data_ptr() == cache.data_ptr()
    wanted = torch.zeros(3 * BLOCK, 2, 128, dtype=torch.bfloat16)
    wanted[places.flatten().long()] = rows
    assert torch.equal(cache.cpu(), wanted)


def rms(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma.double()


@pytest.mark.parametrize("shape", [(5, 64), (5, 4, 128)], ids=["hidden", "per head"])
@pytest.mark.parametrize("gamma_dtype", [torch.bfloat16, torch.float32])
def test_rms_norm(shape: tuple[int, ...], gamma_dtype: torch.dtype) -> None:
    x, gamma = normal(*shape), normal(shape[-1], seed=1, dtype=gamma_dtype)
    y, rstd = torch_npu.npu_rms_norm(x.to("npu:0"), gamma.to("npu:0"), 1e-6)
    torch.testing.assert_close(y.cpu().double(), rms(x, gamma, 1e-6), rtol=2**-8, atol=1e-6)
    assert rstd.dtype == torch.float32 and rstd.shape == (*shape[:-1], 1)


def test_add_rms_norm_also_gives_the_sum() -> None:
    x, residual, gamma = normal(5, 64), normal(5, 64, seed=1), normal(64, seed=2)
    y, _, total = torch_npu.npu_add_rms_norm(*(t.to("npu:0") for t in (x, residual, gamma)), 1e-6)
    assert torch.equal(total.cpu(), x + residual)
    torch.testing.assert_close(y.cpu().double(), rms(x + residual, gamma, 1e-6), rtol=2**-8, atol=1e-6)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (x[i], x[i + D/2]) turned by angles [T, D/2], as complex numbers."""
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D], both halves alike."""
    both = torch.cat((angles, angles), -1)[:, None]
    return both.cos().float().to("npu:0"), both.sin().float().to("npu:0")


def test_rotary_mul_turns_pairs() -> None:
    x, angles = normal(5, 4, 128, dtype=torch.float32), torch.rand(5, 64, dtype=torch.float64) * 2 * math.pi
    y = torch_npu.npu_rotary_mul(x.to("npu:0"), *tables(angles))
    torch.testing.assert_close(y.cpu().double(), rotated(x, angles), rtol=1e-5, atol=1e-5)


def test_apply_rotary_pos_emb_turns_both_in_place() -> None:
    """The operator returns the query and key themselves, which the schema does not show (N21)."""
    q, k = normal(5, 4, 128, dtype=torch.float32), normal(5, 2, 128, seed=1, dtype=torch.float32)
    angles = torch.rand(5, 64, dtype=torch.float64) * 2 * math.pi
    given = q.to("npu:0"), k.to("npu:0")
    turned = torch_npu.npu_apply_rotary_pos_emb(*given, *tables(angles), layout="TND")
    for x, before, after in zip((q, k), given, turned, strict=True):
        assert after.data_ptr() == before.data_ptr()
        torch.testing.assert_close(before.cpu().double(), rotated(x, angles), rtol=1e-5, atol=1e-5)


def test_swiglu_gates_by_the_first_half() -> None:
    x = normal(5, 64)
    gate, up = x.double().chunk(2, -1)
    y = torch_npu.npu_swiglu(x.to("npu:0"))
    torch.testing.assert_close(y.cpu().double(), gate * gate.sigmoid() * up, rtol=2**-8, atol=1e-6)


def test_a_weight_in_another_format_is_the_same_weight() -> None:
    """29 is FRACTAL_NZ."""
    x, weight = normal(3, 32), normal(64, 32, seed=1)
    cast = torch_npu.npu_format_cast(weight.to("npu:0"), 29)
    wanted = torch.nn.functional.linear(x, weight)
    assert torch.equal(torch.nn.functional.linear(x.to("npu:0"), cast).cpu(), wanted)


def test_an_operator_without_a_reference_says_so() -> None:
    with pytest.raises(NotImplementedError, match="npu_gelu"):
        torch_npu.npu_gelu(normal(2, 4).to("npu:0"))
