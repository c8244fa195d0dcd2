"""Scales and biases of quantised weights, as a checkpoint's files have them."""

from collections.abc import Callable, Collection, Sequence
from math import gcd

import torch
from torch import Tensor

from app.engine.checkpoint.files import Checkpoint
from app.engine.checkpoint.quantised import COMPANIONS, SCALES, block_size
from app.engine.errors import UnsupportedError
from app.engine.models.weights import Part


class Scales:
    """Scales of a checkpoint's weights, in a `block` of FP8 too, and the biases that msModelSlim's `quant_bias` holds.
    Static activations are read as dynamic ones: `deq_scale` is the weight's scale times that of its input, and
    `quant_bias` is the bias less what the input's offset adds, in units of `deq_scale`."""

    def __init__(
        self, checkpoint: Checkpoint, names: Collection[str], read: Callable[[str], Tensor], used: set[str]
    ) -> None:
        self._folder, self._names, self._read, self._used = checkpoint.folder, names, read, used
        self._biases = dict[str, Tensor]()
        self.block = block_size(checkpoint.config)

    def of(self, weight: str, shape: Sequence[int], part: Part | None) -> Tensor:
        """Return the scales [rows, groups] fp32 of a weight of `shape`, or of a part of it. Raises UnsupportedError."""
        stem = weight.removesuffix(".weight")
        stored = {kind: self._read(f"{stem}.{kind}") for kind in COMPANIONS if f"{stem}.{kind}" in self._names}
        self._used.update(f"{stem}.{kind}" for kind in stored)
        if not self.has_bias(f"{stem}.bias"):
            self._used.add(f"{stem}.quant_bias")
        if "weight_offset" in stored and stored["weight_offset"].any():
            raise UnsupportedError(f"{self._folder}: {stem}.weight_offset is not 0, which is not supported yet")
        kind = next(kind for kind in SCALES if kind in stored)
        scales = stored[kind]
        if kind == "deq_scale":
            scales = _deq_scale(scales) / stored["input_scale"].cpu()
        scales = scales.float().cpu()
        scales = scales.reshape(len(scales), -1) if scales.ndim else scales.reshape(1, 1)
        for axis in (0, 1):
            scales = self._along(axis, f"{stem}.{kind}", scales, shape, part)
        return scales

    def _along(self, axis: int, name: str, scales: Tensor, shape: Sequence[int], part: Part | None) -> Tensor:
        size, count, block = shape[axis], scales.shape[axis], self.block[axis]
        if count not in (1, size, -(-size // block)):
            both = f"{list(scales.shape)}, and its weight is {list(shape)} in blocks of {list(self.block)}"
            raise UnsupportedError(f"{self._folder}: {name} is {both}")
        rows = torch.arange(size)
        if part and part.axis == axis:
            rows = Part(0, part.ranges).of(rows)
        indices = rows if count == size else rows // block if count > 1 else torch.zeros_like(rows)
        if axis:  # group the most columns that have one scale everywhere
            edges = (indices.diff().nonzero() + 1).flatten().tolist()
            indices = indices[:: gcd(len(rows), *edges)]
        return scales.index_select(axis, indices)

    def has_bias(self, name: str) -> bool:
        """Return True if `name` is not stored, and `quant_bias` holds such a bias. Raises UnsupportedError if both are
        there, because nothing says whether one includes the other."""
        stem = name.removesuffix(".bias")
        if stem == name or f"{stem}.quant_bias" not in self._names:
            return False
        if name in self._names:
            raise UnsupportedError(f"{self._folder}: {name} together with {stem}.quant_bias is not supported yet")
        return bool((self._in_units(stem).abs() >= 1).any())

    def bias(self, name: str) -> Tensor | None:
        """Return the bias [out] fp64 that `quant_bias` holds, or None without one."""
        stem = name.removesuffix(".bias")
        if stem == name or f"{stem}.quant_bias" not in self._names:
            return None
        self._used.add(f"{stem}.quant_bias")
        return self._in_units(stem) * _deq_scale(self._read(f"{stem}.deq_scale")).double()

    def _in_units(self, stem: str) -> Tensor:
        if stem not in self._biases:
            sums = self._read(f"{stem}.weight").sum(dim=1, dtype=torch.int32).cpu()
            offset = self._read(f"{stem}.input_offset").cpu().double()
            self._biases[stem] = self._read(f"{stem}.quant_bias").cpu() + offset * sums
        return self._biases[stem]


def _deq_scale(stored: Tensor) -> Tensor:
    """Return `deq_scale` [out], which may be the bits of fp32 in int64."""
    stored = stored.cpu().flatten()
    return stored.to(torch.int32).view(torch.float32) if stored.dtype == torch.int64 else stored.float()
