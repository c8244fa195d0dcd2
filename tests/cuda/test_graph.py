"""What capture asks of torch.cuda, by a stand-in: there is no GPU here."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine import backend as factory
from app.engine.backend import make_backend
from app.engine.cuda.backend import CudaBackend
from app.engine.graph import RerunGraph
from app.engine.torch_backend import TorchBackend

CPU = torch.device("cpu")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that happens, in order."""
    said: list[Any] = []

    class Recorded:
        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def graph(graph: Recorded, pool: object, capture_error_mode: str) -> Iterator[None]:
        said.append(("begin", pool))
        yield
        said.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return said


def run(said: list[Any], name: str) -> tuple[torch.Tensor, ...]:
    said.append(name)
    return (torch.zeros(1),)


def test_a_graph_is_run_before_it_is_captured_and_all_share_one_pool(said: list[Any]) -> None:
    backend = CudaBackend(CPU)
    backend.device = torch.device("cuda")
    graphs = [backend.capture(lambda name=name: run(said, name), []) for name in ("a", "b")]
    captured = ["a", ("begin", "pool"), "a", "end", "replay", "b", ("begin", "pool"), "b", "end", "replay"]
    assert said == captured
    graphs[0].replay()
    assert said == [*captured, "replay"] and len(graphs[0].outputs) == 1


def test_on_a_cpu_the_stretch_is_run_again(said: list[Any]) -> None:
    graph = CudaBackend(CPU).capture(lambda: run(said, "a"), [])
    assert isinstance(graph, RerunGraph) and said == ["a"] and CudaBackend.captures


@pytest.mark.parametrize("triton", [True, False])
def test_cuda_is_our_kernels_where_triton_is_installed_and_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, triton: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    find = factory.importlib.util.find_spec
    monkeypatch.setattr(
        factory.importlib.util, "find_spec", lambda name: find(name) if triton or name != "triton" else None
    )
    with caplog.at_level("INFO"):
        made = make_backend("cuda:0")
    assert type(made) is (CudaBackend if triton else TorchBackend)
    assert made.captures is triton and made.defaults.dtype == torch.bfloat16 and made.defaults.page_size == 16
    assert ("kernels in Triton" in caplog.text) == triton and ("not installed" in caplog.text) == (not triton)
