"""Rows of a Gated DeltaNet layer on our kernels, in the interpreter: the reference's outputs, state and slots.

The reference is plain PyTorch, which tests/fast/engine/test_hybrid.py holds against another model.
"""

import pytest
import torch
import triton.language as tl
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.cuda import gated_delta, gated_delta_prompts
from tests.fast.engine.delta_layers import BLOCK, CLOSE, SMALL, Layer, assert_slots
from tests.fast.engine.delta_suite import DeltaSuite, PromptSuite

torch.set_num_threads(1)
PUBLISHED = GatedDeltaConfig(layers=(0,), conv_kernel=4, num_k_heads=1, num_v_heads=2, k_head_dim=128, v_head_dim=128)
"""Heads of the published models, but fewer."""


class TestConformance(DeltaSuite):
    run = staticmethod(gated_delta.commit_and_verify)
    keeps_others = True


class TestPrompts(PromptSuite):
    run = staticmethod(gated_delta_prompts.commit_prompts)

    def test_more_prompts_than_are_searched_at_once_find_their_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """128 of them would take the interpreter too long."""
        monkeypatch.setattr(gated_delta_prompts, "SEARCHED_PROMPTS", tl.constexpr(2))
        self.test_outputs_and_slots_are_the_references(SMALL)


def test_a_prompt_in_bfloat16_differs_from_fp32_by_its_operands_rounding() -> None:
    """State, sums and the system are in fp32. A split and pending rows change nothing about that."""
    layer = Layer(PUBLISHED, gated_delta.commit_and_verify, dtype=torch.bfloat16)
    layer.memory.num_tokens.fill_(40)
    inputs, moves, parts = layer.rows(150), [(1, 2, 0, 0), (3, 4, 5, 42)], [[70], [33, 47]]
    wanted, slots = layer.wanted_of_prompts(inputs, moves, parts)
    found, state = layer.found_of_prompts(gated_delta_prompts.commit_prompts, inputs, moves, parts), layer.state
    errors = [error(found, wanted), *(error(state["matrix"][i], slots["matrix"][i]) for i in (2, 4, 5))]
    assert 1e-4 < max(errors) < 5e-3, errors


@pytest.mark.parametrize("nearly", [0.0, 0.1])
def test_in_bfloat16_the_state_of_repeated_tokens_loses_more_than_outputs(nearly: float) -> None:
    """Keys are equal or nearly so, nothing decays and beta is almost 1, so roundings of the same kind add up."""
    layer = Layer(PUBLISHED, gated_delta.commit_and_verify, dtype=torch.bfloat16)
    layer.weights["a_log"].fill_(-12.0)
    rows = layer.rows(1) + nearly * layer.rows(256)
    rows[:, PUBLISHED.channels : PUBLISHED.channels + PUBLISHED.num_v_heads] = 6.0
    wanted, slots = layer.wanted_of_prompts(rows, [(1, 2, 0, 0)], [[256]])
    found = layer.found_of_prompts(gated_delta_prompts.commit_prompts, rows, [(1, 2, 0, 0)], [[256]])
    assert error(found, wanted) < 5e-3
    assert error(layer.state["matrix"][2], slots["matrix"][2]) < 1e-2


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_dropped_or_repeated_step_commits_nothing_twice() -> None:
    layer = Layer(SMALL, gated_delta.commit_and_verify)
    first, second = layer.rows(BLOCK), layer.rows(3)
    layer.found(first, [1], [0], [BLOCK])
    once = layer.found(second, [1], [3], [3])
    state = layer.state
    torch.testing.assert_close(layer.found(second, [1], [3], [3]), once, rtol=0, atol=0)
    for name, tensor in layer.state.items():
        assert torch.equal(tensor, state[name]), name
    layer.found(layer.rows(4), [1], [3], [4])  # the same position with other rows: the step before was dropped
    for name in ("matrix", "conv", "num_tokens"):
        assert torch.equal(getattr(layer.memory, name), state[name]), name


def test_a_state_may_be_read_from_one_slot_and_written_to_another() -> None:
    layer = Layer(SMALL, gated_delta.commit_and_verify)
    layer.found(layer.rows(BLOCK), [1], [0], [BLOCK])
    before, rows = layer.state, layer.rows(6)
    wanted, slots = layer.wanted(rows[:3], [1], [2], [3])
    found = layer.found(rows, [1, 1], [2, 0], [3, 3], [4, 5])
    torch.testing.assert_close(found[:3], wanted, **CLOSE)
    for name, tensor in layer.state.items():
        assert torch.equal(tensor[:4], before[name][:4]), name
        copied = slots[name][1][:3] if name == "pending" else slots[name][1]
        torch.testing.assert_close(tensor[4][:3] if name == "pending" else tensor[4], copied, **CLOSE)
    assert layer.memory.matrix[5].eq(0).all() and int(layer.memory.num_tokens[5]) == 0


def test_a_row_is_the_same_to_the_last_bit_in_a_block_and_alone() -> None:
    """So what is verified is what plain decoding computes, and what is committed is what was verified."""
    rows = Layer(SMALL, gated_delta.commit_and_verify).rows(BLOCK)
    block, alone = Layer(SMALL, gated_delta.commit_and_verify), Layer(SMALL, gated_delta.commit_and_verify)
    whole = block.found(rows, [1], [0], [BLOCK])
    parts = [alone.found(rows[i : i + 1], [1], [i], [1]) for i in range(BLOCK)]
    assert torch.equal(torch.cat(parts), whole)
    last = Layer(SMALL, gated_delta.commit_and_verify).rows(1)
    assert torch.equal(block.found(last, [1], [BLOCK], [1]), alone.found(last, [1], [BLOCK], [1]))
    assert torch.equal(block.memory.matrix, alone.memory.matrix)


def test_padding_writes_no_slot_and_its_outputs_are_zeros() -> None:
    """Padding sequences are of one row or none, and the last may have more rows than a block."""
    layer = Layer(SMALL, gated_delta.commit_and_verify)
    for tensor in (layer.memory.matrix, layer.memory.conv, layer.memory.pending):
        tensor[0] = torch.nan
    inputs, before = layer.rows(12), layer.state
    found = layer.found(inputs, [3, 0, 0, 0], [0, 0, 1, 2], [2, 1, 0, BLOCK])
    wanted, slots = layer.wanted(inputs, [3], [0], [2])
    torch.testing.assert_close(found[:2], wanted, **CLOSE)
    assert found[2:].eq(0).all()
    assert_slots(layer.state, slots)
    assert all(torch.equal(tensor[0], before[name][0]) or name != "num_tokens" for name, tensor in layer.state.items())
    assert layer.memory.matrix[0].isnan().all() and layer.memory.pending[0].isnan().all()


def test_more_taken_than_a_block_is_no_more_than_a_block() -> None:
    """A position far ahead would be a bug elsewhere. The slot's neighbours are not read for it."""
    layer = Layer(SMALL, gated_delta.commit_and_verify)
    rows = layer.rows(1)
    wanted, slots = layer.wanted(rows, [2], [99], [1])
    torch.testing.assert_close(layer.found(rows, [2], [99], [1]), wanted, **CLOSE)
    assert_slots(layer.state, slots)
    wanted, slots = layer.wanted_of_prompts(rows, [(2, 1, 0, 99 + 9)], [[1]])
    found = layer.found_of_prompts(gated_delta_prompts.commit_prompts, rows, [(2, 1, 0, 99 + 9)], [[1]])
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert_slots(layer.state, slots)
