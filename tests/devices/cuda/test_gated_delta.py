"""Decoding rows of a Gated DeltaNet layer on our kernels, in the interpreter: the reference's outputs, state and slots.

The reference is plain PyTorch, which tests/fast/engine/test_hybrid.py holds against another model.
"""

from typing import Any

import pytest
import torch

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.cuda import gated_delta
from app.engine.cuda.backend import CudaBackend
from app.engine.errors import UnsupportedError
from tests.fast.engine.delta_layers import BLOCK, CLOSE, CPU, SHAPES, SMALL, Layer, assert_slots

torch.set_num_threads(1)


def cuda_layer(*args: Any, **sizes: Any) -> Layer:
    return Layer(*args[:1], gated_delta.commit_and_verify, *args[1:], **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_and_slots_are_the_references(shape: GatedDeltaConfig, dtype: torch.dtype) -> None:
    """Several sequences: every accepted count, counts of rows from 1 to a whole block, and a new one in an old slot."""
    layer = cuda_layer(shape, dtype)
    slots, counts = [3, 1, 5, 2, 6, 4], [BLOCK, 1, 2, BLOCK, 3, 4]
    accepted = [0, 1, 2, 3, 4, BLOCK]
    layer.memory.num_tokens.fill_(40)
    starts = [40 + count for count in accepted]
    starts[2] = 0
    inputs = layer.rows(sum(counts))
    wanted, slots_wanted = layer.wanted(inputs, slots, starts, counts)
    before = layer.state
    found = layer.found(inputs, slots, starts, counts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert_slots(layer.state, slots_wanted)
    assert not torch.equal(layer.memory.matrix[1], before["matrix"][1]), "what was accepted is committed"
    assert torch.equal(layer.memory.matrix[3], before["matrix"][3]), "and nothing else"


def test_a_state_that_moves_leaves_the_slot_that_it_was_read_from() -> None:
    """Two sequences read one checkpoint at different pages, beside one that stays in its slot."""
    layer = cuda_layer(SMALL)
    layer.memory.num_tokens.fill_(40)
    slots, next_slots, starts, counts = [3, 2, 3], [5, 2, 1], [42, 41, 44], [BLOCK, 2, 1]
    inputs = layer.rows(sum(counts))
    wanted, slots_wanted = layer.wanted(inputs, slots, starts, counts, next_slots)
    before = layer.state
    torch.testing.assert_close(layer.found(inputs, slots, starts, counts, next_slots), wanted, **CLOSE)
    assert_slots(layer.state, slots_wanted)
    for name, tensor in layer.state.items():
        assert torch.equal(tensor[3], before[name][3]), name
        assert not torch.equal(tensor[5], before[name][5]), name


@pytest.mark.parametrize("accepted", range(1, BLOCK + 1))
def test_every_accepted_count_is_committed_once_over_many_steps(accepted: int) -> None:
    """In each step a block is verified, of which the same number of rows is accepted."""
    layer = cuda_layer(SMALL)
    start = 0
    for _ in range(4):
        inputs = layer.rows(BLOCK)
        wanted, slots = layer.wanted(inputs, [2], [start], [BLOCK])
        torch.testing.assert_close(layer.found(inputs, [2], [start], [BLOCK]), wanted, **CLOSE)
        assert_slots(layer.state, slots)
        assert int(layer.memory.num_tokens[2]) == start
        start += accepted


def test_a_dropped_or_repeated_step_commits_nothing_twice() -> None:
    layer = cuda_layer(SMALL)
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
    layer = cuda_layer(SMALL)
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
    rows = cuda_layer(SMALL).rows(BLOCK)
    block, alone = cuda_layer(SMALL), cuda_layer(SMALL)
    whole = block.found(rows, [1], [0], [BLOCK])
    parts = [alone.found(rows[i : i + 1], [1], [i], [1]) for i in range(BLOCK)]
    assert torch.equal(torch.cat(parts), whole)
    last = cuda_layer(SMALL).rows(1)
    assert torch.equal(block.found(last, [1], [BLOCK], [1]), alone.found(last, [1], [BLOCK], [1]))
    assert torch.equal(block.memory.matrix, alone.memory.matrix)


@pytest.mark.parametrize("nearly", [0.0, 1e-3])
def test_repeated_tokens_keep_their_digits(nearly: float) -> None:
    """Keys are equal or nearly so, nothing decays and beta is almost 1."""
    layer = cuda_layer(SMALL, block=16)
    layer.weights["a_log"].fill_(-12.0)
    start = 0
    for _ in range(3):
        rows = layer.rows(1) + nearly * layer.rows(16)
        rows[:, SMALL.channels : SMALL.channels + SMALL.num_v_heads] = 6.0
        wanted, slots = layer.wanted(rows, [4], [start], [16])
        torch.testing.assert_close(layer.found(rows, [4], [start], [16]), wanted, **CLOSE)
        assert_slots(layer.state, slots)
        start += 16


def test_padding_writes_no_slot_and_its_outputs_are_zeros() -> None:
    """Padding sequences are of one row or none, and the last may have more rows than a block."""
    layer = cuda_layer(SMALL)
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


def test_nan_of_rows_that_were_not_accepted_and_of_a_slots_last_owner_leaves_no_trace() -> None:
    layer = cuda_layer(SMALL)
    for tensor in (layer.memory.matrix, layer.memory.conv, layer.memory.pending):
        tensor.fill_(torch.nan)
    layer.memory.num_tokens.fill_(7)
    layer.found(layer.rows(BLOCK), [1], [0], [BLOCK])
    layer.memory.pending[1, 2:] = torch.nan
    rows = layer.rows(3)
    wanted, _ = layer.wanted(rows, [1], [2], [3])
    torch.testing.assert_close(layer.found(rows, [1], [2], [3]), wanted, **CLOSE)
    assert layer.memory.matrix[1].isfinite().all() and layer.memory.conv[1].isfinite().all()
    assert layer.memory.matrix[2].isnan().all(), "no other slot is touched"


def test_nan_in_one_sequence_reaches_no_other() -> None:
    layer = cuda_layer(SMALL)
    inputs = layer.rows(4)
    wanted = layer.wanted(inputs, [1, 2], [0, 0], [2, 2])[0]
    inputs[3] = torch.nan
    found = layer.found(inputs, [1, 2], [0, 0], [2, 2])
    torch.testing.assert_close(found[:3], wanted[:3], **CLOSE)
    assert found[3].isnan().all()


def test_more_taken_than_a_block_is_no_more_than_a_block() -> None:
    """A position far ahead would be a bug elsewhere. The slot's neighbours are not read for it."""
    layer = cuda_layer(SMALL)
    rows = layer.rows(1)
    wanted, slots = layer.wanted(rows, [2], [99], [1])
    torch.testing.assert_close(layer.found(rows, [2], [99], [1]), wanted, **CLOSE)
    assert_slots(layer.state, slots)


def test_a_head_that_does_not_fit_is_refused_by_name() -> None:
    backend = CudaBackend(CPU)
    backend.check_gated_delta(2, 256, 128)
    with pytest.raises(UnsupportedError, match="linear_key_head_dim 512: a GPU takes 256 at most"):
        backend.check_gated_delta(2, 512, 128)
