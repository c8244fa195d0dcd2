"""The l2norm of a Gated DeltaNet layer as an operator of an NPU.

Checked against torch_npu's schemas, meta kernels and host checks on CPU; not run on an Ascend device.
"""

from functools import cache

import torch
import torch_npu
from torch import Tensor

from app.engine.device.gated_delta import L2_EPS


def l2norm(x: Tensor) -> Tensor:
    """Return `device.gated_delta.l2norm` as an RMSNorm."""
    dim = x.shape[-1]
    return torch_npu.npu_rms_norm(x, _weight(dim, x.device), L2_EPS / dim)[0]


@cache
def _weight(dim: int, device: torch.device) -> Tensor:
    """Return the weight that makes an RMSNorm an l2norm, made on the device, because an upload would let it wait."""
    return torch.full((dim,), dim**-0.5, device=device)
