"""Decoding rows of a Gated DeltaNet layer on device "npu:0": the reference's outputs, state and slots.

Checked with torch_npu 2.13.0 on the null device; not run on an Ascend device.
"""

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.base import GatedDeltaStep
from app.engine.device.gated_delta import _fixed
from app.engine.device.gated_delta import commit_and_verify as commit_and_verify_with
from app.engine.npu.gated_delta import l2norm
from tests import ROOT
from tests.devices.npu.null_device import Trace, traced
from tests.fast.engine.delta_layers import BLOCK, CLOSE, SHAPES, SMALL, Layer, assert_slots

NPU = torch.device("npu:0")
pytestmark = pytest.mark.usefixtures("numerics")


def commit_and_verify(step: GatedDeltaStep) -> Tensor:
    return commit_and_verify_with(step, l2norm)


def npu_layer(shape: GatedDeltaConfig = SMALL, **sizes: Any) -> Layer:
    return Layer(shape, commit_and_verify, device=NPU, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_and_slots_are_the_references(shape: GatedDeltaConfig, dtype: torch.dtype) -> None:
    """Several sequences: every accepted count, counts of rows from 1 to a whole block, and a new one in an old slot."""
    layer = npu_layer(shape, dtype=dtype)
    slots, counts = [3, 1, 5, 2, 6, 4], [BLOCK, 1, 2, BLOCK, 3, 4]
    layer.memory.num_tokens.fill_(40)
    starts = [40, 41, 0, 43, 44, 40 + BLOCK]
    inputs = layer.rows(sum(counts))
    wanted, slots_wanted = layer.wanted(inputs, slots, starts, counts)
    torch.testing.assert_close(layer.found(inputs, slots, starts, counts), wanted, **CLOSE)
    assert_slots(kept_rows(layer.state, slots, counts), kept_rows(slots_wanted, slots, counts))


def kept_rows(state: dict[str, Tensor], slots: list[int], counts: list[int]) -> dict[str, Tensor]:
    """The slots without pending rows that no step reads, because they lie behind the sequence's own."""
    for slot, count in zip(slots, counts, strict=True):
        state["pending"][slot, count:] = 0
    return state


def test_a_state_that_moves_leaves_the_slot_that_it_was_read_from() -> None:
    """Two sequences read one checkpoint at different pages, beside one that stays in its slot."""
    layer = npu_layer()
    layer.memory.num_tokens.fill_(40)
    slots, next_slots, starts, counts = [3, 2, 3], [5, 2, 1], [42, 41, 44], [BLOCK, 2, 1]
    inputs, before = layer.rows(sum(counts)), layer.state
    wanted, slots_wanted = layer.wanted(inputs, slots, starts, counts, next_slots)
    torch.testing.assert_close(layer.found(inputs, slots, starts, counts, next_slots), wanted, **CLOSE)
    assert_slots(kept_rows(layer.state, next_slots, counts), kept_rows(slots_wanted, next_slots, counts))
    for name, tensor in layer.state.items():
        assert torch.equal(tensor[3], before[name][3]), name
        assert not torch.equal(tensor[5], before[name][5]), name


@pytest.mark.parametrize("accepted", range(1, BLOCK + 1))
def test_every_accepted_count_is_committed_once_over_many_steps(accepted: int) -> None:
    """In each step a block is verified, of which the same number of rows is accepted. Then the step is repeated."""
    layer, start = npu_layer(), 0
    for _ in range(4):
        inputs = layer.rows(BLOCK)
        wanted, slots = layer.wanted(inputs, [2], [start], [BLOCK])
        for _ in range(2):
            torch.testing.assert_close(layer.found(inputs, [2], [start], [BLOCK]), wanted, **CLOSE)
            assert_slots(layer.state, slots)
        start += accepted


@pytest.mark.parametrize("nearly", [0.0, 1e-3])
def test_repeated_tokens_keep_their_digits(nearly: float) -> None:
    """Keys are equal or nearly so, nothing decays and beta is almost 1."""
    layer, start = npu_layer(block=16), 0
    layer.weights["a_log"].fill_(-12.0)
    for _ in range(3):
        rows = layer.rows(1) + nearly * layer.rows(16)
        rows[:, SMALL.channels : SMALL.channels + SMALL.num_v_heads] = 6.0
        wanted, slots = layer.wanted(rows, [4], [start], [16])
        torch.testing.assert_close(layer.found(rows, [4], [start], [16]), wanted, **CLOSE)
        assert_slots(layer.state, slots)
        start += 16


def test_nan_of_rows_that_were_not_accepted_of_a_last_owner_and_of_scratch_leaves_no_trace() -> None:
    layer = npu_layer()
    for tensor in (layer.memory.matrix, layer.memory.conv, layer.memory.pending):
        tensor.fill_(torch.nan)
    layer.memory.num_tokens.fill_(7)
    layer.found(layer.rows(BLOCK + 2), [1, 0], [0, 3], [BLOCK, 2])
    layer.memory.pending[1, 2:] = torch.nan
    rows = layer.rows(3)
    wanted, _ = layer.wanted(rows, [1], [2], [3])
    torch.testing.assert_close(layer.found(rows, [1], [2], [3]), wanted, **CLOSE)
    state = layer.state
    assert state["matrix"][:2].isfinite().all() and state["conv"][:2].isfinite().all()
    assert state["matrix"][2].isnan().all(), "no other slot is touched"


def test_nan_in_one_sequence_reaches_no_other() -> None:
    layer = npu_layer()
    inputs = layer.rows(4)
    wanted = layer.wanted(inputs, [1, 2], [0, 0], [1, 3])[0]
    inputs[1] = torch.nan
    found = layer.found(inputs, [1, 2], [0, 0], [1, 3])
    torch.testing.assert_close(found[:1], wanted[:1], **CLOSE)
    assert found[1:].isnan().all()
    assert layer.state["matrix"][1].isfinite().all()


def test_a_layer_launches_operators_of_static_shapes_and_the_host_waits_for_none() -> None:
    launches = {}
    for rows in (1, 16):
        layer, traces = npu_layer(block=16), list[Trace]()

        def run(step: GatedDeltaStep, traces: list[Trace] = traces) -> Tensor:
            with traced() as trace:
                o = commit_and_verify(step)
            traces.append(trace)
            return o

        layer.run = run
        for start in (0, 1):
            layer.found(layer.rows(2 * rows), [1, 2], [start, start], [rows, rows])
        _, trace = traces  # the first call makes what depends on shapes alone
        assert trace.waits == [] and trace.of("copy") == []
        launches[rows] = trace.launches
    narrow, wide = (counted.total() for counted in launches.values())
    print(f"launches to commit and verify: {narrow} for 1 row, {wide} for 16")
    assert narrow <= wide
    assert f" take {wide} launches " in (ROOT / "docs" / "ascend.md").read_text(), launches[16]


def test_masks_of_rows_are_kept_once_for_all_numbers_of_sequences() -> None:
    """Steps beside prefill have any number of sequences, and masks of 32 rows take 139 kB of the device."""
    layer, kept = npu_layer(), set()
    for slots in ([1], [1, 2], [1, 2, 3]):
        layer.found(layer.rows(len(slots)), slots, [0] * len(slots), [1] * len(slots))
        kept.add(_fixed.cache_info().currsize)
    assert len(kept) == 1


def test_products_in_float32_keep_float32() -> None:
    """The cube would else round their inputs to 11 bits, and texts would depend on the batch (N39)."""
    assert torch_npu.npu.matmul.allow_hf32 is False
