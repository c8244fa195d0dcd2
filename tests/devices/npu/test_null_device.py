"""The null device through torch_npu's own host code, without numerics. Checked with torch_npu 2.13.0."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from tests.devices.npu.null_device import traced

Run = Callable[..., str]
ATTENTION = """
q = torch.zeros(2, 4, 128, dtype=torch.bfloat16, device="npu")
kv = torch.zeros(2, 128, 256, dtype=torch.bfloat16, device="npu")
table = torch.zeros(1, 1, dtype=torch.int32, device="npu")
torch_npu.npu_fused_infer_attention_score(
    q, kv, kv, actual_seq_lengths=[2], actual_seq_lengths_kv=[5], block_table=table, num_heads=4,
    num_key_value_heads=2, input_layout="TND", block_size=128, scale=0.1)
torch.npu.synchronize()
"""


def test_the_device_is_a_910b3_with_60_of_64_gib() -> None:
    assert torch.npu.device_count() == 1 and torch.npu.get_device_name(0) == "Ascend910B3"
    free, total = torch.npu.mem_get_info()
    assert total == 64 << 30 and total * 0.9 < free <= total * 15 / 16
    properties = torch.npu.get_device_properties(0)
    assert (properties.cube_core_num, properties.vector_core_num, properties.total_memory) == (20, 40, 64 << 30)


def test_kernels_compute_nothing() -> None:
    out = torch.zeros(2).to("npu")
    torch.add(torch.ones(2).to("npu"), 1, out=out)
    assert out.tolist() == [0, 0]


def test_memory_that_nothing_wrote_is_nan_and_what_was_freed_is_again() -> None:
    x = torch.empty(12 << 20, device="npu")  # More than the allocator keeps at hand.
    assert x.cpu().isnan().all()
    address = x.copy_(torch.ones(12 << 20)).data_ptr()
    assert ctypes.string_at(address, 4) != b"\xff" * 4
    del x
    torch.npu.empty_cache()
    assert ctypes.string_at(address, 4) == b"\xff" * 4


def test_a_copy_to_pinned_memory_arrives_when_its_event_is_waited_for() -> None:
    x = torch.arange(4).to("npu")
    host = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    assert host.is_pinned()
    host.copy_(x, non_blocking=True)
    copied = torch.npu.Event()
    copied.record()
    assert host.tolist() == [-1] * 4
    copied.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_an_event_of_another_stream_does_not_wait_for_a_copy() -> None:
    x, host = torch.arange(4).to("npu"), torch.zeros(4, dtype=torch.int64, pin_memory=True)
    side, event = torch.npu.Stream(), torch.npu.Event()
    host.copy_(x, non_blocking=True)
    event.record(side)
    event.synchronize()
    assert host.tolist() == [-1] * 4
    side.wait_stream(torch.npu.current_stream())
    event.record(side)
    event.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_pinned_memory_may_not_change_before_its_copy_was_waited_for() -> None:
    x, host, copied = torch.empty(4, device="npu"), torch.ones(4, pin_memory=True), torch.npu.Event()
    x.copy_(host, non_blocking=True)
    copied.record()
    host[0] = 2
    with pytest.raises(RuntimeError, match="pinned memory changed"):
        copied.synchronize()
    x.copy_(host, non_blocking=True)
    copied.record()
    copied.synchronize()
    host[0] = 3
    assert x.tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("non_blocking", [True, False], ids=["non_blocking", "blocking"])
def test_an_upload_waits_unless_it_is_pinned_and_non_blocking(pinned: bool, non_blocking: bool) -> None:
    """N24: otherwise torch_npu waits for all that the stream has to do."""
    x, host = torch.empty(4, device="npu"), torch.ones(4, pin_memory=pinned)
    with traced() as trace:
        x.copy_(host, non_blocking=non_blocking)
    assert ("aclrtSynchronizeStream" in trace.waits) != (pinned and non_blocking)


def test_a_shift_by_a_python_number_uploads_the_number() -> None:
    """N25."""
    x = torch.arange(4, dtype=torch.int32).to("npu")
    with traced() as trace:
        x >> 3
    assert trace.lines == [("copy", "h2d 4"), ("launch", "aclnnRightShift")]


def test_every_launch_and_every_wait_is_traced() -> None:
    x, w = torch.ones(2, 4).to("npu"), torch.ones(3, 4).to("npu")
    with traced() as trace:
        torch.nn.functional.linear(x, w).argmax(-1).tolist()
    assert trace.launches == {"aclnnMatmul": 1, "aclnnArgMax": 1}
    assert trace.waits == ["aclrtSynchronizeStream", "d2h 16"]


@pytest.mark.parametrize(("cann", "entry"), [("9.1.0", "V3"), ("none", "V2")])
def test_the_cann_version_decides_which_attention_is_launched(run_python, tmp_path, cann, entry):
    run_python(ATTENTION, NPU_STUB_TRACE=str(tmp_path / "trace"), NPU_STUB_CANN=cann)
    launched = [line for line in (tmp_path / "trace").read_text().splitlines() if "Attention" in line]
    assert launched == [f"launch aclnnFusedInferAttentionScore{entry}"]


def test_an_operator_that_would_fall_back_to_the_cpu_raises() -> None:
    with pytest.raises(RuntimeError, match="would execute its main computation on CPU"):
        torch.linalg.eigvals(torch.ones(3, 3, device="npu"))
