"""A quantised weight, in the one form that all formats are converted to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Numbers [.., out, in] of the `dtype`: `data` int8 or float8_e4m3fn, by `scales` [.., out, in / g] fp32."""

    data: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def int8(cls, weight: Tensor) -> "QuantisedWeight":
        """Return a weight [.., out, in] in int8 with a scale a row, to nearest."""
        scales = weight.float().abs().amax(-1, keepdim=True).clamp_(min=1e-20) / 127
        return cls((weight / scales).round_().to(torch.int8), scales, weight.dtype)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    @property
    def group(self) -> int:
        """Return g, the numbers of a row that share a scale."""
        return self.data.shape[-1] // self.scales.shape[-1]

    def dequantised(self) -> Tensor:
        """Return the weight [.., out, in], rounded once: `data` is exact in `dtype`, and the product is of fp32."""
        return self.data.to(self.dtype).unflatten(-1, (-1, self.group)).mul_(self.scales[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations [T, in] that were quantised for products: `data` in 8 bits, by `scales` in the layout of the backend.

    `plain` are the same rows in the engine's dtype, if one of their readers multiplies by plain numbers.
    """

    data: Tensor
    scales: Tensor
    plain: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


Rows = Tensor | QuantisedRows  # [T, in] of a product
Weight = Tensor | QuantisedWeight  # [out, in] of a product, or [E, out, in] of experts


def plain(rows: Rows) -> Tensor:
    """Return rows [T, in] in the engine's dtype, which a norm keeps for readers of plain numbers."""
    if isinstance(rows, Tensor):
        return rows
    assert rows.plain is not None, "a reader of plain rows is among those that the norm was told of"
    return rows.plain


def by_rows(weight: Weight, change: Callable[[Tensor], Tensor]) -> Weight:
    """Return a weight whose rows were chosen or ordered by `change`."""
    if isinstance(weight, Tensor):
        return change(weight)
    bits = change(weight.data.view(torch.int8)).view(weight.data.dtype)  # PyTorch moves few things in float8
    return QuantisedWeight(bits, change(weight.scales), weight.dtype)


def joined(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Return the rows of all parts, which have the same columns and dtypes."""
    group = gcd(*(part.group for part in parts))
    scales = torch.cat([part.scales.repeat_interleave(part.group // group, 1) for part in parts])
    bits = torch.cat([part.data.view(torch.int8) for part in parts])
    return QuantisedWeight(bits.view(parts[0].data.dtype), scales, parts[0].dtype)
