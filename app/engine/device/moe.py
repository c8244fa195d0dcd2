"""Mixture of experts in plain PyTorch, without a value read by the host."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.checkpoint.shapes import SWIGLU_ALPHA, MoeConfig
from app.engine.device.base import ExpertWeights
from app.engine.quantised import ExpertWeight

Multiply = Callable[[Tensor, ExpertWeight, Tensor], Tensor]


class Routing(NamedTuple):
    """The experts of T rows. Pair t * k + j is of row t and of its expert `chosen[t, j]`."""

    shares: Tensor  # [T, k] fp32, the weights of a row's experts
    chosen: Tensor  # [T, k]
    order: Tensor  # [T * k] int64, the pairs sorted by expert, those of one expert by row
    ends: Tensor  # [E] int32, where each expert's pairs end


def router_logits(x: Tensor, weights: ExpertWeights) -> Tensor:
    """Return [T, E] fp32 of rows [T, H]. In a narrower dtype experts would tie, and the batch decide between them."""
    return F.linear(x.float(), weights.router, weights.router_bias)


def route(logits: Tensor, config: MoeConfig) -> tuple[Tensor, Tensor]:
    """Return (weights fp32, experts int64), each [T, k], of router logits [T, E] fp32."""
    shares, chosen = logits.softmax(dim=-1).topk(config.num_experts_per_tok, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True) if config.norm_topk_prob else shares, chosen


def gated(gate_up: Tensor, config: MoeConfig) -> Tensor:
    """Return the SwiGLU (arXiv 2002.05202) [R, I] of [R, 2I] with the gate first, clipped if the config says so."""
    gate, up = gate_up.chunk(2, dim=-1)
    if config.swiglu_limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
    return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


def routed(x: Tensor, weights: ExpertWeights, config: MoeConfig) -> Routing:
    """Return the experts of rows [T, H]."""
    shares, chosen = route(router_logits(x, weights), config)
    experts, order = chosen.flatten().sort(stable=True)
    following = torch.arange(1, config.num_experts + 1, device=chosen.device, dtype=chosen.dtype)
    return Routing(shares, chosen, order, torch.searchsorted(experts, following, out_int32=True))


def grouped(x: Tensor, weight: ExpertWeight, ends: Tensor) -> Tensor:
    """Return x @ weight[e].T [R, out] for rows [R, in] that are sorted by expert e. `ends` [E] int32 are where
    each expert's rows end."""
    dense = weight if isinstance(weight, Tensor) else weight.dequantised()
    return F.grouped_mm(x, dense.transpose(1, 2), offs=ends)


def mixture(
    x: Tensor,
    weights: ExpertWeights,
    config: MoeConfig,
    multiply: Multiply = grouped,
    route_rows: Callable[[Tensor, ExpertWeights, MoeConfig], Routing] = routed,
) -> Tensor:
    """Return the weighted sum [T, H] of the outputs of each row's k experts: two products like `grouped` over pairs
    sorted by expert. A row's pairs are added in fp32, in the order of their weights, in any batch."""
    routing, k = route_rows(x, weights, config), config.num_experts_per_tok
    hidden = _plus(multiply(x[routing.order // k], weights.gate_up, routing.ends), weights.gate_up_bias, routing)
    out = _plus(multiply(gated(hidden, config), weights.down, routing.ends), weights.down_bias, routing)
    pairs = torch.empty_like(out).index_copy_(0, routing.order, out)
    return (pairs.view(-1, k, out.shape[1]) * routing.shares.unsqueeze(2)).sum(dim=1).to(x.dtype)


def _plus(out: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    return out if bias is None else out + bias[routing.chosen.flatten()[routing.order]].to(out.dtype)
