"""A stretch of work on a GPU, recorded once as a CUDA graph.

Not run on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.engine.backend.graph import Graph


class CudaGraph(Graph):
    """`run` captured on `stream`, to work in the memory of `pool`, None for a pool of its own. It must have been run
    before, for nothing lazy can be captured: a kernel that is compiled, or a library's handle.

    Graphs that share a pool overwrite one another's memory, `outputs` included: what reads those is queued before
    another replay. A pool ends with its last graph: what cuBLAS keeps there lets nobody capture into it again.
    """

    def __init__(self, run: Callable[[], tuple[Tensor, ...]], pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.outputs = run()

    def replay(self) -> None:
        """Lengths and tables are read by the kernels themselves, so there is nothing to give anew."""
        self._graph.replay()
