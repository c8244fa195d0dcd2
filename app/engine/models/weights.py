"""Weights of a model by name. `build/loader.py` reads them from files."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Weights(Protocol):
    """Source of a model's tensors. Names are without the `model.` prefix that some files have."""

    def __contains__(self, name: str) -> bool: ...

    @property
    def names(self) -> Iterable[str]: ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors in the engine's dtype."""
        ...

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the device, in the engine's dtype. Raises UnsupportedError if its shape is another."""
        ...

    def get_indices(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of whole numbers on the device, int64. Raises UnsupportedError if it is none, or of another
        shape."""
        ...

    def packed(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of bytes (uint8) on the device. Raises UnsupportedError like `get`."""
        ...

    def skip(self, name: str) -> None:
        """Accept a tensor that may be in the file and is not needed."""
        ...

    def close(self) -> None:
        """Let go of the files. Raises UnsupportedError if a tensor is left over."""
        ...
