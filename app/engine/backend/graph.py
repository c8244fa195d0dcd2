"""Graphs: a stretch of device work recorded once and launched again as a whole."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor


class Graph(ABC):
    """A captured stretch. `outputs` keep their place, and have the numbers of the last replay."""

    outputs: tuple[Tensor, ...]

    @abstractmethod
    def replay(self) -> None:
        """Launch it with what its input tensors hold now, and attention with the plans that its metas have now."""


class RerunGraph(Graph):
    """Where a device captures nothing: the stretch is run again, and its results are put where the first ones were.

    It reads the same input tensors and metas as at capture, and only their contents and plans are new, so that a length
    that was baked into one of them shows on any laptop.
    """

    def __init__(self, run: Callable[[], tuple[Tensor, ...]]) -> None:
        self._run = run
        self.outputs = run()

    def replay(self) -> None:
        for place, result in zip(self.outputs, self._run(), strict=True):
            place.copy_(result)
