"""The backend of `--compile`. While torch.export traces it, plans are Padded and KV has no pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.backend.base import AttentionMask, AttentionMetadata, LayerKv
from app.engine.backend.torch import Call, TorchBackend, fits_one_call
from app.engine.cpu.backend import CpuBackend


@dataclass(frozen=True, slots=True)
class OneCall:
    """A step's whole attention as one padded call: no sequence has more rows, or tokens, than these."""

    max_q: int
    max_kv: int


@dataclass(frozen=True, slots=True)
class Padded:
    """One call in tensors alone.

    `pages` [S, P] int32 hold a sequence's tokens. `mask` [S, 1, G * Q, L] is 0 where a row may look and -inf elsewhere.
    `places` [T] are the rows' places among the S * Q padded ones, or None without padding.
    """

    pages: Tensor
    mask: Tensor
    places: Tensor | None


class CompiledBackend(TorchBackend):
    """Plain operators, which inductor fuses by itself, over weights laid out as a CPU's."""

    separate_prefill = False
    max_gathered_tokens = CpuBackend.max_gathered_tokens
    pack_weight = CpuBackend.pack_columns
    retain_allocator_memory = CpuBackend.retain_allocator_memory
    positions_and_slots = CpuBackend.positions_and_slots
    verify = CpuBackend.verify

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> OneCall | list[Call]:
        """Return a plan for operators if one call is not enough."""
        if fits_one_call(meta.query_lens, meta.host_seq_lens, group, self.max_gathered_tokens):
            return OneCall(max(meta.query_lens), max(meta.host_seq_lens))
        return super().plan_attention(meta, mask, group)

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
        """Write pages, or slots [slots, kv_heads, D] of a traced step."""
        if kv.k.dim() == 3:
            kv.k.index_put_((slot_mapping,), k_thd)
            kv.v.index_put_((slot_mapping,), v_thd)
        else:
            super().write_kv(k_thd, v_thd, kv, slot_mapping)

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "--compile refuses targets with experts, and no others have sinks"
        plan = meta.plans[mask]
        if isinstance(plan, Padded):
            return _padded_attention(q_thd, kv, plan, meta.page_size)
        if isinstance(plan, OneCall):  # and yet by operators; all layers of a mask have the same plan
            plan = meta.plans[mask] = super().plan_attention(meta, mask, q_thd.shape[1] // kv.k.shape[2])
        return self.attend(q_thd, kv, plan)


def _padded_attention(q_thd: Tensor, kv: LayerKv, plan: Padded, page_size: int) -> Tensor:
    heads, dim = q_thd.shape[1:]
    kv_heads, num_seqs = kv.k.shape[-2], plan.pages.shape[0]
    group = heads // kv_heads
    max_q = plan.mask.shape[2] // group
    q = q_thd
    if plan.places is not None:
        q = q_thd.new_zeros(num_seqs * max_q, heads, dim).index_put((plan.places,), q_thd)
    q = q.view(num_seqs, max_q, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(num_seqs, kv_heads, -1, dim)
    slot_mapping = plan.pages.unsqueeze(2) * page_size + torch.arange(page_size, dtype=torch.int32)
    slot_mapping = slot_mapping.flatten(1)[:, : plan.mask.shape[3]]
    k, v = (pool[slot_mapping].transpose(1, 2) for pool in (kv.k, kv.v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask)
    o = o.view(num_seqs, kv_heads, group, max_q, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
    return o if plan.places is None else o[plan.places]
