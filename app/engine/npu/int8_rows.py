"""Operators before a product that hand on their rows in int8: a norm's, the sorting of experts' rows, and SwiGLU's."""

import logging
from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor

from app.engine.npu import nz
from app.engine.quantised import QuantisedRows, QuantisedWeight, Rows

logger = logging.getLogger(__name__)

_WIDTH, _ROWS, _EXPERTS, _EPS = 64, 3, 3, 1e-6
_IN, _GATES, _COUNTS = 160, 160, (0, 130, 0, 2000, 0)
"""More than the 128 x 128 x 256 numbers of a tile, and more tiles than cores. The counts are within the rows even if
they are read as ends."""


def quantised(x: Rows) -> QuantisedRows:
    """Return rows in int8 with a scale each, which plain ones [T, in] get here (N40)."""
    return QuantisedRows(*torch_npu.npu_dynamic_quant(x)) if isinstance(x, Tensor) else x


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


def swiglu(x: Rows, gate_up: QuantisedWeight, counts: Tensor) -> QuantisedRows:
    """Return SwiGLU's rows [R, I] of rows [R, H], sorted by expert, times `gate_up` [E, 2I, H] in NZ, with scales in
    float32 (N45). `counts` [E] int64 are rows."""
    x = quantised(x)
    return QuantisedRows(
        *torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            x.data,
            [gate_up.data.mT],
            [gate_up.scales.flatten(1)],
            x.scales,
            counts,
            dequant_dtype=torch.float32,
            group_list_type=1,
        )
    )


def are_right(ndim: int, device: torch.device) -> bool:
    """Return True if the norm before weights of 2 axes, or the sorting before those of 3, hands on in int8 what
    `npu_dynamic_quant` makes of its plain rows, or else log why not.

    Rows in int8 are whole numbers before they are rounded, so that no order of roundings shows. Scales are 1, 2 and 4.
    """
    operator = "npu_add_rms_norm_dynamic_quant" if ndim == 2 else "npu_moe_init_routing_v2 with quant_mode 1"
    numbers, powers = torch.arange(_WIDTH) * 37 % 251 - 125, 2 ** torch.arange(_ROWS)[:, None]
    numbers[0] = 127

    def both() -> tuple[Rows, Rows]:
        if ndim == 2:
            ones = torch.where(torch.arange(_WIDTH) % powers**2 == 0, powers, 0)  # their mean square is 1
            x, weight = ones.bfloat16().to(device), numbers.bfloat16().to(device)
            return norm(x, x, weight, _EPS)[0], torch_npu.npu_add_rms_norm(x, x, weight, _EPS)[0]
        x = (numbers * powers).bfloat16().to(device)
        chosen = torch.tensor([[2, 0], [0, 1], [1, 2]], dtype=torch.int32).to(device)
        in_int8, plain = (sort(x, chosen, _EXPERTS, in_int8=in_int8)[0] for in_int8 in (True, False))
        return in_int8, plain

    return _are_same(both, operator, "rows are quantised by a launch more")


def swiglu_is_right(multiply: Callable[[Rows, QuantisedWeight, None, Tensor], Tensor], device: torch.device) -> bool:
    """Return True if `swiglu` hands on what `npu_dynamic_quant` makes of `npu_swiglu`'s rows after the product alone,
    or else log why not.

    A row is one of its expert's weight. Its gates are so far from 0 that SiLU keeps or drops them whole, so that all
    numbers are whole before they are rounded.
    """
    column = torch.arange(_GATES)
    up_scales = 1 + column % 2
    up = torch.arange(len(_COUNTS) * _IN * _GATES).view(-1, _IN, _GATES) * 37 % 251 - 125
    up[:, :, 0] = 127
    gate = torch.where(column % 3 == 1, -64, 32).expand_as(up)
    gate_scales = 2 ** torch.arange(len(_COUNTS))[:, None].expand(-1, _GATES)
    data = torch.cat((gate, up.div(up_scales, rounding_mode="floor")), -1).to(device, torch.int8)
    scales = torch.cat((gate_scales, up_scales.expand_as(gate_scales)), -1).to(device, torch.float32)
    rows = torch.arange(sum(_COUNTS))
    picks = (torch.arange(_IN) == rows[:, None] * 37 % _IN).to(device, torch.int8)
    x = QuantisedRows(picks, (2 ** (rows % 5)).to(device, torch.float32))

    def both() -> tuple[Rows, Rows]:
        weight = QuantisedWeight(nz.in_nz(data.mT), scales[..., None], torch.bfloat16)
        counts = torch.tensor(_COUNTS).to(device)
        return swiglu(x, weight, counts), torch_npu.npu_swiglu(multiply(x, weight, None, counts))

    return _are_same(both, "npu_grouped_matmul_swiglu_quant_v2", "experts' SwiGLU takes two launches more")


def _are_same(both: Callable[[], tuple[Rows, Rows]], operator: str, otherwise: str) -> bool:
    """Return True if `both` returns rows in int8, and plain ones that `npu_dynamic_quant` makes the same, or else log
    `otherwise` and why the operator is not right."""
    if not hasattr(torch_npu, operator.partition(" ")[0]):
        logger.warning("%s, because this torch_npu has no %s", otherwise, operator)
        return False
    try:
        found, wanted = (quantised(rows) for rows in both())
        is_same = torch.equal(found.data, wanted.data)
        is_same = is_same and torch.allclose(found.scales.cpu(), wanted.scales.cpu(), rtol=0.01)
        why = "" if is_same else "the results differ"
    except RuntimeError as error:
        why = str(error)
    if why:
        logger.warning("%s, because %s is not right here: %s", otherwise, operator, why)
    return not why
