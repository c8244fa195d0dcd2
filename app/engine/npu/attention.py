"""Calls of the attention operator, whose lengths are the host's. docs/npu-contract.md has the rules."""

from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch import Tensor

from app.engine.device.base import AttentionMetadata, LayerKv
from app.engine.npu.rules import EVERY_TOKEN

Lengths = dict[str, Any]
"""Lengths of one call by the operator's argument names."""
MAX_CORES = 25
"""AI cores that the operator's tiling has room for. A device has 20 or 24."""
LONG_LIST = 8
"""Requests from which a ScriptList saves more than it costs, on the null device."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Arguments of the attention operator for an AttentionMetadata and a mask.

    Query lengths are cumulative, and KV lengths are of each sequence, both on the host (N1 to N3). Causal rows have the
    mask and sparse_mode 3. Bidirectional rows have no mask and sparse_mode 0. Rows with a window have the mask and
    sparse_mode 4, and see `pre_tokens` tokens before themselves and `next_tokens` after (N10).

    Nothing else knows the operator. One that reads lengths on the device is another plan of
    `NpuBackend.plan_attention`, with its own `attend`, whose calls a graph does not update.
    """

    q_ends: list[int]
    host_seq_lens: list[int]
    mask: Tensor | None
    sparse_mode: int
    pre_tokens: int = EVERY_TOKEN
    next_tokens: int = EVERY_TOKEN

    def attend(self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, sinks: Tensor | None) -> Tensor:
        """Return `Backend.attention`. Sinks are taken by the operator's second version, by other names (N38).

        Pages go in as `[pages, page_size, kv_heads * D]`, because the operator would read a 4-D tensor as
        `[pages, kv_heads, page_size, D]` (N6).
        """
        heads, scale = q_thd.shape[1], q_thd.shape[2] ** -0.5
        tensors = q_thd.contiguous(), kv.k.flatten(2), kv.v.flatten(2)
        common: dict[str, Any] = {
            "atten_mask": self.mask,
            "block_table": meta.page_table,
            "num_key_value_heads": kv.k.shape[2],
            "pre_tokens": self.pre_tokens,
            "next_tokens": self.next_tokens,
            "input_layout": "TND",
            "sparse_mode": self.sparse_mode,
            "block_size": meta.page_size,
        }
        if sinks is None:
            o, _ = torch_npu.npu_fused_infer_attention_score(
                *tensors,
                actual_seq_lengths=self.q_ends,
                actual_seq_lengths_kv=self.host_seq_lens,
                num_heads=heads,
                scale=scale,
                **common,
            )
        else:
            o, _ = torch_npu.npu_fused_infer_attention_score_v2(
                *tensors,
                actual_seq_qlen=self.q_ends,
                actual_seq_kvlen=self.host_seq_lens,
                learnable_sink=sinks,
                num_query_heads=heads,
                softmax_scale=scale,
                **common,
            )
        return o

    def lengths(self, *, sinks: bool) -> Lengths:
        """Return both lengths as an update of a graph takes them.

        The dispatcher reads a Python list number by number at each call, and a ScriptList, which the calls of all
        layers share, not at all. Short lists are quicker as they are.
        """
        names = ("actual_seq_qlen", "actual_seq_kvlen") if sinks else ("actual_seq_lengths", "actual_seq_lengths_kv")
        kind = list if len(self.q_ends) < LONG_LIST else torch._C.ScriptList
        return {name: kind(lengths) for name, lengths in zip(names, (self.q_ends, self.host_seq_lens), strict=True)}


def graph_workspace(heads: int, head_dim: int) -> int:
    """Return the bytes that a call's workspace takes in a graph, whatever its lengths.

    From the operator's published tiling without lengths (`flash_attention_infer_tiling.h` of CANN's ops-transformer):
    each core has 12 tiles of 128 x 512 numbers, and of each head two partial results of 128 rows, with their
    log-sum-exp, all in float32. op-plugin takes an element of the query's dtype, two bytes, for each byte of these.
    """
    tiles, partial_results = 12 * 128 * 512, 2 * heads * 128 * (head_dim + 1)
    return 2 * ((16 << 20) + MAX_CORES * 4 * (tiles + partial_results))
