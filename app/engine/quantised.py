"""Quantised weights: all formats of 8 bits in one form, and mxfp4."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

E4M3_GROUP = 128
"""Numbers of a row that share a scale, of a weight that is rounded to e4m3."""
FP4_BLOCK = 32
"""Numbers of a block of mxfp4."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS, _E8M0_NAN = 127, 255


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Numbers [.., out, in] of the `dtype`: `data` int8 or float8_e4m3fn, by `scales` [.., out, in / g] fp32."""

    data: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def rounded(cls, weight: Tensor, kind: torch.dtype) -> "QuantisedWeight":
        """Return a weight [.., out, in] to nearest: in int8 with a scale a row, or in float8_e4m3fn with one for 128
        numbers of it, or for as many as divide it and 128."""
        most, group = 127, weight.shape[-1]
        if kind == torch.float8_e4m3fn:
            most, group = 448, gcd(group, E4M3_GROUP)
        groups = weight.unflatten(-1, (-1, group))
        scales = groups.float().abs().amax(-1).clamp_(min=1e-20) / most
        data = (groups / scales[..., None]).flatten(-2)
        return cls((data.round_() if kind == torch.int8 else data).to(kind), scales, weight.dtype)

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
class PackedFp4:
    """Experts [E, out, columns] of the `dtype` in mxfp4 (OCP Microscaling Formats 1.0): numbers of 4 bits, e2m1, in
    blocks of 32 of a row, which have a common power of two, e8m0.

    `data` [E, out, 16 B] uint8 has eight words of 16 bits for a block. Word c has the numbers c, c + 8, c + 16 and
    c + 24, the first in its lowest bits. `scales` [E, B, out] uint8. The first column is number `skipped` of its block,
    because a rank's slice may begin and end inside of one.
    """

    data: Tensor
    scales: Tensor
    dtype: torch.dtype
    skipped: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def dequantised(self) -> Tensor:
        """Return the numbers [E, out, columns]. They are exact in bfloat16, and NaN where the scale is."""
        table, scales = torch.tensor(_E2M1, device=self.data.device), self.scales.mT[..., None]
        words = torch.stack((self.data & 0xF, self.data >> 4), dim=-1).view(*scales.shape[:-1], 8, 4)
        numbers = table[words.mT.flatten(-2).int()]
        numbers = torch.ldexp(numbers, scales.int() - _E8M0_BIAS).masked_fill_(scales == _E8M0_NAN, torch.nan)
        return numbers.flatten(-2).narrow(-1, self.skipped, self.columns).to(self.dtype)


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
ExpertWeight = Weight | PackedFp4


def packed_fp4(blocks: Tensor) -> Tensor:
    """Return `PackedFp4.data` of blocks [..., B, 16] of a file, where byte j of a block has its numbers 2j, in the low
    half, and 2j + 1."""
    numbers = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    low, high = numbers.unflatten(-1, (4, 8)).mT.unflatten(-1, (2, 2)).unbind(-1)
    return (low | high << 4).flatten(-3)


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
