"""Attention over paged K and V by an operator of our own, which reads them where they lie (attention.cpp)."""

from functools import cache

import torch
from torch import Tensor

from app.engine.backend.base import AttentionMask, AttentionMetadata, LayerKv
from app.engine.cpu import linear


def is_own(dtype: torch.dtype) -> bool:
    """Return True if the operator is here, and computes such numbers."""
    return linear.own(dtype) is not None and _has_fake()


def attention(q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None) -> Tensor:
    """Return `Backend.attention`. It reads lengths from the tensors of `meta` alone, and needs no plan.

    K and V may also be slots [slots, kv_heads, D].
    """
    lengths = meta.query_start_loc, meta.seq_lens, meta.page_table
    o: Tensor = torch.ops.dflash_server.attention(q_thd, kv.k, kv.v, *lengths, meta.page_size, *mask, sinks)
    return o


@cache
def _has_fake() -> bool:
    torch.library.register_fake("dflash_server::attention", lambda q_thd, *_: q_thd.new_empty(q_thd.shape))
    return True
