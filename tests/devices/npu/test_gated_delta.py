"""Decoding rows of a Gated DeltaNet layer on device "npu:0": the reference's outputs, state and slots."""

from functools import cache

import pytest
import torch
import torch_npu
from torch import Tensor

from app.engine.device.gated_delta import _fixed
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep
from app.engine.npu.backend import NpuBackend
from tests import ROOT
from tests.devices.npu.null_device import Trace, traced
from tests.devices.npu.recurrent import launches_of
from tests.fast.engine.delta_layers import BLOCK, SMALL, Layer
from tests.fast.engine.delta_suite import DeltaSuite, PromptSuite

NPU = torch.device("npu:0")
pytestmark = pytest.mark.usefixtures("numerics")


@cache
def backend() -> NpuBackend:
    return NpuBackend(NPU)


def commit_and_verify(step: GatedDeltaStep) -> Tensor:
    return backend().commit_and_verify(step)


def commit_prompts(step: GatedDeltaPrompts) -> Tensor:
    return backend().commit_prompts(step)


class TestConformance(DeltaSuite):
    run = staticmethod(commit_and_verify)
    device = NPU

    def test_nan_on_scratch_leaves_no_trace(self) -> None:
        layer = self.layer()
        for tensor in (layer.memory.matrix, layer.memory.conv, layer.memory.pending):
            tensor.fill_(torch.nan)
        layer.found(layer.rows(BLOCK + 2), [1, 0], [0, 3], [BLOCK, 2])
        assert layer.state["matrix"][:2].isfinite().all() and layer.state["conv"][:2].isfinite().all()


class TestConformanceOfPrompts(PromptSuite):
    run = staticmethod(commit_prompts)
    device = NPU


def test_a_layer_launches_operators_of_static_shapes_and_the_host_waits_for_none() -> None:
    of_step = {rows: launches_of(commit_and_verify, rows, block=16) for rows in (1, 16)}
    narrow, wide = ([trace.launches.total() for trace in traces] for traces in of_step.values())
    print(f"launches to commit and verify: {narrow} for 1 row, {wide} for 16")
    assert narrow <= wide
    wanted = f"\ntakes {wide[1]} launches in a decoding step, and the first of a forward {wide[0] - wide[1]} more"
    assert wanted in (ROOT / "docs" / "ascend.md").read_text(), of_step[16][1].launches


def test_a_new_prompt_commits_no_pending_rows_and_the_host_waits_for_none() -> None:
    layer, traces = Layer(SMALL, commit_and_verify, torch.bfloat16, device=NPU, block=16), list[Trace]()

    def run(step: GatedDeltaPrompts) -> Tensor:
        with traced() as trace:
            o = commit_prompts(step)
        traces.append(trace)
        return o

    for start in (0, 0, 40, 40):
        layer.found_of_prompts(run, layer.rows(2048), [(1, 2, 0, start)], [[2048]])
    of_chunk = traces[1::2]  # the first of each kind makes what depends on shapes alone
    assert all(trace.waits == [] and trace.of("copy") == [] for trace in of_chunk)
    new, later = (trace.launches.total() for trace in of_chunk)
    print(f"launches to commit 2,048 tokens: {new} of a new prompt, {later} of a later chunk")
    assert new < later
    wanted = f"A new prompt of 2,048 tokens takes {new} launches, and a later chunk of as many {later}"
    assert wanted in (ROOT / "docs" / "ascend.md").read_text(), of_chunk[0].launches


def test_masks_of_rows_are_kept_once_for_all_numbers_of_sequences() -> None:
    """Steps beside prefill have any number of sequences, and masks of 32 rows take 557 kB of the device."""
    layer, kept = Layer(SMALL, commit_and_verify, device=NPU), set()
    for slots in ([1], [1, 2], [1, 2, 3]):
        layer.found(layer.rows(len(slots)), slots, [0] * len(slots), [1] * len(slots))
        kept.add(_fixed.cache_info().currsize)
    assert len(kept) == 1


def test_products_in_float32_keep_float32() -> None:
    """The cube would else round their inputs to 11 bits, and texts would depend on the batch (N39)."""
    assert torch_npu.npu.matmul.allow_hf32 is False
