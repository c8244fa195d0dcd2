"""Int8 weights in CANN's format FRACTAL_NZ, which its products read faster than rows."""

import logging
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
import torch_npu
from torch import Tensor

from app.engine.npu import rules
from app.engine.quantised import QuantisedWeight, Weight

logger = logging.getLogger(__name__)

_IN, _OUT, _EXPERTS = 96, 64, 2


def fits(weight: QuantisedWeight) -> bool:
    """Return True for whole tiles, which take as much memory in NZ as in rows (N44)."""
    return not any(size % rules.NZ_TILE for size in weight.data.shape[-2:])


def in_nz(data: Tensor) -> Tensor:
    """Return int8 [.., out, in] as a view of [.., in, out] in NZ (N44)."""
    torch_npu.npu.config.allow_internal_format = True  # without it the cast returns rows, in silence
    try:
        turned = torch_npu.npu_format_cast(data.mT.contiguous(), rules.NZ)
    finally:
        torch_npu.npu.config.allow_internal_format = False
    return turned.mT


def is_right(multiply: Callable[[Tensor, Weight, Tensor], Tensor], ndim: int, device: torch.device) -> bool:
    """Return True if rows [T, in] times int8, plus a bias, are the same by a weight in NZ and in rows, or else log why.

    All rows, scales and biases are whole numbers, so that no order of roundings shows. The weight has `ndim` axes.
    """
    rows = (torch.arange(4 * _IN) % 255 - 127).view(4, _IN)
    rows[:, 0] = 127  # the scale of each row is 1
    shape = (_EXPERTS, _OUT, _IN)[-ndim:]
    data = (torch.arange(prod(shape)) * 37 % 251 - 125).view(shape).to(device, torch.int8)
    weight = QuantisedWeight(
        data.mT.contiguous().mT if ndim == 3 else data,  # as `NpuBackend.empty_experts`
        torch.ones(*shape[:-1], 1, dtype=torch.bfloat16 if ndim == 3 else torch.float32, device=device),
        torch.bfloat16,
    )
    x, bias = rows.bfloat16().to(device), (torch.arange(prod(shape[:-1])) * 4096).view(shape[:-1])
    bias = bias.to(device, torch.float32 if ndim == 3 else torch.bfloat16)
    try:
        turned = replace(weight, data=in_nz(weight.data))
        why = "" if torch.equal(multiply(x, turned, bias), multiply(x, weight, bias)) else "the results differ"
    except RuntimeError as error:
        why = str(error)
    if why:
        logger.warning("int8 weights stay in rows, because products by FRACTAL_NZ are not right here: %s", why)
    return not why
