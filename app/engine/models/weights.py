"""Weights of a model by name. `build/loader.py` reads them from files."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.engine.backend.base import Backend
from app.engine.comm.comm import ALONE, Comm
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

    def get_part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> Tensor:
        """Return a part of a tensor's axis as `get` returns the whole, which is `shape`. No more of it is read."""
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
    """All that a decoder layer is made from: its number, the model's sizes, the checkpoint and the backend.

    Ranks of `comm` share the layer. The sizes in `config` are then those of one rank's part.
    """

    index: int
    config: DecoderConfig
    weights: Weights
    backend: Backend
    experts: ExpertLayout = ExpertLayout()
    comm: Comm = ALONE

    def name(self, suffix: str) -> str:
        """Return the name of one of the layer's tensors in the checkpoint."""
        return f"layers.{self.index}.{suffix}"

    def get(self, suffix: str, *shape: int, split: int | None = None) -> Tensor:
        """Return one of the layer's tensors, as `Weights.get`. Ranks share it along the axis `split`, if that is given.

        Rows (0) are split where the output is, and columns (1) where the input is, whose products are then summed.
        """
        return own_part(self.weights, self.name(suffix), shape, self.comm, split)


def own_part(weights: Weights, name: str, shape: tuple[int, ...], comm: Comm, split: int | None) -> Tensor:
    """Return this rank's part `shape` of a tensor that ranks share along the axis `split`, or all of it for None."""
    if split is None or comm.size == 1:
        return weights.get(name, *shape)
    whole = shape[split] * comm.size
    return weights.get_part(name, (*shape[:split], whole, *shape[split + 1 :]), split, comm.part(whole))
