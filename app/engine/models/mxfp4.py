"""mxfp4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits, e2m1, with a common power of two."""

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127
BLOCK = 32


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers [..., 32 * B] of blocks [..., B, 16] and scales [..., B], both uint8. The low half comes first."""
    table = torch.tensor(VALUES, device=blocks.device)
    halves = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - SCALE_BIAS
    return torch.ldexp(table[halves.int()], exponents).flatten(-2).to(dtype)
