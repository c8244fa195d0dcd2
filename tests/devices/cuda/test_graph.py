"""Captures ask torch.cuda for the right things. A stand-in takes its place, because there is no GPU here."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.cuda._utils import _get_device_index as index_of

from app.engine.cuda.backend import CudaBackend
from app.engine.device.factory import make_backend
from app.engine.device.torch import RerunGraph
from app.engine.errors import UnsupportedError
from tools.report import timing

CPU = torch.device("cpu")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that happens, in order. A pool whose last graph is gone takes no more."""
    said: list[Any] = []
    captured: dict[str, WeakSet[Any]] = {}

    class Recorded:
        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def graph(graph: Recorded, pool: str | None, stream: str, capture_error_mode: str) -> Iterator[None]:
        if pool is not None:
            assert captured.get(pool, True), "TORCH_INTERNAL_ASSERT(use_count > 0)"
            captured.setdefault(pool, WeakSet()).add(graph)
        said.append(("begin", pool, stream))
        yield
        said.append("end")

    numbers = {-1: count(1), 0: count(1)}
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority=0: f"stream {next(numbers[priority])} of priority {priority}"
    )
    monkeypatch.setattr(torch.cuda, "set_device", index_of)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    )
    return said


@pytest.fixture
def backend(said: list[Any]) -> CudaBackend:
    return CudaBackend(torch.device("cuda:0"))


def run(said: list[Any], name: str) -> tuple[torch.Tensor, ...]:
    said.append(name)
    return (torch.zeros(1),)


def test_a_graph_is_run_before_it_is_captured_and_all_share_one_pool(said: list[Any], backend: CudaBackend) -> None:
    graphs = [backend.capture(lambda name=name: run(said, name), []) for name in ("a", "b")]
    begin = ("begin", "pool", "stream 1 of priority -1")
    captured = ["a", begin, "a", "end", "b", begin, "b", "end"]
    assert said == captured
    graphs[0].replay()
    assert said == [*captured, "replay"] and len(graphs[0].outputs) == 1


def test_every_backend_captures_on_a_stream_of_its_own(said: list[Any], backend: CudaBackend) -> None:
    """At the end of a graph PyTorch gives back what cuBLAS keeps for its stream, and others may still work there."""
    graphs = [some.capture(lambda: run(said, "a"), []) for some in (backend, CudaBackend(backend.device), backend)]
    streams = [event[2] for event in said if event[0] == "begin"]
    assert [stream[:8] for stream in streams] == ["stream 1", "stream 2", "stream 1"] and len(graphs) == 3


def test_every_timing_has_a_pool_of_its_own_for_its_graph_ends_with_it(
    said: list[Any], backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_each(backend: CudaBackend, replay: Callable[[], None], calls: int, repeats: int) -> float:
        replay()
        return 0.04

    monkeypatch.setattr(timing, "seconds_each", seconds_each)
    for _ in range(2):
        assert timing.seconds_in_a_graph(backend, lambda: run(said, "a")) == pytest.approx(0.04 / timing.CALLS)
    assert said.count("replay") == 2
    assert [event[1:] for event in said if event[0] == "begin"] == [
        (None, f"stream {number} of priority 0") for number in (1, 2)
    ], "the end of one frees the workspace that cuBLAS has for its stream, and streams are handed out again"


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (torch.AcceleratorError("CUDA error: misaligned address", 716), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("CUBLAS_STATUS"), False),
    ],
)
def test_a_fault_of_the_device_ends_the_engine_whoever_reports_it(error: Exception, fatal: bool) -> None:
    """No step can run after it, so running halves of the batch would blame a sequence for it."""
    assert CudaBackend(CPU).is_fatal(error) is fatal


def test_on_a_cpu_the_stretch_is_run_again(said: list[Any]) -> None:
    graph = CudaBackend(CPU).capture(lambda: run(said, "a"), [])
    assert isinstance(graph, RerunGraph) and said == ["a"] and CudaBackend.captures


def test_cuda_needs_triton(said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    made = make_backend("cuda:0")
    assert type(made) is CudaBackend and made.defaults.dtype == torch.bfloat16 and made.defaults.page_size == 16
    monkeypatch.setitem(sys.modules, "app.engine.cuda.backend", None)  # as an import of Triton that fails
    with pytest.raises(UnsupportedError, match=r"--device cuda:0: Triton cannot be loaded: .*pip install triton"):
        make_backend("cuda:0")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "auto"])
def test_the_device_that_a_backend_gets_has_an_index(said, monkeypatch, name):
    """`torch.cuda.set_device` refuses a device without one; its own check of that needs no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_backend(name).device == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="specified index"):
        index_of(torch.device("cuda"))
