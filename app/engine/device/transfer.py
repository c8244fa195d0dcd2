"""Copies of several arrays to the device at once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.device.base import Backend

_DTYPES = {"f": torch.float32, "i": torch.int32, "l": torch.int64}
_ALIGNMENT = 8
"""Numbers of 32 bits in 32 bytes, the unit in which an NPU's cores move data."""


class Packed:
    """Named arrays of float32, int32 and int64 that are copied to the device at once. `tensors` have the shapes and
    dtypes of the arrays, and keep their memory from one `send` to the next."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], backend: Backend) -> None:
        self._backend = backend
        self._slices: dict[str, tuple[slice, tuple[int, ...]]] = {}
        size = 0
        for name, array in arrays.items():
            self._slices[name] = slice(size, size + array.nbytes // 4), array.shape
            size += -(-array.nbytes // (4 * _ALIGNMENT)) * _ALIGNMENT
        self._memory = torch.empty(size, dtype=torch.int32, device=backend.device)
        self.tensors = {}
        for name, (part, shape) in self._slices.items():
            self.tensors[name] = self._memory[part].view(_DTYPES[arrays[name].dtype.char]).view(shape)
        self.send(arrays)

    def send(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Queue a copy of arrays, which may be smaller: a table is padded with zeros, others with their last value."""
        packed = np.zeros(len(self._memory), dtype=np.int32)
        for name, (part, shape) in self._slices.items():
            array = arrays[name].view(np.int32)
            if len(shape) == 2:
                packed[part].reshape(shape)[:, : array.shape[1]] = array
            else:
                packed[part][: len(array)] = array
                packed[part][len(array) :] = array[-1:]
        self._backend.upload(torch.from_numpy(packed), self._memory)
