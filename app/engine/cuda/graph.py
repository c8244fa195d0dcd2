"""Work on a GPU, recorded once as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.engine.device.base import Graph


class CudaGraph(Graph):
    """Capture of `run` on `stream`, in the memory of `pool`; None makes a new pool.

    `run` must have run before, because a capture cannot compile a kernel or open a library's handle. Graphs that share
    a pool overwrite one another's memory, `outputs` too. So every read of `outputs` is queued before another replay. A
    pool ends with its last graph, because cuBLAS keeps memory there and no later capture can use the pool.
    """

    def __init__(self, run: Callable[[], tuple[Tensor, ...]], pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device during the capture.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.outputs = run()

    def replay(self) -> None:
        """Lengths and tables are read by the kernels themselves, so there is nothing to give anew."""
        self._graph.replay()
