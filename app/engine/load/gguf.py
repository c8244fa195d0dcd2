"""Tensors of a GGUF file, dequantised while they are read."""

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from app.engine.checkpoint.gguf import GgufHeader, GgufTensor
from app.engine.errors import UnsupportedError

_ROWS = 256
"""Rows that are dequantised at once: a whole tensor in fp32 would need several times the memory that it is for."""


class GgufFile:
    """The tensors of a file as numbers of `dtype` in host memory, with those methods of safetensors' `safe_open` that
    loading calls. Raises UnsupportedError if the file has become shorter."""

    def __init__(self, header: GgufHeader, dtype: torch.dtype) -> None:
        self._header, self._dtype = header, dtype

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> "GgufSlice":
        return GgufSlice(self, self._header.tensors[name])

    def read(self, tensor: GgufTensor, rows: range, columns: slice) -> Tensor:
        """Return these rows of a tensor [rows, columns] or [columns], and these columns of them."""
        row_bytes = tensor.nbytes // (tensor.shape[0] if len(tensor.shape) > 1 else 1)
        out = torch.empty(len(rows), len(range(tensor.shape[-1])[columns]), dtype=self._dtype)
        with self._header.file.open("rb", buffering=0) as stream:
            stream.seek(tensor.offset + rows.start * row_bytes)
            for part in out.split(_ROWS):
                stored = np.empty((len(part), row_bytes), dtype=np.uint8)
                if stream.readinto(stored.data) < stored.nbytes:
                    raise UnsupportedError(f"{self._header.file} was cut off while it was read; download it again")
                wide = dequantize(stored, GGMLQuantizationType[tensor.type])
                part.copy_(torch.from_numpy(wide[:, columns]))
        return out


class GgufSlice:
    """A tensor of a file, of which an index reads a part."""

    def __init__(self, file: GgufFile, tensor: GgufTensor) -> None:
        self._file, self._tensor = file, tensor

    def __getitem__(self, parts: tuple[slice, ...]) -> Tensor:
        shape = self._tensor.shape
        *rows, columns = *parts, *[slice(None)] * (len(shape) - len(parts))
        if not rows:
            return self._file.read(self._tensor, range(1), columns)[0]
        return self._file.read(self._tensor, range(shape[0])[rows[0]], columns)
