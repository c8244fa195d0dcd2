"""The KV memory of one model: the tensors that page ids index."""

from typing import Any

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import Backend, LayerKv
from app.engine.models.state_pool import StatePool


class KvPool:
    """K and V of all layers with attention, each [layers, pages, page_size, kv_heads, head_dim], zeroed once.

    `layers[i]` is the memory of layer i: its KV, or its state in `states`. `all_layers` is all KV seen as one pool of
    layers * pages pages, for a write to every layer at once.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        backend: Backend,
        states: StatePool | None = None,
    ) -> None:
        self.states, num_layers = states, config.num_kv_layers
        recurrent = states.layers if states else {}
        shape = (num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        k, v = (backend.zeros(shape, dtype) for _ in range(2))
        kv = map(LayerKv, k, v)
        self.layers: list[Any] = [recurrent.get(i) or next(kv) for i in range(config.num_layers)]
        self.all_layers = LayerKv(k.flatten(0, 1), v.flatten(0, 1))
        first_slots = torch.arange(num_layers, dtype=torch.int32) * (num_pages * page_size)
        self._first_slots = first_slots.to(backend.device)

    def slots_in_all_layers(self, slot_mapping: Tensor) -> Tensor:
        """Return slots [T] of one layer as slots [T * layers] of `all_layers`, all layers of a row together."""
        return (slot_mapping[:, None] + self._first_slots).flatten()

    def clear(self, slot_mapping: Tensor) -> None:
        """Zero the slots [T] int32 of every layer."""
        slots = self.slots_in_all_layers(slot_mapping).long()
        for kv in (self.all_layers.k, self.all_layers.v):
            kv.flatten(0, 1).index_fill_(0, slots, 0)


def bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of one token in all layers with attention."""
    return 2 * config.num_kv_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
