"""Experts of one layer, read into their fused place one tensor after the other."""

import torch
from torch import Tensor

from app.engine.backend.base import Backend
from app.engine.backend.moe import ExpertWeights, MoeConfig
from app.engine.models.mxfp4 import dequantised
from app.engine.models.weights import Weights


def load_experts(moe: MoeConfig, hidden: int, weights: Weights, prefix: str, backend: Backend) -> ExpertWeights:
    """Return the router and the experts under `prefix`, stored one by one, all in `experts.gate_up_proj`, or in mxfp4.

    Each tensor is copied and dropped before the next is read. So a load takes at most one tensor more than its result.
    """
    count, inner = moe.num_experts, moe.intermediate_size
    router = weights.get(f"{prefix}.{moe.router_name}.weight", count, hidden)
    gate_up = backend.empty_experts(router, count, 2 * inner, hidden)
    down = backend.empty_experts(router, count, hidden, inner)
    if f"{prefix}.experts.gate_up_proj_blocks" in weights:
        _copy_mxfp4(gate_up, "gate_up_proj", moe, weights, prefix)
        _copy_mxfp4(down, "down_proj", moe, weights, prefix)
    elif f"{prefix}.experts.gate_up_proj" in weights:
        _copy_fused(gate_up, "gate_up_proj", moe, weights, prefix)
        _copy_fused(down, "down_proj", moe, weights, prefix)
    else:
        for expert in range(count):
            name = f"{prefix}.experts.{expert}"
            gate_up[expert, :inner] = weights.get(f"{name}.gate_proj.weight", inner, hidden)
            gate_up[expert, inner:] = weights.get(f"{name}.up_proj.weight", inner, hidden)
            down[expert] = weights.get(f"{name}.down_proj.weight", hidden, inner)
    router = router.float()
    if not moe.has_bias:
        return ExpertWeights(router, gate_up, down)
    stored = weights.get(f"{prefix}.experts.gate_up_proj_bias", count, 2 * inner)
    gate_up_bias = torch.empty_like(stored)
    _copy_rows(gate_up_bias, stored, interleaved=moe.interleaved)
    return ExpertWeights(
        router,
        gate_up,
        down,
        weights.get(f"{prefix}.{moe.router_name}.bias", count).float(),
        gate_up_bias,
        weights.get(f"{prefix}.experts.down_proj_bias", count, hidden),
    )


def _copy_fused(to: Tensor, name: str, moe: MoeConfig, weights: Weights, prefix: str) -> None:
    """Copy the tensor of all experts into `to` [E, out, in]."""
    count, out_features, in_features = to.shape
    shape = (in_features, out_features) if moe.input_first else (out_features, in_features)
    stored = weights.get(f"{prefix}.experts.{name}", count, *shape)
    stored = stored.transpose(1, 2) if moe.input_first else stored
    _copy_rows(to, stored, interleaved=moe.interleaved and name == "gate_up_proj")


def _copy_mxfp4(to: Tensor, name: str, moe: MoeConfig, weights: Weights, prefix: str) -> None:
    """Copy the experts into `to` [E, out, in], one expert's numbers at a time, from blocks that are [E, out, in]."""
    count, out_features, in_features = to.shape
    blocks_of_row = -(-in_features // 32)
    blocks = weights.packed(f"{prefix}.experts.{name}_blocks", count, out_features, blocks_of_row, 16)
    scales = weights.packed(f"{prefix}.experts.{name}_scales", count, out_features, blocks_of_row)
    for expert in range(count):
        own = slice(expert, expert + 1)
        numbers = dequantised(blocks[own], scales[own], to.dtype)
        _copy_rows(to[own], numbers, interleaved=moe.interleaved and name == "gate_up_proj")


def _copy_rows(to: Tensor, stored: Tensor, *, interleaved: bool) -> None:
    """Copy [E, out, ...]. Of `interleaved` rows, the even ones are the gate's, and come before those of up."""
    if not interleaved:
        to.copy_(stored)
        return
    gate, up = to.chunk(2, dim=1)
    gate.copy_(stored[:, ::2])
    up.copy_(stored[:, 1::2])
