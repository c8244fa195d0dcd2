"""Attention over paged K and V by this package's operators: rotate.cpp writes pages, attention.cpp reads them."""

import torch
from torch import Tensor

from app.engine.cpu import linear
from app.engine.cpu.library import operators
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv, ProjectedRows


def supports(dtype: torch.dtype) -> bool:
    """Return True if the operators are compiled, and compute in `dtype`."""
    return linear.operator_for(dtype) is not None


def attention(q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None) -> Tensor:
    """Return `Backend.attention`. It reads lengths from the tensors of `meta` only, and needs no plan.

    K and V may also be slots [slots, kv_heads, D].
    """
    lengths = meta.query_start_loc, meta.seq_lens, meta.page_table
    o: Tensor = operators(q_thd.dtype).attention(q_thd, kv.k, kv.v, *lengths, meta.page_size, *mask, sinks)
    return o


def rotate_into(rows: ProjectedRows) -> Tensor:
    """Write K and V, and return q [T, heads, D], as `Backend.qkv_into_kv` does, for a rotation of complex64
    [T, .., D / 2]. Slots are unique. Raises RuntimeError for tensors that do not fit.

    For `k_norm` [L, D] the rows are L layers of each of the T / L rows of the rotation, one after the other.
    """
    qkv, q_norm, k_norm, eps, (turns,), kv, slots = rows
    pairs = torch.view_as_real(turns)
    q: Tensor = operators(qkv.dtype).rotate_into(qkv, q_norm, k_norm, eps, pairs, kv.k, kv.v, slots)
    return q
