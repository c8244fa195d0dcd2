"""Graphs: device work that is recorded once and launched again as a whole."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor


class Graph(ABC):
    """Captured device work. `outputs` keep their memory, and hold the values of the last replay."""

    outputs: tuple[Tensor, ...]

    @abstractmethod
    def replay(self) -> None:
        """Launch the work with the current values of its input tensors and the current plans of its metas."""


class RerunGraph(Graph):
    """Graph on a device without captures. It runs the code again and copies the results to the first outputs.

    The code reads the tensors and metas of the capture, and only their values and plans are new. So a test on a CPU
    finds a length that a graph would bake in.
    """

    def __init__(self, run: Callable[[], tuple[Tensor, ...]]) -> None:
        self._run = run
        self.outputs = run()

    def replay(self) -> None:
        for place, result in zip(self.outputs, self._run(), strict=True):
            place.copy_(result)
