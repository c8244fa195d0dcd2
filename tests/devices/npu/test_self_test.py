"""The test of attention at startup, and `check`, reach the kernel that a single long request has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from app.check import operators
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv
from app.engine.device.comparison import check_attention
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend

pytestmark = pytest.mark.usefixtures("numerics")

DECODER = DecoderConfig(64, 64, 2, 4, 2, 64, 10, 1e-6, 1e4, 4096, False, "bfloat16", ())


class Wrong(NpuBackend):
    """A kernel for few rows of a single long request whose result is wrong."""

    wrong_mask: AttentionMask

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        o = super().attention(q_thd, kv, meta, mask, sinks)
        is_split = len(meta.query_lens) == 1 and len(q_thd) <= 16 and meta.host_seq_lens[0] >= 1024
        return o * 1.1 if is_split and mask == self.wrong_mask else o


@pytest.mark.parametrize("causal", [True, False])
def test_a_wrong_kernel_for_a_single_long_request_is_refused_before_weights_are_loaded(causal: bool) -> None:
    backend: Any = Wrong(torch.device("npu:0"))
    backend.wrong_mask = AttentionMask(causal)
    with pytest.raises(UnsupportedError, match=f"{backend.wrong_mask} attention over 16 rows of 1500 tokens"):
        check_attention(backend, DECODER, 128, 16, torch.bfloat16)
    name = "causal_attention" if causal else "bidirectional_attention"
    assert operators.find(backend, name).status == "failed"


def test_the_self_test_passes_on_kernels_that_are_right() -> None:
    check_attention(NpuBackend(torch.device("npu:0")), DECODER, 128, 16, torch.bfloat16)
