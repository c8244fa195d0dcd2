"""The backend that torch.export traces. There KV has no pages."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.engine.backend.base import Backend, LayerKv, Rotation
from app.engine.backend.torch import TorchBackend
from app.engine.cpu.backend import CpuBackend


class TracedBackend(CpuBackend):
    """Plain operators, which inductor fuses by itself, over weights and KV that lie like those of the CPU's backend.

    Its weights are shapes: what is packed is not written.
    """

    rms_norm = TorchBackend.rms_norm
    positions_and_slots = Backend.positions_and_slots

    def fill(self, write: Callable[[Tensor, Tensor], None], parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        return

    def _turns(self, rotation: Rotation) -> Tensor:
        return rotation[0]

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
