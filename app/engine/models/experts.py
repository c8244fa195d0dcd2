"""Experts of one layer, read into their fused place one tensor after the other."""

import torch
from torch import Tensor

from app.engine.backend.moe import ExpertWeights, MoeConfig
from app.engine.models.mxfp4 import dequantised
from app.engine.models.weights import LayerSource


def load_experts(layer: LayerSource, moe: MoeConfig) -> ExpertWeights:
    """Return a layer's router and experts, stored one by one, all in `experts.gate_up_proj`, or in mxfp4.

    Each tensor is copied and dropped before the next is read. So a load takes at most one tensor more than its result.
    """
    count, inner, hidden, layout = moe.num_experts, moe.intermediate_size, layer.config.hidden_size, layer.experts
    router = layer.get(f"mlp.{layout.router}.weight", count, hidden)
    gate_up = layer.backend.empty_experts(router, count, 2 * inner, hidden)
    down = layer.backend.empty_experts(router, count, hidden, inner)
    if layer.name("mlp.experts.gate_up_proj_blocks") in layer.weights:
        _copy_mxfp4(gate_up, layer, "gate_up_proj", interleaved=layout.interleaved)
        _copy_mxfp4(down, layer, "down_proj", interleaved=False)
    elif layer.name("mlp.experts.gate_up_proj") in layer.weights:
        _copy_fused(gate_up, layer, "gate_up_proj", interleaved=layout.interleaved)
        _copy_fused(down, layer, "down_proj", interleaved=False)
    else:
        for expert in range(count):
            name = f"mlp.experts.{expert}"
            gate_up[expert, :inner] = layer.get(f"{name}.gate_proj.weight", inner, hidden)
            gate_up[expert, inner:] = layer.get(f"{name}.up_proj.weight", inner, hidden)
            down[expert] = layer.get(f"{name}.down_proj.weight", hidden, inner)
    router = router.float()
    if not moe.has_bias:
        return ExpertWeights(router, gate_up, down)
    stored = layer.get("mlp.experts.gate_up_proj_bias", count, 2 * inner)
    gate_up_bias = torch.empty_like(stored)
    _copy_rows(gate_up_bias, stored, interleaved=layout.interleaved)
    return ExpertWeights(
        router,
        gate_up,
        down,
        layer.get(f"mlp.{layout.router}.bias", count).float(),
        layer.backend.pack_expert_bias(gate_up_bias),
        layer.backend.pack_expert_bias(layer.get("mlp.experts.down_proj_bias", count, hidden)),
    )


def _copy_fused(to: Tensor, layer: LayerSource, name: str, *, interleaved: bool) -> None:
    """Copy the tensor of all experts into `to` [E, out, in]."""
    count, out_features, in_features = to.shape
    input_first = layer.experts.input_first
    shape = (in_features, out_features) if input_first else (out_features, in_features)
    stored = layer.get(f"mlp.experts.{name}", count, *shape)
    _copy_rows(to, stored.transpose(1, 2) if input_first else stored, interleaved=interleaved)


def _copy_mxfp4(to: Tensor, layer: LayerSource, name: str, *, interleaved: bool) -> None:
    """Copy the experts into `to` [E, out, in], one expert's numbers at a time, from blocks that are [E, out, in]."""
    count, out_features, in_features = to.shape
    sizes = count, out_features, -(-in_features // 32)
    blocks = layer.weights.packed(layer.name(f"mlp.experts.{name}_blocks"), *sizes, 16)
    scales = layer.weights.packed(layer.name(f"mlp.experts.{name}_scales"), *sizes)
    for expert in range(count):
        own = slice(expert, expert + 1)
        _copy_rows(to[own], dequantised(blocks[own], scales[own], to.dtype), interleaved=interleaved)


def _copy_rows(to: Tensor, stored: Tensor, *, interleaved: bool) -> None:
    """Copy [E, out, ...]. Of `interleaved` rows, the even ones are the gate's, and come before those of up."""
    if not interleaved:
        to.copy_(stored)
        return
    gate, up = to.chunk(2, dim=1)
    gate.copy_(stored[:, ::2])
    up.copy_(stored[:, 1::2])
