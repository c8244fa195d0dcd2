"""Weights of a model by name. `load/loader.py` reads them from files."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Backend
from app.engine.quantised import PackedFp4, QuantisedWeight, Weight

W = TypeVar("W", Tensor, Weight)


class Part(NamedTuple):
    """Part of a tensor: `ranges` of an axis, concatenated."""

    axis: int
    ranges: tuple[range, ...]

    def of(self, whole: Tensor) -> Tensor:
        return torch.cat([whole.narrow(self.axis, rows.start, len(rows)) for rows in self.ranges], dim=self.axis)

    def scaled(self, factor: int) -> "Part":
        """Return the same part of a tensor whose axis is `factor` times as long."""
        return Part(self.axis, tuple(range(rows.start * factor, rows.stop * factor) for rows in self.ranges))


class Weights(Protocol):
    """Source of a model's tensors, by the names of `Checkpoint.tensors`.

    `X.quant_bias` is in it if a quantised linear X has a bias that is not 0, which `X.bias` then returns.
    """

    def __contains__(self, name: str) -> bool: ...

    @property
    def names(self) -> Iterable[str]: ...

    def num_bytes(self, multiplies: Callable[[QuantisedWeight | PackedFp4], bool], *, to: torch.dtype | None) -> int:
        """Return the bytes of all tensors on a device, which keeps quantised weights of products as they are if it
        `multiplies` by them. All weights of products are rounded `to` 8 bits, if not to None. Others are in the
        engine's dtype."""

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor on the device, in `dtype`, or in the engine's for None.

        `shape` is the whole tensor's. With a `part` only that is read and returned. Raises UnsupportedError
        for a tensor of another shape or kind: int64 is for whole numbers, uint8 for bytes, others for fractions.
        """

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> Weight:
        """Return what `get` does, or the same quantised if it is stored so, or if the settings ask for it."""

    def skip(self, name: str) -> None:
        """Accept a tensor that may be in the file and is not needed."""

    def close(self) -> None:
        """Close the files. Raises UnsupportedError if a tensor was not asked for."""


class RoundedWeights:
    """Weights of products that become `kind`, of 8 bits, while they are read. Others do not change."""

    def __init__(self, weights: Weights, kind: torch.dtype) -> None:
        self._weights, self._kind = weights, kind

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> Weight:
        weight = self._weights.get_linear(name, *shape, part=part)
        return QuantisedWeight.rounded(weight, self._kind) if isinstance(weight, Tensor) else weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)


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

    Ranks of `comm` split the layer, and `config` has the sizes of one rank's slice.
    """

    index: int
    config: DecoderConfig
    weights: Weights
    backend: Backend
    experts: ExpertLayout = ExpertLayout()
    comm: Comm = ALONE

    def name(self, suffix: str) -> str:
        return f"layers.{self.index}.{suffix}"

    def get(self, suffix: str, *shape: int, split: int | None = None, **blocks: tuple[int, ...]) -> Tensor:
        """Return one of the layer's tensors, as `Weights.get`, or this rank's part of it as `local_part`.

        Rows (0) are split where the output is, and columns (1) where the input is, whose products are then summed.
        """
        return local_part(self.weights.get, self.name(suffix), shape, self.comm, split, **blocks)

    def linear(self, suffix: str, *shape: int, split: int | None = None, **blocks: tuple[int, ...]) -> Weight:
        """Return the weight of one of the layer's products, like `get`, or quantised."""
        return local_part(self.weights.get_linear, self.name(suffix), shape, self.comm, split, **blocks)

    def get_summed(self, suffix: str, *shape: int) -> Tensor:
        """Return the bias of products that ranks sum: the stored one on rank 0, and zeros on others."""
        bias = self.get(suffix, *shape)
        return bias if self.comm.rank == 0 else torch.zeros_like(bias)


def local_part(
    get: Callable[..., W],
    name: str,
    shape: tuple[int, ...],
    comm: Comm,
    split: int | None,
    blocks: tuple[int, ...] = (),
    copies: tuple[int, ...] = (),
) -> W:
    """Return this rank's slice `shape` of a tensor that is split along the axis `split`, or all of it for None.

    If that axis is made of blocks, like q, k and v, each is split separately. `blocks` are their sizes in `shape`.
    `copies[i]` consecutive ranks hold the same slice of block i.
    """
    if split is None or comm.size == 1:
        return get(name, *shape)
    blocks, ranges, whole = blocks or (shape[split],), [], 0
    for size, equal in zip(blocks, copies or (1,) * len(blocks), strict=True):
        start = whole + comm.rank // equal * size
        ranges.append(range(start, start + size))
        whole += comm.size // equal * size
    return get(name, *shape[:split], whole, *shape[split + 1 :], part=Part(split, tuple(ranges)))


def shard(config: DecoderConfig, size: int) -> DecoderConfig:
    """Return the sizes of each of `size` ranks, among which heads and MLPs are split evenly.

    With more ranks than KV heads, or than key heads in recurrent layers, several ranks have a copy of one head.
    """

    def divided(part: Any, *names: str, **copied: str) -> Any:
        sizes = {name: getattr(part, name) // size for name in names}
        for copies, heads in copied.items():
            whole = getattr(part, heads)
            sizes |= {heads: max(1, whole // size), copies: max(1, size // whole)}
        return replace(part, **sizes)

    moe = config.moe and divided(config.moe, "intermediate_size", "shared_size")
    delta = config.gated_delta and divided(config.gated_delta, "num_v_heads", k_copies="num_k_heads")
    local: DecoderConfig = divided(config, "num_heads", "intermediate_size", kv_copies="num_kv_heads")
    return replace(local, moe=moe, gated_delta=delta)
