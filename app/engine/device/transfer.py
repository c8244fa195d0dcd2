"""Copies of several arrays to the device at once."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from app.engine.arrays import Ints
from app.engine.device.base import Backend

_ALIGNMENT = 8
"""Numbers of int32 in 32 bytes, the unit in which an NPU's cores move data."""


class Packed:
    """Int32 arrays on the device that arrive in one copy. `tensors` keep their memory from one `send` to the next."""

    def __init__(self, arrays: Sequence[Ints], backend: Backend) -> None:
        lengths = [len(array) for array in arrays]
        padding = [-length % _ALIGNMENT for length in lengths]
        sizes = [size for pair in zip(lengths, padding, strict=True) for size in pair]
        self._starts = list(accumulate(sizes, initial=0))[:-1:2]
        self._memory = torch.empty(sum(sizes), dtype=torch.int32, device=backend.device)
        self._backend = backend
        self.tensors = list(self._memory.split(sizes)[::2])
        self.send(arrays)

    def send(self, arrays: Sequence[Ints]) -> None:
        """Queue a copy of arrays of the same sizes."""
        packed = np.zeros(len(self._memory), dtype=np.int32)
        for start, array in zip(self._starts, arrays, strict=True):
            packed[start : start + len(array)] = array
        self._backend.upload(torch.from_numpy(packed), self._memory)
