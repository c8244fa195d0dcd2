"""Decoding rows of a Gated DeltaNet layer for a device's own operator, and the reference's results.

The reference commits and then verifies, each by the rows' own chunk of the delta rule, like in a prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from app.engine.arrays import with_arrays
from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.gated_delta import advance
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep, GatedDeltaWeights, LayerState
from app.engine.device.torch import TorchBackend
from app.engine.models.recurrent_rows import prompt_rows
from app.engine.models.state_pool import StatePool

CPU = torch.device("cpu")
SMALL = GatedDeltaConfig(layers=(0,), conv_kernel=4, num_k_heads=2, num_v_heads=6, k_head_dim=8, v_head_dim=12)
WIDER = GatedDeltaConfig(layers=(0,), conv_kernel=4, num_k_heads=1, num_v_heads=2, k_head_dim=20, v_head_dim=37)
ALONE = GatedDeltaConfig(layers=(0,), conv_kernel=2, num_k_heads=3, num_v_heads=3, k_head_dim=16, v_head_dim=16)
SHAPES = {"grouped": SMALL, "odd sizes and three parts of a head": WIDER, "a head each, two taps": ALONE}
BLOCK = 5
NUM_SLOTS = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
Move = tuple[int, int, int, int]
Commit = Callable[[GatedDeltaPrompts], Tensor]
SLOTS = ("matrix", "conv", "pending", "num_tokens")


@dataclass
class Layer:
    """A layer's weights and slots, and its reference. Slots hold the leftovers of owners before, and `garbage`."""

    shape: GatedDeltaConfig
    run: Callable[[GatedDeltaStep], Tensor]
    dtype: torch.dtype = torch.float32
    block: int = BLOCK
    device: torch.device = CPU
    can_wait: bool = False
    gates_apart: bool = False
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(len(self.shape.layers) + self.shape.channels)
        heads, channels = self.shape.num_v_heads, self.shape.channels
        self.weights = {
            "conv": self.normal(channels, self.shape.conv_kernel).to(self.dtype),
            "a_log": self.normal(heads) - 1.0,
            "dt_bias": self.normal(heads) - 1.0,
        }
        sizes, zeros = (NUM_SLOTS, self.block, self.dtype), TorchBackend(CPU).zeros
        memory = StatePool(self.shape, *sizes, zeros, state_dtype=self.state_dtype).layers[0]
        for tensor in (memory.matrix, memory.conv, memory.pending):
            tensor.copy_(self.normal(*tensor.shape))
        self.memory = LayerState(*(getattr(memory, name).to(self.device) for name in SLOTS))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def rows(self, count: int) -> Tensor:
        """Inputs as the projection gives them: beside numbers that belong to the gate of the output."""
        width = self.shape.input_width
        return self.normal(count, width + 7).to(self.dtype)[:, :width]

    def placed(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return inputs on the device, and their gates if these are apart."""
        if not self.gates_apart:
            return inputs.to(self.device), None
        channels = self.shape.channels
        return inputs[:, :channels].to(self.device), inputs[:, channels:].contiguous().to(self.device)

    @property
    def placed_weights(self) -> GatedDeltaWeights:
        return GatedDeltaWeights.of(**{name: x.to(self.device) for name, x in self.weights.items()})

    @property
    def state(self) -> dict[str, Tensor]:
        """Copies of all slots on the host."""
        return {name: getattr(self.memory, name).cpu().clone() for name in SLOTS}

    def found(
        self,
        inputs: Tensor,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        next_slots: list[int] | None = None,
    ) -> Tensor:
        first, numbers = torch.tensor(counts).cumsum(0) - torch.tensor(counts), torch.arange(max(counts))
        places = torch.cat([i * max(counts) + numbers[:count] for i, count in enumerate(counts)])
        own = [torch.tensor(x) for x in (slots, next_slots or slots)]
        own += [torch.tensor(x, dtype=torch.int32) for x in (starts, counts)]
        own += [(first[:, None] + numbers).clamp(max=len(inputs) - 1), places]
        rows = [x.to(self.device) for x in own]
        inputs, gates = self.placed(inputs)
        return self.run(GatedDeltaStep(inputs, self.placed_weights, self.memory, *rows, self.can_wait, gates)).cpu()

    def found_of_prompts(self, run: Commit, inputs: Tensor, moves: list[Move], parts: list[list[int]]) -> Tensor:
        """Run chunks of prompts. A move is (slot, next slot, split slot, start)."""
        rows = prompt_rows([move[:3] for move in moves], [move[3] for move in moves], parts)
        placed = with_arrays(rows, lambda _, array: torch.from_numpy(array).to(self.device))
        given = (getattr(placed, field.name) for field in fields(placed))
        inputs, gates = self.placed(inputs)
        return run(GatedDeltaPrompts(inputs, self.placed_weights, self.memory, *given, self.can_wait, gates)).cpu()

    def wanted_of_prompts(
        self, inputs: Tensor, moves: list[Move], parts: list[list[int]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and the slots afterwards, of the reference: each state is of all rows up to there in one."""
        weights, memory, outputs, first = GatedDeltaWeights.of(**self.weights), LayerState(**self.state), [], 0
        before = LayerState(**self.state)
        for (*slots, start), counts in zip(moves, parts, strict=True):
            slot, next_slot, split_slot = (torch.tensor([number]) for number in slots)
            state, pending, accepted = before.at(slot, torch.tensor([start]))
            done = int(accepted)
            own = torch.cat((pending[:, :done], inputs[None, first : first + sum(counts)]), dim=1)
            for to, count in zip((split_slot, next_slot)[-len(counts) :], counts, strict=True):
                done += count
                o, after = advance(weights, own[:, :done], state)
                memory.write(to, after, start - accepted + done)
            outputs.append(o[0, int(accepted) :])
            first += sum(counts)
        return torch.cat(outputs), {name: getattr(memory, name) for name in SLOTS}

    def wanted(
        self,
        inputs: Tensor,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        next_slots: list[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and the slots afterwards, of the reference on a copy of the slots, one sequence at a time."""
        weights = GatedDeltaWeights.of(**self.weights)
        memory, outputs, first = LayerState(**self.state), [], 0
        for *places, start, count in zip(slots, next_slots or slots, starts, counts, strict=True):
            slot, next_slot, begin, rows = (torch.tensor([number]) for number in (*places, start, count))
            state, pending, accepted = memory.at(slot, begin)
            state, new = advance(weights, pending, state, accepted)[1], inputs[None, first : first + count]
            if count:
                outputs.append(advance(weights, new, state, rows)[0][0])
                memory.write(next_slot, state, begin)
                memory.pending[next_slot, :count] = new
            first += count
        kept = {name: getattr(memory, name) for name in self.state}
        return torch.cat(outputs), kept


def assert_slots(found: dict[str, Tensor], wanted: dict[str, Tensor], close: dict[str, float] = CLOSE) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, wanted[name], **close, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
