"""What recurrent layers hand to a device: rows of a step, the weights of their recurrence, and slots of states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class State(NamedTuple):
    """State of S sequences in one layer: `matrix` [S, Nv, Dk, Dv] fp32, and the last inputs of `conv` [S, K - 1, C]."""

    matrix: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """Slots of one recurrent layer: the state after a sequence's first `num_tokens` tokens, and the pending rows.

    The next step commits as many pending rows as its position exceeds `num_tokens`, so none twice.
    """

    matrix: Tensor  # [slots, Nv, Dk, Dv] fp32, or [slots, Nv, Dv, Dk] bf16, as an NPU's operator reads it
    conv: Tensor  # [slots, K - 1, C]
    pending: Tensor  # [slots, b, C + 2 Nv]: the layer's inputs at the rows that the last step has verified
    num_tokens: Tensor  # [slots] int32
    of_layers: Tensor | None = None  # [L, slots] int32: `num_tokens` of all layers of a pool, of which this is `index`
    index: int = 0

    def read(self, slots: Tensor) -> Tensor:
        """Return states [S, Nv, Dk, Dv] in fp32."""
        states = self.matrix[slots]
        return states if states.dtype == torch.float32 else states.mT.float()

    def stored(self, states: Tensor) -> Tensor:
        """Return states [S, Nv, Dk, Dv] in fp32 as slots have them."""
        return states if self.matrix.dtype == torch.float32 else states.mT.to(self.matrix.dtype)

    def first(self) -> State:
        """Return the state of one sequence at position 0."""
        matrix = self.matrix[:1] if self.matrix.dtype == torch.float32 else self.matrix[:1].mT
        return State(matrix.new_zeros(matrix.shape, dtype=torch.float32), torch.zeros_like(self.conv[:1]))

    def at(self, slots: Tensor, starts: Tensor) -> tuple[State, Tensor, Tensor]:
        """Return (state, pending rows [S, b, C + 2 Nv], how many of them [S] count) of sequences about to run from
        positions `starts` [S] on. Position 0 begins with zeros, not with the state of the slot's previous owner."""
        is_new = starts == 0
        matrix = self.read(slots).masked_fill_(is_new[:, None, None, None], 0.0)
        conv = self.conv[slots].masked_fill_(is_new[:, None, None], 0.0)
        counts = (starts - self.num_tokens[slots]).clamp(0, self.pending.shape[1]).masked_fill_(is_new, 0)
        return State(matrix, conv), self.pending[slots], counts

    def write(self, slots: Tensor, state: State, num_tokens: Tensor) -> None:
        """Write the state after `num_tokens` [S] tokens to slots [S]. Nothing fails once the first write begins."""
        # These are allocated before anything is written.
        matrix, num_tokens = self.stored(state.matrix), num_tokens.to(torch.int32)
        self.matrix.index_copy_(0, slots, matrix)
        self.conv.index_copy_(0, slots, state.conv)
        self.num_tokens.index_copy_(0, slots, num_tokens)


class GatedDeltaWeights(NamedTuple):
    """Weights of a layer's recurrence: as loaded, and in fp32 as compositions of operators read them."""

    conv: Tensor  # [C, K]
    a_log: Tensor  # [Nv] fp32
    dt_bias: Tensor  # [Nv] fp32
    taps: Tensor  # [K, C + 2 Nv]: conv's, and for gates those that leave them as they are
    # [Nv, 2, 1]: log beta and log decay are softplus(sign gate + bias) rate.
    signs: Tensor
    biases: Tensor
    rates: Tensor

    @classmethod
    def of(cls, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> Self:
        (channels, num_taps), num_heads, ones = conv.shape, len(a_log), torch.ones_like(a_log)
        taps = torch.zeros(num_taps, channels + 2 * num_heads, device=conv.device)
        taps[:, :channels], taps[-1, channels:] = conv.t(), 1.0
        gates = ((-ones, ones), (0 * ones, dt_bias), (-ones, -a_log.exp()))
        return cls(conv, a_log, dt_bias, taps, *(torch.stack(both, dim=1)[..., None] for both in gates))


class GatedDeltaStep(NamedTuple):
    """R rows of S decoding sequences in one layer. Slot 0 is padding."""

    inputs: Tensor  # [R, C + 2 Nv], or [R, C] with gates of their own
    weights: GatedDeltaWeights
    memory: LayerState  # written in place

    # The fields of `SequenceRows`, on the device.
    slots: Tensor
    next_slots: Tensor
    starts: Tensor
    counts: Tensor
    rows: Tensor
    places: Tensor

    can_wait: bool = False  # the host may read counts, because it computes them itself
    gates: Tensor | None = None  # [R, 2 Nv]
    shared: dict[str, Any] | None = None  # what the first layer of a forward finds for all

    def once(self, name: str, find: Callable[[], T]) -> T:
        """Return what the first layer of the forward found by `find`."""
        if self.shared is None:
            return find()
        if name not in self.shared:
            self.shared[name] = find()
        found: T = self.shared[name]
        return found


class GatedDeltaPrompts(NamedTuple):
    """R rows of chunks of P prompts in one layer."""

    inputs: Tensor  # [R, C + 2 Nv], or [R, C] with gates of their own
    weights: GatedDeltaWeights
    memory: LayerState  # written in place

    # The fields of `PromptRows`, on the device but for the last two.
    slots: Tensor
    next_slots: Tensor
    split_slots: Tensor
    starts: Tensor
    splits: Tensor
    query_start_loc: Tensor
    parts: list[list[int]]
    are_new: list[bool]

    can_wait: bool = False  # as above
    gates: Tensor | None = None  # as above


def whole_inputs(step: GatedDeltaStep | GatedDeltaPrompts) -> Tensor:
    """Return inputs with their gates [R, C + 2 Nv]."""
    return step.inputs if step.gates is None else torch.cat((step.inputs, step.gates), dim=1)
