"""The npu operators on the null device against their definitions. Shapes, dtypes: torch_npu 2.13.0's own."""

import pytest
import torch
import torch_npu

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


def test_an_operator_without_a_reference_says_so() -> None:
    with pytest.raises(NotImplementedError, match="npu_gelu"):
        torch_npu.npu_gelu(normal(2, 4).to("npu:0"))
