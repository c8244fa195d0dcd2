"""Weights of a model by name. `build/loader.py` reads them from files."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.engine.backend.base import Backend
from app.engine.models.config import DecoderConfig


class Weights(Protocol):
    """Source of a model's tensors. Names are without the prefixes of `config.checkpoint.plain_name`."""

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

    def get_float32(self, name: str, *shape: int) -> Tensor:
        """Return a tensor on the device in float32, whatever the engine's dtype. Raises UnsupportedError like `get`."""
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


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Layout of a checkpoint's experts, which loading turns into ours.

    `router` is the name of the router's tensors. In fused tensors rows of gate and up alternate if `interleaved`, and
    with `input_first` those tensors are [E, in, out].
    """

    router: str = "gate"
    interleaved: bool = False
    input_first: bool = False


@dataclass(frozen=True, slots=True)
class LayerSource:
    """All that a decoder layer is made from: its number, the model's sizes, the checkpoint and the backend."""

    index: int
    config: DecoderConfig
    weights: Weights
    backend: Backend
    experts: ExpertLayout = ExpertLayout()

    def name(self, suffix: str) -> str:
        """Return the name of one of the layer's tensors in the checkpoint."""
        return f"layers.{self.index}.{suffix}"

    def get(self, suffix: str, *shape: int) -> Tensor:
        """Return one of the layer's tensors, as `Weights.get`."""
        return self.weights.get(self.name(suffix), *shape)
