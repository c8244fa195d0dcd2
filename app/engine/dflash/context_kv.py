"""Context KV: what the draft attends to, computed once per target row from the target's features."""

from typing import Any

import torch
from torch import Tensor

from app.engine.backend.base import Backend, Rotation
from app.engine.dflash.model import DFlashModel
from app.engine.models.kv_pool import KvPool


class ContextKv:
    """features -> fc -> hidden_norm -> K and V of all draft layers in one projection -> k_norm -> RoPE -> pool.

    Context rows never pass through a draft layer, so their K/V depend on the feature and the position alone.
    """

    def __init__(self, model: DFlashModel, pool: KvPool, backend: Backend) -> None:
        decoder = model.config.decoder
        self._fc = model.fc
        self._hidden_norm = model.hidden_norm
        self._eps = decoder.rms_norm_eps
        self._kv = backend.pack_weight(torch.cat([layer.attention.kv_weight for layer in model.layers]))
        self._k_norm = torch.stack([layer.attention.k_norm for layer in model.layers])
        self._ones = torch.ones_like(self._k_norm[0])
        self._shape = (decoder.num_layers, 2, decoder.num_kv_heads, decoder.head_dim)
        self.pool: Any = pool
        self._backend = backend

    def write(self, features: Tensor, rotation: Rotation, slot_mapping: Tensor) -> None:
        """Features [T, taps * H] of rows, with RoPE at their positions, into the same slots [T] as the target's KV.

        What is not finite in them becomes 0, and drafts that are no good; else it would stay on pages that others get.
        """
        backend = self._backend
        context = backend.rms_norm(backend.linear(features, self._fc), self._hidden_norm, self._eps)
        context = context.nan_to_num(0.0, 0.0, 0.0)
        kv_tl2hd = backend.linear(context, self._kv).view(-1, *self._shape)
        slot_mapping = self.pool.slots_in_all_layers(slot_mapping)
        backend.context_into_kv(
            kv_tl2hd, self._k_norm, self._ones, self._eps, rotation, self.pool.all_layers, slot_mapping
        )
