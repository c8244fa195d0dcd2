"""Operators before a product that hand on their rows in int8: a norm's, and the sorting of experts' rows."""

import logging

import torch
import torch_npu
from torch import Tensor

from app.engine.quantised import QuantisedRows, Rows

logger = logging.getLogger(__name__)

_WIDTH, _ROWS, _EXPERTS, _EPS = 64, 3, 3, 1e-6


def norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[QuantisedRows, Tensor]:
    """Return (rms_norm(x + residual) in int8, x + residual), each [T, H] (N43)."""
    data, _, total, scales, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
        x, residual, weight, epsilon=eps, output_mask=[True, False]
    )
    return QuantisedRows(data, scales), total


def sort(x: Tensor, chosen: Tensor, num_experts: int, *, in_int8: bool) -> tuple[Rows, Tensor, Tensor]:
    """Return (rows [T * k, H] sorted by expert, where each pair is among them [T * k], rows of each expert) (N34)."""
    rows, origins, counts, scales = torch_npu.npu_moe_init_routing_v2(
        x,
        chosen,
        active_num=chosen.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=1 if in_int8 else -1,
    )
    return QuantisedRows(rows, scales) if in_int8 else rows, origins, counts


def are_right(ndim: int, device: torch.device) -> bool:
    """Return True if the norm before weights of 2 axes, or the sorting before those of 3, hands on in int8 what
    `npu_dynamic_quant` makes of its plain rows, or else log why not.

    Rows in int8 are whole numbers before they are rounded, so that no order of roundings shows. Scales are 1, 2 and 4.
    """
    operator = "npu_add_rms_norm_dynamic_quant" if ndim == 2 else "npu_moe_init_routing_v2 with quant_mode 1"
    numbers, powers = torch.arange(_WIDTH) * 37 % 251 - 125, 2 ** torch.arange(_ROWS)[:, None]
    numbers[0] = 127
    try:
        if ndim == 2:
            ones = torch.where(torch.arange(_WIDTH) % powers**2 == 0, powers, 0)  # their mean square is 1
            x, weight = ones.bfloat16().to(device), numbers.bfloat16().to(device)
            found: Rows = norm(x, x, weight, _EPS)[0]
            plain: Rows = torch_npu.npu_add_rms_norm(x, x, weight, _EPS)[0]
        else:
            x = (numbers * powers).bfloat16().to(device)
            chosen = torch.tensor([[2, 0], [0, 1], [1, 2]], dtype=torch.int32).to(device)
            found, plain = (sort(x, chosen, _EXPERTS, in_int8=in_int8)[0] for in_int8 in (True, False))
        assert isinstance(found, QuantisedRows)
        data, scales = torch_npu.npu_dynamic_quant(plain)
        is_same = torch.equal(found.data, data) and torch.allclose(found.scales.cpu(), scales.cpu(), rtol=0.01)
        why = "" if is_same else "the results differ"
    except RuntimeError as error:
        why = str(error)
    if why:
        logger.warning("rows are quantised by a launch more, because %s is not right here: %s", operator, why)
    return not why
