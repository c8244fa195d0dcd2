"""Plain PyTorch on "npu:0" gives the CPU's numbers, bit for bit. Checked with torch_npu 2.13.0."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics, NumericsError

pytestmark = pytest.mark.usefixtures("numerics")

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


ROWS = torch.tensor([4, 0, 2])


def put(x: Tensor, places: Tensor) -> Tensor:
    x = x.clone()
    x[places] = 7.0
    x[:, 2:4] = -1.0
    return x


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "matmul of a transposed view": lambda x, rows: x.t() @ x,
    "advanced index": lambda x, rows: x[rows, 1:3],
    "index_put": lambda x, rows: put(x, rows),
    "boolean index_put": lambda x, rows: put(x, x[:, 0] > 0),
    "nonzero": lambda x, rows: (x > 0).nonzero(),
    "cat and chunk": lambda x, rows: torch.cat(x.chunk(2, -1)[::-1], -1),
    "repeat_interleave by values": lambda x, rows: x[:3].repeat_interleave(rows, 0),
    "reshape that copies": lambda x, rows: x.t().reshape(-1),
    "in place on a view": lambda x, rows: x.clone()[:, 1:3].mul_(2.0),
    "a shape of nothing": lambda x, rows: x[:0] + 1,
    "strided read": lambda x, rows: x.t()[1:],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_equals_the_cpus(name: str) -> None:
    found, expected = (OPERATORS[name](x, rows) for x, rows in ((X.to("npu:0"), ROWS.to("npu:0")), (X, ROWS)))
    assert found.device.type == "npu" and found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected)


def test_work_on_a_side_stream_counts() -> None:
    x, stream = X.to("npu:0"), torch.npu.Stream()
    with torch.npu.stream(stream):
        y = x * 2
    torch.npu.current_stream().wait_stream(stream)
    assert torch.equal((y + x).cpu(), X * 2 + X)


def test_a_strided_read_into_pinned_memory_is_right() -> None:
    host = torch.zeros(8, 6, pin_memory=True)
    host.copy_(X.to("npu:0").t(), non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(host, X.t())


def test_the_one_read_of_a_step_overlaps_until_its_event_is_waited_for() -> None:
    ids = X.to("npu:0").argmax(-1)
    host = torch.zeros(6, dtype=torch.int64, pin_memory=True)
    copied = torch.npu.Event()
    with traced() as trace:
        host.copy_(ids, non_blocking=True)
        copied.record()
    assert trace.waits == [] and host.tolist() == [-1] * 6
    copied.synchronize()
    assert torch.equal(host, X.argmax(-1))


def test_a_size_that_depends_on_values_is_a_wait() -> None:
    x = X.to("npu:0")
    with traced() as trace:
        x[x > 0]
    assert trace.waits == ["aten.index.Tensor"]


def test_memory_that_nothing_wrote_is_nan() -> None:
    for make in (torch.empty, lambda *shape, **more: torch.ones(3, device="npu:0").new_empty(*shape)):
        assert make(4, device="npu:0").cpu().isnan().all()
    assert torch.empty(4, dtype=torch.int32, device="npu:0").tolist() == [-1] * 4


def test_a_queue_in_another_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    with pytest.raises(NumericsError, match="TASK_QUEUE_ENABLE=0"):
        Numerics().__enter__()
