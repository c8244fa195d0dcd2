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
    sinks: Tensor | None = None,
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
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, last - first, 1)), 2)
        shares = scores.softmax(-1)[:, :, :kv_len]
        out[first:last] = torch.einsum("hqk,khd->qhd", shares, v).to(query.dtype)
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


def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    softmax_scale: float = 1.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The same by other names, and with a logit more for each head, whose share is dropped."""
    return fused_infer_attention_score(
        query,
        key,
        value,
        actual_seq_lengths=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen,
        sinks=learnable_sink,
        num_heads=num_query_heads,
        scale=softmax_scale,
        **others,
    )


def fused_infer_attention_score_v2_out(
    query: Tensor, key: Tensor, value: Tensor, *, workspace: Tensor | None = None, out: list[Tensor], **kwargs: Any
) -> tuple[Tensor, Tensor]:
    out[0].copy_(fused_infer_attention_score_v2(query, key, value, **kwargs)[0])
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


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half."""
    first, second = input.float().chunk(2, dim)
    return (F.silu(first) * second).to(input.dtype)


def clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """(second + bias) * first * sigmoid(alpha * first) of both halves, clipped, the first one from above only."""
    if group_index is not None or interleaved:
        raise NotImplementedError(f"no CPU reference for {group_index=}, {interleaved=}")
    first, second = x.float().chunk(2, dim)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return (first * torch.sigmoid(alpha * first) * (second + bias)).to(x.dtype)


def moe_gating_top_k_softmax_v2(
    x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int = 0, output_softmax: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights [T, k], experts [T, k] int32, nothing) of logits [T, E]. renorm 1 is a softmax over the k.

    The experts of a row with NaN are none that exist, because no page says what they are.
    """
    if finished is not None or output_softmax:
        raise NotImplementedError(f"no CPU reference for {finished=}, {output_softmax=}")
    values, experts = (x.float() if renorm else x.float().softmax(-1)).topk(k, -1)
    experts = experts.masked_fill(x.isnan().any(-1, keepdim=True), x.shape[-1])
    return (values.softmax(-1) if renorm else values).to(x.dtype), experts.int(), torch.empty(0, dtype=torch.float32)


def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (rows, places, counts, scales) of x [T, H] and experts [T, k]. With quant_mode 1 rows are dynamic_quant's,
    and scales are not defined otherwise.

    The rows [T * k, H] are sorted by expert, and places [T * k] int32 are where each pair is among them. Counts [E]
    int64 are the rows of each expert.
    """
    modes = (drop_pad_mode, expert_tokens_num_type, expert_tokens_num_flag, row_idx_type)
    given = [name for name, it in others.items() if it not in (None, -1)]
    if modes != (0, 1, True, 0) or quant_mode not in (-1, 1) or given or tuple(active_expert_range) != (0, expert_num):
        raise NotImplementedError(f"no CPU reference for {modes=}, {given=}, {active_expert_range=}")
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).index_put_((order,), torch.arange(len(order)))
    rows, scale = x[order // expert_idx.shape[1]], torch.full((len(order),), torch.nan)
    if quant_mode == 1:
        rows, scale = dynamic_quant(rows)
    return rows, places.int(), flat.bincount(minlength=expert_num), scale


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> list[Tensor]:
    """One x [R, in], whose next group_list[e] rows are multiplied by weight [E, in, out] of e: one [R, out].

    In int8 sums are exact, times scale [E, out] and per_token_scale [R], in bfloat16.
    """
    given = [name for name, it in others.items() if it is not None]
    modes = (split_item, group_type, group_list_type, act_type)
    if modes != (2, 0, 1, 0) or given or group_list is None or not len(x) == len(weight) == 1:
        raise NotImplementedError(f"no CPU reference for {modes=}, {given=}")
    if scale and per_token_scale and output_dtype == 15:
        rows = zip(x[0].double().split(group_list.tolist()), weight[0].double(), scale[0].double(), strict=True)
        whole = torch.cat([part @ of_expert * scales for part, of_expert, scales in rows])
        return [(whole * per_token_scale[0].double().unsqueeze(-1)).to(torch.bfloat16)]
    parts = x[0].float().split(group_list.tolist())
    out = torch.cat([part @ weight[0][e].float() + (bias[0][e] if bias else 0) for e, part in enumerate(parts)])
    return [out.to(x[0].dtype)]


def grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    dequant_dtype: int | None = None,
    group_list_type: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """dynamic_quant of the swiglu of one int8 x [R, in], whose next group_list[e] rows are multiplied by weight
    [E, in, out] of e, times weight_scale [E, out] and x_scale [R]. Nothing is rounded in between."""
    given = [name for name, it in others.items() if it is not None]
    if group_list_type != 1 or given or not len(weight) == len(weight_scale) == 1:
        raise NotImplementedError(f"no CPU reference for {group_list_type=}, {given=}")
    parts = zip(x.double().split(group_list.tolist()), weight[0].double(), weight_scale[0].double(), strict=True)
    whole = torch.cat([part @ of_expert * scales for part, of_expert, scales in parts])
    return dynamic_quant(swiglu((whole * x_scale.double().unsqueeze(-1)).float()))


def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """[T, H]: row t is the sum over j of probs[t, j] * permuted_tokens[sorted_indices[t * k + j]]."""
    if probs is None or padded_mode:
        raise NotImplementedError(f"no CPU reference for {probs=}, {padded_mode=}")
    pairs = permuted_tokens[sorted_indices.long()].float().unflatten(0, probs.shape)
    return (pairs * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


def dynamic_quant(input: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """(rows [T, in] in int8, scales [T] float32): the row's largest number is 127. A row of zeros, or of numbers that
    are not finite, is 0 in int8, and its scale keeps what it was."""
    if others:
        raise NotImplementedError(f"no CPU reference for {others}")
    x = input.float()
    scales = x.abs().amax(-1) / 127
    rows = (x / scales.unsqueeze(-1)).round()  # half to even
    return rows.nan_to_num(0.0).clamp(-127, 127).to(torch.int8), scales


def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, nothing, x1 + x2, scales, nothing): dynamic_quant of the norm of the rounded sum, which is not rounded in
    between."""
    if any(it is not None for it in others.values()) or list(output_mask or ()) != [True, False]:
        raise NotImplementedError(f"no CPU reference for {output_mask=}, {others}")
    total = x1 + x2
    rows, scales = dynamic_quant(rms_norm(total.float(), gamma, epsilon)[0])
    return rows, torch.empty((), dtype=torch.int8), total, scales, torch.empty(())


def format_cast(input: Tensor, acl_format: int, **others: Any) -> Tensor:
    """The same numbers. What order of bytes a format has is not modelled, but a tensor keeps its format."""
    return input.clone()


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> Tensor:
    """x1 [T, in] @ x2 [in, out] in int32, times scale [out], times pertoken_scale [T], plus bias [out], in bfloat16."""
    if others or pertoken_scale is None or (bias is not None and not bias.is_floating_point()) or output_dtype != 15:
        raise NotImplementedError(f"no CPU reference for {output_dtype=}, {pertoken_scale=}, {bias=}, {others}")
    out = (x1.int() @ x2.int()).float() * scale * pertoken_scale.unsqueeze(-1)
    return (out if bias is None else out + bias).to(torch.bfloat16)


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """Outputs [T, Nv, Dv] of query and key [T, Nk, Dk] and value [T, Nv, Dv], of sequences whose lengths sum to T.

    Each begins with state [blocks, Nv, Dv, Dk] at the index of its first row. The state after row t is kept in float32
    for the next row, and written to index t.
    """
    if num_accepted_tokens is not None or gk is not None:
        raise NotImplementedError("no CPU reference")
    assert beta is not None and actual_seq_lengths is not None and ssm_state_indices is not None and g is not None
    group = value.shape[1] // query.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (query, key))
    out, first = torch.empty_like(value), 0
    for length in actual_seq_lengths.tolist():
        for t in range(first, first + length):
            if t == first:
                own = state[ssm_state_indices[t]].float()
            own = own * g[t].exp()[:, None, None]
            d = (value[t].float() - torch.einsum("hvk,hk->hv", own, k[t])) * beta[t].float()[:, None]
            own = own + d[:, :, None] * k[t][:, None]
            out[t] = torch.einsum("hvk,hk->hv", own, q[t] * scale).to(out.dtype)
            state[ssm_state_indices[t]] = own.to(state.dtype)
        first += length
    return out


KERNELS = {
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_fused_infer_attention_score.out": fused_infer_attention_score_out,
    "_npu_fused_infer_attention_score_get_max_workspace": get_max_workspace,
    "npu_fused_infer_attention_score_v2": fused_infer_attention_score_v2,
    "npu_fused_infer_attention_score_v2.out": fused_infer_attention_score_v2_out,
    "_npu_fused_infer_attention_score_v2_get_max_workspace": get_max_workspace,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_scatter_nd_update_": scatter_nd_update_,
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_apply_rotary_pos_emb": apply_rotary_pos_emb,
    "npu_swiglu": swiglu,
    "npu_clipped_swiglu": clipped_swiglu,
    "npu_moe_gating_top_k_softmax_v2": moe_gating_top_k_softmax_v2,
    "npu_moe_init_routing_v2": moe_init_routing_v2,
    "npu_grouped_matmul": grouped_matmul,
    "npu_grouped_matmul_swiglu_quant_v2": grouped_matmul_swiglu_quant_v2,
    "npu_moe_token_unpermute": moe_token_unpermute,
    "npu_dynamic_quant": dynamic_quant,
    "npu_add_rms_norm_dynamic_quant": add_rms_norm_dynamic_quant,
    "npu_format_cast": format_cast,
    "npu_quant_matmul": quant_matmul,
    "npu_recurrent_gated_delta_rule": recurrent_gated_delta_rule,
}
