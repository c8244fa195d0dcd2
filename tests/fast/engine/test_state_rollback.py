"""Whatever was verified, accepted, dropped, repeated or preempted, the state is that of the sequence's own tokens."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.engine.arrays import with_arrays
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint, read_config
from app.engine.device.gated_delta import advance
from app.engine.device.torch import TorchBackend
from app.engine.load.loader import CheckpointWeights
from app.engine.models.gated_delta_net import GatedDeltaNet
from app.engine.models.layers import StepRows
from app.engine.models.qwen3_5 import TextWeights
from app.engine.models.recurrent_rows import RecurrentRows, SequenceRows, prompt_rows
from app.engine.models.state_pool import StatePool
from app.engine.models.weights import LayerSource
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.hybrid_reference import Delta, HybridReference

torch.set_num_threads(1)
BLOCK = 6
NUM_SEQS = 3
NUM_CHECKPOINTS = 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass
class Row:
    """A sequence as the layer sees it: hidden states [T, H] that were committed, and its slots."""

    slot: int
    next_slot: int = 0
    tokens: list[Tensor] = field(default_factory=list)
    frozen: bool = False
    """True if the slot is a checkpoint, so the next step writes another one."""

    @property
    def start(self) -> int:
        return len(self.tokens)


class Layer:
    """One Gated DeltaNet layer over a pool, beside the reference."""

    def __init__(self, folder: Path) -> None:
        pair = make_hybrid_pair(folder)
        self.reference = HybridReference(pair.target)
        config, cpu = target_config(read_config(pair.target)), torch.device("cpu")
        backend = TorchBackend(cpu)
        assert config.gated_delta is not None
        weights = TextWeights(CheckpointWeights(Checkpoint(pair.target), cpu, torch.float32), config)
        self.net = GatedDeltaNet(LayerSource(0, config, weights, backend))
        self.pool = StatePool(config.gated_delta, 2 * NUM_SEQS + NUM_CHECKPOINTS, BLOCK, torch.float32, backend.zeros)
        self.memory = self.pool.layers[0]
        self.hidden = config.hidden_size
        self.draw = torch.Generator().manual_seed(0)
        self.static = False

    def rows(self, count: int) -> list[Tensor]:
        return list(torch.randn(count, self.hidden, generator=self.draw))

    def verify(self, seqs: list[Row], new: list[list[Tensor]]) -> None:
        """A step of decoding. Its outputs must be those of the sequence's tokens with the new ones behind them."""
        counts, width = torch.tensor([len(rows) for rows in new]), max(map(len, new))
        firsts = counts.cumsum(0) - counts
        rows = (firsts[:, None] + torch.arange(width)).clamp(max=int(counts.sum()) - 1)
        places = torch.cat([i * width + torch.arange(len(rows)) for i, rows in enumerate(new)])
        slots, starts = (torch.tensor([getattr(seq, name) for seq in seqs]) for name in ("slot", "start"))
        next_slots = torch.tensor([seq.next_slot or seq.slot for seq in seqs])
        step = RecurrentRows(SequenceRows(slots, next_slots, starts, counts, rows, places, self.static), None)
        found = self.run(step, [row for rows in new for row in rows])
        for seq, rows, part in zip(seqs, new, found.split(counts.tolist()), strict=True):
            wanted, _ = self.recomputed([*seq.tokens, *rows])
            torch.testing.assert_close(part, wanted[seq.start :], **CLOSE)

    def prefill(self, seq: Row, new: list[Tensor]) -> None:
        """A chunk of a prompt, from the sequence's slot to the next one."""
        rows = prompt_rows([(seq.slot, seq.next_slot or seq.slot, 0)], [seq.start], [[len(new)]])
        prompts = with_arrays(rows, lambda _, array: torch.from_numpy(array))
        found = self.run(RecurrentRows(None, prompts), new)
        torch.testing.assert_close(found, self.recomputed([*seq.tokens, *new])[0][seq.start :], **CLOSE)

    def run(self, recurrent: RecurrentRows, rows: list[Tensor]) -> Tensor:
        return self.net.forward(torch.stack(rows), StepRows((), torch.empty(0), [], recurrent), self.memory)

    def recomputed(self, tokens: list[Tensor]) -> tuple[Tensor, Delta]:
        return self.reference.delta_net(torch.stack(tokens), "layers.0.linear_attn", None)

    def check(self, seq: Row) -> None:
        """Compare the state that the next step begins with."""
        slots, starts = torch.tensor([seq.slot]), torch.tensor([seq.start])
        state, pending, counts = self.memory.at(slots, starts)
        found = advance(self.net.weights, pending, state, counts)[1]
        if not seq.tokens:
            assert found.matrix.eq(0).all() and found.conv.eq(0).all()
            return
        _, wanted = self.recomputed(seq.tokens)
        torch.testing.assert_close(found.matrix[0], wanted.matrix, **CLOSE)
        torch.testing.assert_close(found.conv[0], wanted.inputs, **CLOSE)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    return Layer(tmp_path_factory.mktemp("hybrid"))


WIDTHS = st.lists(st.integers(1, BLOCK), min_size=NUM_SEQS, max_size=NUM_SEQS)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["accept", "drop", "repeat", "repeat in halves", "preempt", "prompt", "prompt again", "checkpoint", "hit"]
        ),
        WIDTHS,
        WIDTHS,
        st.integers(0, NUM_SEQS - 1),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15)
@given(steps=STEPS, static=st.booleans())
@torch.inference_mode()
def test_any_course_of_steps_leaves_the_state_of_the_accepted_tokens(layer: Layer, steps: list, static: bool):
    layer.static = static  # as in graphs, where no count is known to the host
    layer.memory.matrix.fill_(torch.nan)  # of owners before
    layer.memory.conv.fill_(torch.nan)
    layer.memory.pending.fill_(torch.nan)
    layer.memory.num_tokens.fill_(9)
    free = list(range(1, 2 * NUM_SEQS + NUM_CHECKPOINTS + 1))
    seqs, checkpoints = [Row(free.pop()) for _ in range(NUM_SEQS)], list[Row]()

    def leave(seq: Row) -> None:
        """Let the next slot, if there is one, take the place of a sequence's slot."""
        if seq.next_slot:
            if not seq.frozen:
                free.append(seq.slot)
            seq.slot, seq.next_slot, seq.frozen = seq.next_slot, 0, False

    for kind, widths, accepted, chosen in steps:
        new, seq = [layer.rows(width) for width in widths], seqs[chosen]
        if kind == "preempt":
            seq.next_slot, seq.tokens = free.pop() if seq.frozen else 0, []
            leave(seq)
        elif kind == "checkpoint":
            if len(checkpoints) < NUM_CHECKPOINTS and seq.tokens and not seq.frozen:
                # A page may end at any row that the last step has committed.
                covered = int(layer.memory.num_tokens[seq.slot])
                end = max(covered, len(seq.tokens) - widths[0] + 1, 1)
                checkpoints.append(Row(seq.slot, tokens=seq.tokens[:end]))
                seq.frozen = True
        elif kind == "hit":
            if checkpoints:
                found = checkpoints[widths[0] % len(checkpoints)]
                if not seq.frozen:
                    free.append(seq.slot)
                seqs[chosen] = Row(found.slot, tokens=list(found.tokens), frozen=True)
        elif kind.startswith("prompt"):
            seq.next_slot = free.pop() if seq.tokens else 0
            for _ in range(2 if kind == "prompt again" else 1):
                layer.prefill(seq, new[0])
            leave(seq)
            seq.tokens += new[0]
        else:
            for each in seqs:
                each.next_slot = free.pop() if each.frozen else 0
            layer.verify(seqs, new)
            if kind == "repeat":
                layer.verify(seqs, new)
            elif kind == "repeat in halves":
                layer.verify(seqs[:chosen] or seqs[:1], new[:chosen] or new[:1])
                layer.verify(seqs[chosen:], new[chosen:])
            for each, rows, count in zip(seqs, new, accepted, strict=True):
                if kind == "drop":
                    free.extend([each.next_slot] if each.next_slot else [])
                    each.next_slot = 0
                else:
                    each.tokens += rows[:count]
                    leave(each)
        for each in seqs:
            layer.check(each)
    for each in checkpoints:
        layer.check(each)


@torch.inference_mode()
def test_rows_that_are_nan_and_not_accepted_leave_no_trace(layer: Layer):
    seq = Row(1)
    layer.prefill(seq, prompt := layer.rows(4))
    seq.tokens += prompt
    rows = layer.rows(BLOCK)
    slots = torch.tensor([1])
    layer.verify([seq], [rows])
    layer.memory.pending[slots, 2:] = torch.nan
    seq.tokens += rows[:2]
    layer.check(seq)
    layer.verify([seq], [layer.rows(3)])


@torch.inference_mode()
def test_padding_sequences_stay_finite_on_the_scratch_slot(layer: Layer):
    for tensor in (layer.memory.matrix, layer.memory.conv, layer.memory.pending):
        tensor.fill_(torch.nan)
    numbers = torch.arange(3)
    for _ in range(3):
        scratch = torch.zeros(3, dtype=torch.int64)
        padding = SequenceRows(scratch, scratch, numbers, torch.ones(3), numbers[:, None], numbers)
        assert layer.run(RecurrentRows(padding, None), layer.rows(3)).isfinite().all()
    assert layer.memory.matrix[0].isfinite().all()
