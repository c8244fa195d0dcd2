"""Collectives between the ranks that share one model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Meeting(NamedTuple):
    """Rank `rank` of `size`. `store` is the path of a new file in a private folder where ranks find each other.

    A rank that waits for others longer than `timeout_seconds` gives up with an error. The steps of a loaded engine have
    a shorter limit, `--step-timeout`.
    """

    rank: int
    size: int
    store: Path
    timeout_seconds: int


class Comm(ABC):
    """Rank `rank` of `size` ranks. All of them make the same calls in the same order, with tensors of one shape."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, *x.shape], the same bits on each.

        The next call may overwrite the result.
        """

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Return the `x` of rank 0. It may overwrite the `x` of others."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, the same bits on each. It may overwrite `x`.

        It is added in the order of ranks, so a row of the sum does not depend on other rows, unless a device's library
        says otherwise.
        """
        total, *others = self.all_gather(x)
        for other in others:
            total += other
        return total

    def reduced(self, operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `operator` followed by a sum of its results over all ranks."""
        return lambda *args: self.all_reduce(operator(*args))

    def minimum(self, value: int) -> int:
        """Return the smallest `value` of all ranks. A barrier too."""
        return int(self.all_gather(torch.tensor(value)).min())

    def part(self, whole: int) -> range:
        """Return this rank's slice of `whole` rows, which `size` divides."""
        size = whole // self.size
        return range(self.rank * size, (self.rank + 1) * size)


class Alone(Comm):
    """A single rank, which adds no operation to what it wraps."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def reduced(self, operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return operator

    def minimum(self, value: int) -> int:
        return value


ALONE = Alone()
