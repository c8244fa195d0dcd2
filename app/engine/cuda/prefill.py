"""Attention of prompts without masks, by PyTorch's own kernel for sequences of any lengths (`varlen_attn`).

That is FlashAttention 2, which does not read pages, so K and V are gathered first.
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

TOLERANCE = 0.02
"""Largest error as a share of the largest value: 16-bit rounding is far below it, a wrong index far above."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows and tokens of S sequences, one after another. The rows of each are the last of its tokens.

    `cu_q` and `cu_k` [S + 1] int32 are where the sequences begin, and `slots` [L] those of the tokens that a row sees.
    """

    cu_q: Tensor
    cu_k: Tensor
    slots: Tensor
    max_q: int
    max_k: int
    window: int | None


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return why prompts are not read by `varlen_attn`, or "". It is tried on two chunks, with a window and without."""
    if dtype.itemsize != 2:
        return "it takes 16 bits"
    noise = torch.Generator(device).manual_seed(0)
    query_lens, lens = [40, 20], [40, 50]
    cu_q, cu_k = (torch.tensor([0, n[0], sum(n)], dtype=torch.int32, device=device) for n in (query_lens, lens))
    q, k, v = (
        torch.empty(rows, heads, head_dim, dtype=dtype, device=device).normal_(generator=noise)
        for rows, heads in ((sum(query_lens), 4), (sum(lens), 2), (sum(lens), 2))
    )
    for window in (None, 16):
        try:
            found = _attend(q, k, v, Packed(cu_q, cu_k, cu_k, max(query_lens), max(lens), window))
        except Exception as error:  # an import, an argument, a device: each of another type
            return repr(error)
        parts = zip(q.float().split(query_lens), k.float().split(lens), v.float().split(lens), strict=True)
        expected = torch.cat([_dense(q, k, v, window) for q, k, v in parts])
        if not float((found.float() - expected).abs().max() / expected.abs().max()) < TOLERANCE:
            return f"its result is wrong on this device, window {window}"
    return ""


def pack(meta: AttentionMetadata, window: int | None) -> Packed:
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
    return Packed(meta.query_start_loc, F.pad(ends, (1, 0)), slots, *longest, window)


def attention(q_thd: Tensor, kv: LayerKv, plan: Packed) -> Tensor:
    """Return causal attention [T, heads, D] of the rows of `plan`."""
    k, v = (pool.flatten(0, 1).index_select(0, plan.slots) for pool in (kv.k, kv.v))
    return _attend(q_thd.contiguous(), k, v, plan)


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: Packed) -> Tensor:
    window = (-1 if plan.window is None else plan.window - 1, 0)
    o: Tensor = _kernel()(q, k, v, plan.cu_q, plan.cu_k, plan.max_q, plan.max_k, window_size=window)
    return o


@cache
def _kernel() -> Callable[..., Any]:
    """Return PyTorch's kernel. Before torch 2.12 it takes heads that share K and V without a flag."""
    from torch.nn.attention.varlen import varlen_attn

    shared: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **shared)


def _dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Return causal attention of one sequence, whose rows are the last of its tokens."""
    tokens = torch.arange(len(k), device=q.device)
    rows = tokens[len(k) - len(q) :, None]
    sees = (tokens <= rows) & (tokens > rows - (window or len(k)))
    q, k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(0, 1)
