"""CPU kernels of the `npu::` operators in plain PyTorch, for the schemas that torch_npu registered.

They follow docs/npu-contract.md, and the wheel's shapes and dtypes at every call. Sums are in float32 and results are
rounded once, at the end. A card that rounds in between has slightly other results.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_library: torch.library.Library | None = None


def register() -> None:
    """Once a process, after torch_npu is imported."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("npu", "IMPL", "CPU")
    for name, kernel in KERNELS.items():
        _library.impl(name, kernel)


def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """TND, paged: query [T, heads, D], key and value [blocks, block_size, kv_heads * D] or, in 4-D, [blocks, kv_heads,
    block_size, D], block_table [S, P].

    actual_seq_lengths [S] are the cumulative ends of the query rows, actual_seq_lengths_kv [S] each sequence's tokens.
    sparse_mode 0 without a mask lets every row see all of them; sparse_mode 3 (right-down causal) lets row i of q see
    the first kv - q + i + 1; sparse_mode 4 (right-down band) lets it see its own token, `pre_tokens` before it and
    `next_tokens` behind. Returns (o [T, heads, D], an empty log-sum-exp). Anything else is NotImplementedError.
    """
    given = [name for name, it in others.items() if isinstance(it, Tensor)]
    if input_layout != "TND" or block_table is None or softmax_lse_flag or given or sparse_mode not in (0, 3, 4):
        raise NotImplementedError(f"no CPU reference: {input_layout=} {sparse_mode=} {softmax_lse_flag=} {given=}")
    if actual_seq_lengths is None or actual_seq_lengths_kv is None or (sparse_mode == 0) != (atten_mask is None):
        raise NotImplementedError(
            "no CPU reference without lengths, with a mask in mode 0 or without one in modes 3 and 4"
        )
    out = torch.zeros_like(query)
    if key.dim() == 4:
        key, value = (pool.transpose(1, 2).flatten(2) for pool in (key, value))
    kv_heads = num_key_value_heads or num_heads
    group = num_heads // kv_heads
    ends = [0, *actual_seq_lengths]
    for (first, last), kv_len, pages in zip(pairwise(ends), actual_seq_lengths_kv, block_table, strict=True):
        used = pages[: -(-kv_len // block_size)].long()
        k, v = (_tokens(pool, used, kv_len, kv_heads).repeat_interleave(group, 1) for pool in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * scale
        if sparse_mode == 3:
            q_len = last - first
            scores.masked_fill_(torch.ones(q_len, kv_len, dtype=torch.bool).triu_(kv_len - q_len + 1), -torch.inf)
        if sparse_mode == 4:
            own = torch.arange(kv_len - (last - first), kv_len)[:, None]
            token = torch.arange(kv_len)
            scores.masked_fill_((token < own - pre_tokens) | (token > own + next_tokens), -torch.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)
    return out, torch.empty(0, dtype=torch.float32)


def _tokens(pool: Tensor, pages: Tensor, kv_len: int, kv_heads: int) -> Tensor:
    """[kv_len, kv_heads, D] float32 out of [blocks, block_size, kv_heads * D]."""
    return pool[pages].reshape(-1, kv_heads, pool.shape[-1] // kv_heads)[:kv_len].float()


def fused_infer_attention_score_out(
    query: Tensor, key: Tensor, value: Tensor, *, workspace: Tensor | None = None, out: list[Tensor], **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The same into out[0]; out[1] is a placeholder and stays as it is."""
    out[0].copy_(fused_infer_attention_score(query, key, value, **kwargs)[0])
    return out[0], out[1]


def get_max_workspace(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    return query.new_empty(0)


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """key, value [T, kv_heads, D] -> caches [blocks, block_size, kv_heads, D] at slot_mapping [T]."""
    if cache_mode != "Norm":
        raise NotImplementedError(f"no CPU reference for {cache_mode=}")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping.long()] = rows


def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """input[indices[i]] = updates[i]; the last axis of indices addresses the first axes of input."""
    return input.index_put_(tuple(indices.long().unbind(-1)), updates)


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, rstd): y of input's dtype, rstd [..., 1] float32."""
    x = input.float()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """(y, rstd, x1 + x2), y from the rounded sum."""
    total = x1 + x2
    return *rms_norm(total, gamma, epsilon), total


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """input * r1 + (-second half, first half) * r2, with r1, r2 [T, 1, D] for input [T, heads, D]."""
    if rotary_mode != "half" or rotate is not None:
        raise NotImplementedError(f"no CPU reference for {rotary_mode=}, {rotate=}")
    x = input.float()
    first, second = x.chunk(2, -1)
    return (x * r1.float() + torch.cat((-second, first), -1) * r2.float()).to(input.dtype)


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """rotary_mul of query [T, heads, D] and of key [T, kv_heads, D]; on a card it may work in place."""
    return rotary_mul(query, cos, sin, rotary_mode), rotary_mul(key, cos, sin, rotary_mode)


def format_cast(input: Tensor, acl_format: int, **dtypes: Any) -> Tensor:
    """Another order in memory, the same numbers. On the null device memory keeps its order too."""
    return input.clone()


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half."""
    first, second = input.float().chunk(2, dim)
    return (F.silu(first) * second).to(input.dtype)


KERNELS = {
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fused_infer_attention_score.out": fused_infer_attention_score_out,
    "_npu_fused_infer_attention_score_get_max_workspace": get_max_workspace,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_scatter_nd_update_": scatter_nd_update_,
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_apply_rotary_pos_emb": apply_rotary_pos_emb,
    "npu_swiglu": swiglu,
    "npu_format_cast": format_cast,
}
