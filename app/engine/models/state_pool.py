"""The memory of recurrent layers: a slot for each sequence."""

from collections.abc import Callable

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.recurrent import LayerState

Zeros = Callable[..., Tensor]
"""`Backend.zeros`."""


class StatePool:
    """Slots of all recurrent layers, zeroed once. Slot 0 is scratch, for padding, and `num_slots` follow it.

    They include `num_checkpoints` of the prefix cache. `block_size` is the most rows that a step verifies. States in
    bfloat16 are [Nv, Dv, Dk], which is what an NPU's operator reads (N46).
    """

    def __init__(
        self,
        config: GatedDeltaConfig,
        num_slots: int,
        block_size: int,
        dtype: torch.dtype,
        zeros: Zeros,
        num_checkpoints: int = 0,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        slots = (len(config.layers), num_slots + 1)
        dims = config.k_head_dim, config.v_head_dim
        dims = dims if state_dtype == torch.float32 else dims[::-1]
        matrix = zeros((*slots, config.num_v_heads, *dims), dtype=state_dtype)
        conv = zeros((*slots, config.conv_kernel - 1, config.channels), dtype=dtype)
        pending = zeros((*slots, block_size, config.input_width), dtype=dtype)
        num_tokens = zeros(slots, dtype=torch.int32)
        layers = enumerate(zip(matrix, conv, pending, num_tokens, strict=True))
        states = (LayerState(*tensors, num_tokens, index) for index, tensors in layers)
        self.layers = dict(zip(config.layers, states, strict=True))
        self.num_slots = num_slots
        self.num_checkpoints = num_checkpoints
        # Bytes of a sequence in all layers: its state, and its pending rows.
        self.slot_bytes = sum(x[:, 0].nbytes for x in (matrix, conv, num_tokens))
        self.pending_bytes = pending[:, 0].nbytes

    @property
    def checkpoint_bytes(self) -> int:
        return self.num_checkpoints * (self.slot_bytes + self.pending_bytes)

    @property
    def nbytes(self) -> int:
        return (self.num_slots + 1) * (self.slot_bytes + self.pending_bytes)
