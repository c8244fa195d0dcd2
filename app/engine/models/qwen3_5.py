"""Qwen3.5, 3.6 and 3.8, dense or with experts: three of four layers are Gated DeltaNet, the others gated attention."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import LayerKv
from app.engine.models.gated_delta_net import GatedDeltaNet
from app.engine.models.layers import Attention, DecoderLayer, StepRows, frozen, load_mlp
from app.engine.models.target import Target
from app.engine.models.weights import LayerSource, Part, Weights

logger = logging.getLogger(__name__)

_OTHER_PARTS = ("visual.", "mtp.")
"""Tensors of the vision tower and of the checkpoint's own drafter, which text does not need."""


class HybridLayer(DecoderLayer):
    """Decoder layer with a Gated DeltaNet or gated attention, and an MLP, or experts of which one serves every row."""

    def __init__(self, layer: LayerSource) -> None:
        super().__init__(layer)
        moe = layer.config.moe_of(layer.index)
        self._has_shared_expert = bool(moe and moe.shared_size)
        if moe and moe.shared_size:
            self.shared_gate_up, self.shared_down = load_mlp(layer, "mlp.shared_expert", moe.shared_size)
            gate = layer.get("mlp.shared_expert_gate.weight", 1, layer.config.hidden_size)
            self.shared_gate = frozen(layer.backend.pack_weight(gate))

    def feed_forward(self, normed: Tensor) -> Tensor:
        out = super().feed_forward(normed)
        if not self._has_shared_expert:
            return out
        shared = self._backend.gated_mlp(normed, self.shared_gate_up, self.shared_down)
        return out + torch.sigmoid(self._backend.linear(normed, self.shared_gate)) * shared

    def make_attention(self, layer: LayerSource) -> nn.Module:
        assert layer.config.gated_delta is not None
        return (GatedDeltaNet if layer.index in layer.config.gated_delta.layers else GatedAttention)(layer)


class GatedAttention(Attention):
    """Attention whose heads are multiplied by the sigmoid of a projection of the layer's input."""

    def __init__(self, layer: LayerSource) -> None:
        super().__init__(layer)
        config = layer.config
        gate = layer.get("self_attn.gate_proj.weight", config.num_heads * config.head_dim, config.hidden_size, split=0)
        self.gate = frozen(layer.backend.pack_weight(gate))

    def attend(self, x: Tensor, rows: StepRows, kv: LayerKv) -> Tensor:
        gate = self._backend.linear(x, self.gate)
        return super().attend(x, rows, kv) * torch.sigmoid(gate)


class TextWeights:
    """Weights of the text part, under the names and with the meaning that the shared layers expect.

    The stored q_proj has the query and the gate of each head in turn; `q_proj` and then `gate_proj` are its parts.
    Norms get their 1 added. Norms and decays are in float32, because a narrower dtype would round 1 + weight and
    exp(A_log).
    """

    def __init__(self, weights: Weights, config: DecoderConfig) -> None:
        self._weights = weights
        self._config = config
        self._parts: dict[str, Tensor] = {}
        others = [name for name in weights.names if name.startswith(_OTHER_PARTS)]
        for name in others:
            weights.skip(name)
        if others:
            logger.info("target: %d tensors under %s are left out", len(others), " and ".join(_OTHER_PARTS))

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name in self._parts:
            return self._parts.pop(name)
        if name.endswith(".q_proj.weight"):
            return self._query(name, *shape, part=part)
        if name.endswith(("norm.weight", ".A_log", ".dt_bias")):
            dtype = torch.float32
        stored = self._weights.get(name, *shape, part=part, dtype=dtype)
        return stored + 1 if name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight") else stored

    def __getattr__(self, name: str) -> Any:
        """Return what is the same for a part and the whole."""
        return getattr(self._weights, name)

    def _query(self, name: str, size: int, hidden: int, part: Part | None) -> Tensor:
        """Return the query rows of a stored q_proj, and keep those of the gate."""
        stored = self._weights.get(name, 2 * size, hidden, part=part and part.scaled(2))
        query, gate = stored.unflatten(0, (-1, 2, self._config.head_dim)).unbind(1)
        self._parts[name.replace(".q_proj.", ".gate_proj.")] = gate.flatten(0, 1)
        return query.flatten(0, 1)


class Qwen3_5(Target):
    """Hybrid decoder. Its RMSNorms multiply by 1 + weight, and RoPE turns a part of each head."""

    layer_class = HybridLayer

    @classmethod
    def adapt(cls, weights: Weights, config: DecoderConfig) -> Weights:
        return TextWeights(weights, config)
