"""What every device's operators for rows of a Gated DeltaNet layer have to pass: classes of tests to inherit."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.recurrent import GatedDeltaStep
from tests.fast.engine.delta_layers import BLOCK, CLOSE, CPU, SHAPES, SMALL, Commit, Layer, Move, assert_slots


class DeltaSuite:
    """Outputs, states and slots are the reference's. Pending rows past a sequence's own may be kept or not."""

    run: Callable[[GatedDeltaStep], Tensor]
    device = CPU
    close: ClassVar[dict[str, float]] = CLOSE
    sizes: ClassVar[dict[str, Any]] = {}
    widest = 16
    """Rows of a step in the longest tests."""
    keeps_others = False
    """True if pending rows past a sequence's own stay as they were."""

    def layer(self, shape: GatedDeltaConfig = SMALL, **sizes: Any) -> Layer:
        return Layer(shape, type(self).run, device=self.device, **self.sizes | sizes)

    def check(self, layer: Layer, inputs: Tensor, slots: list[int], starts: list[int], counts: list[int], *at: Any):
        """One step against the reference's."""
        wanted, slots_wanted = layer.wanted(inputs, slots, starts, counts, *at)
        found = layer.found(inputs, slots, starts, counts, *at)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, **self.close)
        state = layer.state
        for slot, count in zip(at[0] if at else slots, counts, strict=True):
            if not self.keeps_others:
                state["pending"][slot, count:] = slots_wanted["pending"][slot, count:] = 0
        assert_slots(state, slots_wanted, self.close)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_outputs_and_slots_are_the_references(self, shape, dtype):
        """Every accepted count, counts of rows from 1 to a whole block, and a new sequence in an old slot."""
        layer = self.layer(shape, dtype=dtype)
        layer.memory.num_tokens.fill_(40)
        counts, before = [BLOCK, 1, 2, BLOCK, 3, 4], layer.state
        self.check(layer, layer.rows(sum(counts)), [3, 1, 5, 2, 6, 4], [40, 41, 0, 43, 44, 40 + BLOCK], counts)
        assert not torch.equal(layer.state["matrix"][1], before["matrix"][1]), "what was accepted is committed"
        assert torch.equal(layer.state["matrix"][3], before["matrix"][3]), "and nothing else"

    def test_gates_may_lie_apart_from_the_channels(self):
        layer = self.layer(gates_apart=True)
        layer.memory.num_tokens.fill_(40)
        self.check(layer, layer.rows(5), [3, 1], [42, 41], [3, 2])

    def test_a_state_that_moves_leaves_the_slot_that_it_was_read_from(self):
        """Two sequences read one checkpoint at different pages, beside one that stays in its slot."""
        layer = self.layer()
        layer.memory.num_tokens.fill_(40)
        before = layer.state
        self.check(layer, layer.rows(BLOCK + 3), [3, 2, 3], [42, 41, 44], [BLOCK, 2, 1], [5, 2, 1])
        for name, tensor in layer.state.items():
            assert torch.equal(tensor[3], before[name][3]), name
            assert not torch.equal(tensor[5], before[name][5]), name

    @pytest.mark.parametrize("accepted", range(1, BLOCK + 1))
    def test_every_accepted_count_is_committed_once_over_many_steps(self, accepted):
        """In each step a block is verified, of which the same number of rows is accepted. Each step is repeated."""
        layer, start = self.layer(), 0
        for _ in range(4):
            inputs = layer.rows(BLOCK)
            wanted, slots = layer.wanted(inputs, [2], [start], [BLOCK])
            for _ in range(2):
                torch.testing.assert_close(layer.found(inputs, [2], [start], [BLOCK]), wanted, **self.close)
                assert_slots(layer.state, slots, self.close)
            assert int(layer.state["num_tokens"][2]) == start
            start += accepted

    @pytest.mark.parametrize("nearly", [0.0, 1e-3])
    def test_repeated_tokens_keep_their_digits(self, nearly):
        """Keys are equal or nearly so, nothing decays and beta is almost 1."""
        layer = self.layer(block=self.widest)
        layer.weights["a_log"].fill_(-12.0)
        for start in range(0, 3 * self.widest, self.widest):
            rows = layer.rows(1) + nearly * layer.rows(self.widest)
            rows[:, SMALL.channels : SMALL.channels + SMALL.num_v_heads] = 6.0
            self.check(layer, rows, [4], [start], [self.widest])

    def test_nan_of_rows_that_were_not_accepted_and_of_a_slots_last_owner_leaves_no_trace(self):
        layer = self.layer()
        for tensor in (layer.memory.matrix, layer.memory.conv, layer.memory.pending):
            tensor.fill_(torch.nan)
        layer.memory.num_tokens.fill_(7)
        layer.found(layer.rows(BLOCK), [1], [0], [BLOCK])
        layer.memory.pending[1, 2:] = torch.nan
        rows = layer.rows(3)
        wanted, _ = layer.wanted(rows, [1], [2], [3])
        torch.testing.assert_close(layer.found(rows, [1], [2], [3]), wanted, **self.close)
        state = layer.state
        assert state["matrix"][1].isfinite().all() and state["conv"][1].isfinite().all()
        assert state["matrix"][2].isnan().all(), "no other slot is touched"

    def test_nan_in_one_sequence_reaches_no_other(self):
        layer = self.layer()
        inputs, counts = layer.rows(4), [1, 3]
        wanted = layer.wanted(inputs, [1, 2], [0, 0], counts)[0]
        inputs[1] = torch.nan
        found = layer.found(inputs, [1, 2], [0, 0], counts)
        torch.testing.assert_close(found[:1], wanted[:1], **self.close)
        assert found[1:].isnan().all() and layer.state["matrix"][1].isfinite().all()


class PromptSuite:
    """What every device's operator for rows of prompts has to pass. Outputs, states and slots are the reference's."""

    run: Commit
    device = CPU
    close: ClassVar[dict[str, float]] = CLOSE

    def layer(self, shape: GatedDeltaConfig = SMALL, **sizes: Any) -> Layer:
        return Layer(shape, type(self).run, device=self.device, **sizes)

    def check(self, layer: Layer, inputs: Tensor, moves: list[Move], parts: list[list[int]]) -> Tensor:
        wanted, slots = layer.wanted_of_prompts(inputs, moves, parts)
        found = layer.found_of_prompts(type(self).run, inputs, moves, parts)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, **self.close)
        for name, tensor in layer.state.items():
            torch.testing.assert_close(tensor, slots[name], **self.close, equal_nan=True)
        return found

    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_outputs_and_slots_are_the_references(self, shape):
        """A new prompt in an old slot, one that goes on, and one behind a checkpoint with pending rows."""
        layer, counts = self.layer(shape), [3, 70, 1, 33]
        layer.memory.num_tokens.fill_(40)
        moves = [(1, 1, 0, 0), (2, 3, 0, 40), (4, 5, 0, 43), (4, 6, 0, 40 + BLOCK)]
        before = layer.state
        self.check(layer, layer.rows(sum(counts)), moves, [[count] for count in counts])
        for slot in (2, 4):
            assert all(torch.equal(tensor[slot], before[name][slot]) for name, tensor in layer.state.items())

    def test_gates_may_lie_apart_from_the_channels(self):
        layer = self.layer(gates_apart=True)
        layer.memory.num_tokens.fill_(40)
        self.check(layer, layer.rows(40), [(1, 2, 0, 42)], [[40]])

    @pytest.mark.parametrize("parts", [[1, 1], [2, 40], [31, 2], [32, 32], [45, 3]], ids=str)
    @pytest.mark.parametrize("start", [0, 42])
    def test_a_split_leaves_the_state_of_the_rows_before_it(self, start, parts):
        """Another prompt is beside it. The rows before a split may be fewer than the convolution sees."""
        layer = self.layer()
        layer.memory.num_tokens.fill_(40)
        self.check(layer, layer.rows(7 + sum(parts)), [(1, 1, 0, 0), (2, 4, 3, start)], [[7], parts])

    def test_prompts_cut_at_any_row_are_those_in_one(self):
        layer, whole = self.layer(), self.layer()
        rows, start, outputs = layer.rows(80), 0, []
        for count in (1, 2, 30, 33, 14):
            moves = [(2, 1, 0, start) if len(outputs) % 2 else (1, 2, 0, start)]
            outputs.append(layer.found_of_prompts(type(self).run, rows[start : start + count], moves, [[count]]))
            start += count
        wanted = whole.found_of_prompts(type(self).run, rows, [(1, 2, 0, 0)], [[80]])
        torch.testing.assert_close(torch.cat(outputs), wanted, **self.close)
        for name in ("matrix", "conv", "num_tokens"):
            torch.testing.assert_close(layer.state[name][2], whole.state[name][2], **self.close)

    @pytest.mark.parametrize("nearly", [0.0, 1e-3])
    def test_repeated_tokens_keep_their_digits(self, nearly):
        """Keys are equal or nearly so, nothing decays and beta is almost 1."""
        layer = self.layer()
        layer.weights["a_log"].fill_(-12.0)
        rows = layer.rows(1) + nearly * layer.rows(70)
        rows[:, SMALL.channels : SMALL.channels + SMALL.num_v_heads] = 6.0
        self.check(layer, rows, [(1, 2, 0, 0)], [[70]])

    def test_strong_decay_keeps_the_digits_of_weak_ones_after_it(self):
        layer = self.layer()
        rows = layer.rows(70)
        rows[::9, SMALL.channels + SMALL.num_v_heads :] = 4000.0
        self.check(layer, rows, [(1, 2, 0, 0)], [[70]])

    def test_nan_of_a_slots_last_owner_and_in_another_prompt_leaves_no_trace(self):
        layer = self.layer()
        for tensor in (layer.memory.matrix, layer.memory.conv, layer.memory.pending):
            tensor.fill_(torch.nan)
        layer.memory.num_tokens.fill_(7)
        inputs, moves = layer.rows(45), [(1, 1, 0, 0), (2, 2, 0, 0)]
        wanted, slots = layer.wanted_of_prompts(inputs, moves, [[40], [5]])
        inputs[:40] = torch.nan
        found = layer.found_of_prompts(type(self).run, inputs, moves, [[40], [5]])
        torch.testing.assert_close(found[40:], wanted[40:], **self.close)
        assert found[:40].isnan().all()
        for name in ("matrix", "conv"):
            torch.testing.assert_close(layer.state[name][2], slots[name][2], **self.close)
