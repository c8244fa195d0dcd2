"""The memory of recurrent layers: a slot for each sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig

Zeros = Callable[..., Tensor]
"""`Backend.zeros`."""


class State(NamedTuple):
    """State of S sequences in one layer: `matrix` [S, Nv, Dk, Dv] fp32, and the last inputs of `conv` [S, K - 1, C]."""

    matrix: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """Slots of one recurrent layer: the state after a sequence's first `num_tokens` tokens, and the pending rows.

    The next step commits as many pending rows as its position exceeds `num_tokens`, so none twice.
    """

    matrix: Tensor  # [slots, Nv, Dk, Dv] fp32
    conv: Tensor  # [slots, K - 1, C]
    pending: Tensor  # [slots, b, C + 2 Nv]: the layer's inputs at the rows that the last step has verified
    num_tokens: Tensor  # [slots] int32

    def at(self, slots: Tensor, starts: Tensor) -> tuple[State, Tensor, Tensor]:
        """Return (state, pending rows [S, b, C + 2 Nv], how many of them [S] count) of sequences about to run from
        positions `starts` [S] on. Position 0 begins with zeros, not with the state of the slot's previous owner."""
        is_new = starts == 0
        matrix = self.matrix[slots].masked_fill(is_new[:, None, None, None], 0.0)
        conv = self.conv[slots].masked_fill(is_new[:, None, None], 0.0)
        counts = (starts - self.num_tokens[slots]).clamp(0, self.pending.shape[1]).masked_fill(is_new, 0)
        return State(matrix, conv), self.pending[slots], counts

    def write(self, slots: Tensor, state: State, num_tokens: Tensor) -> None:
        """Write the state after `num_tokens` [S] tokens to slots [S]. Nothing fails once the first write begins."""
        num_tokens = num_tokens.to(torch.int32)  # allocated before anything is written
        self.matrix.index_copy_(0, slots, state.matrix)
        self.conv.index_copy_(0, slots, state.conv)
        self.num_tokens.index_copy_(0, slots, num_tokens)


class StatePool:
    """Slots of all recurrent layers, zeroed once. Slot 0 is scratch, for padding, and `num_slots` follow it.

    They include `num_checkpoints` of the prefix cache. `block_size` is the most rows that a step verifies.
    """

    def __init__(
        self,
        config: GatedDeltaConfig,
        num_slots: int,
        block_size: int,
        dtype: torch.dtype,
        zeros: Zeros,
        num_checkpoints: int = 0,
    ) -> None:
        slots = (len(config.layers), num_slots + 1)
        matrix = zeros((*slots, config.num_v_heads, config.k_head_dim, config.v_head_dim), dtype=torch.float32)
        conv = zeros((*slots, config.conv_kernel - 1, config.channels), dtype=dtype)
        pending = zeros((*slots, block_size, config.input_width), dtype=dtype)
        num_tokens = zeros(slots, dtype=torch.int32)
        layers = zip(matrix, conv, pending, num_tokens, strict=True)
        self.layers = {i: LayerState(*tensors) for i, tensors in zip(config.layers, layers, strict=True)}
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
