"""Weights from safetensors files, by name and expected shape."""

import math
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from app.engine.checkpoint.families import FAMILIES
from app.engine.checkpoint.files import find_tensor, read_tensors
from app.engine.errors import UnsupportedError
from app.engine.models.target import Target
from app.engine.models.weights import Part, Weights

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""
_FRACTIONS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_KINDS = {
    torch.int64: ((torch.int32, torch.int64, torch.bool), ", not whole numbers"),
    torch.uint8: ((torch.uint8,), ", not bytes"),
}
"""Dtypes that a tensor asked for in a dtype may be stored in, and what is wrong with others. The rest are fractions."""

OpenWeights = Callable[[Path, torch.device, torch.dtype, Progress], Weights]
"""Opens the weights of a checkpoint's folder, for a device and a dtype."""


def target_class(model_type: str) -> type[Target]:
    """Return the class of a supported family."""
    module, name = FAMILIES[model_type].location.rsplit(".", 1)
    target: type[Target] = getattr(import_module(f"app.engine.models.{module}"), name)
    return target


class SafetensorsWeights:
    """The safetensors of one folder, single or sharded, read straight to the device when asked for. Raises
    UnsupportedError if they are not whole."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, on_progress: Progress = lambda *_: None
    ) -> None:
        self._folder, self._device, self._dtype = folder, device, dtype
        self._on_progress = on_progress
        self._files = read_tensors(folder)
        paths = {tensor.file for tensor in self._files.values()}
        self._open = {path: safe_open(path, framework="pt", device=str(device)) for path in paths}
        self._total = sum(path.stat().st_size for path in paths)
        self._read = 0
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors in the engine's dtype. A byte of mxfp4 has two numbers."""
        numbers = {name: math.prod(tensor.shape) for name, tensor in self._files.items()}
        return sum(n * (2 if name.endswith("_blocks") else 1) for name, n in numbers.items()) * self._dtype.itemsize

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        path, stored_name, _ = find_tensor(self._files, self._folder, name, shape)
        if part is None:
            tensor: Tensor = self._open[path].get_tensor(stored_name)
            self._read += tensor.nbytes
        else:
            stored, before = self._open[path].get_slice(stored_name), (slice(None),) * part.axis
            read = [stored[(*before, slice(own.start, own.stop))] for own in part.ranges]
            tensor = read[0].contiguous() if len(read) == 1 else torch.cat(read, dim=part.axis)
            self._read += tensor.nbytes // tensor.shape[part.axis] * shape[part.axis]
        self._used.add(name)
        self._on_progress(self._read, self._total)
        dtype = dtype or self._dtype
        kinds, otherwise = _KINDS.get(dtype, (_FRACTIONS, ": quantised weights are not supported yet"))
        if tensor.dtype not in kinds:
            raise UnsupportedError(f"{path}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}{otherwise}")
        return tensor.to(self._device, dtype)

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    def skip(self, name: str) -> None:
        self._used.add(name)

    def close(self) -> None:
        """Let go of the files. Raises UnsupportedError if they hold a tensor that no model asked for."""
        self._open.clear()
        self._on_progress(self._total, self._total)
        if unused := sorted(set(self._files) - self._used):
            raise UnsupportedError(
                f"{self._folder}: {len(unused)} tensors do not belong to this architecture, such as {unused[0]}; "
                "leaving them out would be wrong"
            )
