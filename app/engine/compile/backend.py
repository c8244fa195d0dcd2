"""The backend that torch.export traces. There plans are Padded, and KV has no pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.backend.base import AttentionMask, AttentionMetadata, Backend, LayerKv, Rotation
from app.engine.backend.torch import TorchBackend
from app.engine.cpu.backend import CpuBackend


@dataclass(frozen=True, slots=True)
class Padded:
    """One call in tensors alone.

    `pages` [S, P] int32 hold a sequence's tokens. `mask` [S, 1, G * Q, L] is 0 where a row may look and -inf elsewhere.
    `places` [T] are the rows' places among the S * Q padded ones, or None without padding.
    """

    pages: Tensor
    mask: Tensor
    places: Tensor | None


class TracedBackend(CpuBackend):
    """Plain operators, which inductor fuses by itself, over weights and KV that lie like those of the CPU's backend.

    Its weights are shapes: what is packed is not written.
    """

    rms_norm = TorchBackend.rms_norm
    qkv_into_kv = Backend.qkv_into_kv
    context_into_kv = Backend.context_into_kv
    positions_and_slots = Backend.positions_and_slots

    def fill(self, write: Callable[[Tensor, Tensor], None], parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        return

    def rope(self, x_thd: Tensor, rotation: Rotation) -> Tensor:
        """Turn pairs of numbers by `rotation` [T, 1, D / 2, 2], because inductor has no complex ones."""
        x, y = x_thd.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = rotation[0].unbind(-1)
        return torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1).flatten(-2)

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
        plan = meta.plans[mask]
        if not isinstance(plan, Padded):
            return super().attention(q_thd, kv, meta, mask, sinks)
        assert sinks is None, "targets with experts are not compiled, and no others have sinks"
        return _padded_attention(q_thd, kv, plan, meta.page_size)


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
