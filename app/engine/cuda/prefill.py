"""Attention of prompts without masks, by PyTorch's own kernel for sequences of any lengths (`varlen_attn`).

That is FlashAttention 2, which does not read pages, so K and V are gathered first. Not run on a GPU.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.device.base import AttentionMetadata, LayerKv


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows and tokens of S sequences behind one another. The rows of each are the last of its tokens.

    `cu_q` and `cu_k` [S + 1] int32 are where the sequences begin, and `slots` [L] those of the tokens that a row sees.
    """

    cu_q: Tensor
    cu_k: Tensor
    slots: Tensor
    max_q: int
    max_k: int
    window: int | None


def ragged(meta: AttentionMetadata, window: int | None) -> Ragged:
    """Return the plan of a causal step whose lengths on the host are exact. With a window it has what rows see."""
    device, lengths, host_lengths = meta.seq_lens.device, meta.seq_lens, meta.host_seq_lens
    if window is not None:
        lengths = torch.minimum(lengths, meta.query_start_loc.diff() + (window - 1))
        host_lengths = [min(kv, q + window - 1) for q, kv in zip(meta.query_lens, host_lengths, strict=True)]
    total, ends = sum(host_lengths), lengths.cumsum(0, dtype=torch.int32)
    numbers = torch.arange(len(ends), device=device)
    seq = torch.repeat_interleave(numbers, lengths, output_size=total)  # the size spares a wait
    token = torch.arange(total, device=device) + (meta.seq_lens - ends)[seq]
    slots = meta.page_table[seq, token // meta.page_size].long() * meta.page_size + token % meta.page_size
    longest = max(meta.query_lens), max(host_lengths)
    return Ragged(meta.query_start_loc, F.pad(ends, (1, 0)), slots, *longest, window)


def attention(q_thd: Tensor, kv: LayerKv, plan: Ragged) -> Tensor:
    """Return causal attention [T, heads, D] of the rows of `plan`. Raises if this torch or its device has no kernel."""
    k, v = (pool.flatten(0, 1).index_select(0, plan.slots) for pool in (kv.k, kv.v))
    window = (-1 if plan.window is None else plan.window - 1, 0)
    longest = plan.max_q, plan.max_k
    o: Tensor = _kernel()(q_thd.contiguous(), k, v, plan.cu_q, plan.cu_k, *longest, window_size=window)
    return o


@cache
def _kernel() -> Callable[..., Any]:
    """Return PyTorch's kernel. Before torch 2.12 it takes heads that share K and V without being told."""
    from torch.nn.attention.varlen import varlen_attn

    shared: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **shared)
