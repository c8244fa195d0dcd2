"""Qwen3.5, 3.6 and 3.8, dense or with experts: three of four layers are Gated DeltaNet, the others gated attention."""

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from app.engine.backend.base import AttentionMask, Backend, LayerKv
from app.engine.backend.moe import MoeConfig
from app.engine.models.config import DecoderConfig
from app.engine.models.gated_delta_net import GatedDeltaNet
from app.engine.models.layers import Attention, DecoderLayer, StepRows, frozen, parameters_of
from app.engine.models.target import Target
from app.engine.models.weights import Weights

logger = logging.getLogger(__name__)

_OTHER_PARTS = ("visual.", "mtp.")
"""Tensors of the vision tower and of the checkpoint's own drafter. Text alone needs neither."""


class HybridLayer(DecoderLayer):
    """Decoder layer with a Gated DeltaNet or gated attention, and an MLP, or experts of which one serves every row."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        prefix: str,
        backend: Backend,
        mask: AttentionMask,
        *,
        qk_norm: bool,
        moe: MoeConfig | None = None,
    ) -> None:
        super().__init__(config, weights, prefix, backend, mask, qk_norm=qk_norm, moe=moe)
        self._has_shared_expert = moe is not None and moe.shared_size > 0
        if moe is None or not moe.shared_size:
            return
        hidden, inner, shared = config.hidden_size, moe.shared_size, f"{prefix}.mlp.shared_expert"
        gate, up = (weights.get(f"{shared}.{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        self.shared_gate_up = frozen(backend.pack_weight(torch.cat((gate, up))))
        self.shared_down = frozen(backend.pack_weight(weights.get(f"{shared}.down_proj.weight", hidden, inner)))
        self.shared_gate = frozen(backend.pack_weight(weights.get(f"{shared}_gate.weight", 1, hidden)))

    def feed_forward(self, normed: Tensor) -> Tensor:
        out = super().feed_forward(normed)
        if not self._has_shared_expert:
            return out
        backend, weights = self._backend, parameters_of(self)
        shared = backend.gated_mlp(normed, weights["shared_gate_up"], weights["shared_down"])
        return out + torch.sigmoid(backend.linear(normed, weights["shared_gate"])) * shared

    def make_attention(
        self,
        config: DecoderConfig,
        weights: Weights,
        prefix: str,
        backend: Backend,
        mask: AttentionMask,
        *,
        qk_norm: bool,
    ) -> nn.Module:
        assert config.gated_delta is not None
        if int(prefix.rpartition(".")[2]) in config.gated_delta.layers:
            return GatedDeltaNet(config, weights, f"{prefix}.linear_attn", backend)
        return GatedAttention(config, weights, f"{prefix}.self_attn", backend, mask, qk_norm=qk_norm)


class GatedAttention(Attention):
    """Attention whose heads are multiplied by the sigmoid of a projection of the layer's input."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        prefix: str,
        backend: Backend,
        mask: AttentionMask,
        *,
        qk_norm: bool,
    ) -> None:
        super().__init__(config, weights, prefix, backend, mask, qk_norm=qk_norm)
        size = config.num_heads * config.head_dim
        self.gate = frozen(backend.pack_weight(weights.get(f"{prefix}.gate_proj.weight", size, config.hidden_size)))

    def attend(self, x: Tensor, rows: StepRows, kv: LayerKv) -> Tensor:
        gate = self._backend.linear(x, parameters_of(self)["gate"])
        return super().attend(x, rows, kv) * torch.sigmoid(gate)


class TextWeights:
    """Weights of the text part, under the names and with the meaning that the shared layers expect.

    Names lose the prefix `language_model.` of multimodal checkpoints. The stored q_proj has the query and the gate of
    each head in turn; `q_proj` and then `gate_proj` are its parts. Norms get their 1 added.
    """

    def __init__(self, weights: Weights, config: DecoderConfig) -> None:
        self._weights = weights
        self._config = config
        self._parts: dict[str, Tensor] = {}
        is_multimodal = "language_model.embed_tokens.weight" in weights
        self._prefix = "language_model." if is_multimodal else ""
        others = [name for name in weights.names if name.startswith(_OTHER_PARTS)]
        for name in others:
            weights.skip(name)
        if others:
            logger.info("target: %d tensors under %s are left out", len(others), " and ".join(_OTHER_PARTS))

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._weights

    def get(self, name: str, *shape: int) -> Tensor:
        if name in self._parts:
            return self._parts.pop(name)
        if name.endswith(".q_proj.weight"):
            return self._query(name, *shape)
        weight = self._weights.get(self._stored(name), *shape)
        return weight + 1 if name.endswith("norm.weight") and "linear_attn" not in name else weight

    def skip(self, name: str) -> None:
        self._weights.skip(self._stored(name))

    def __getattr__(self, name: str) -> Any:
        """Return what is the same for a part and the whole."""
        return getattr(self._weights, name)

    def _query(self, name: str, size: int, hidden: int) -> Tensor:
        """Return the query rows of a stored q_proj, and keep those of the gate."""
        stored = self._weights.get(self._stored(name), 2 * size, hidden)
        query, gate = stored.unflatten(0, (-1, 2, self._config.head_dim)).unbind(1)
        self._parts[name.replace(".q_proj.", ".gate_proj.")] = gate.flatten(0, 1)
        return query.flatten(0, 1)

    def _stored(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self._prefix + name


class Qwen3_5(Target):
    """Hybrid decoder. Its RMSNorms multiply by 1 + weight, and RoPE turns a part of each head."""

    qk_norm = True
    layer_class = HybridLayer
    is_hybrid = True
    weights_class: ClassVar[type[TextWeights]] = TextWeights

    def __init__(
        self, config: DecoderConfig, weights: Weights, backend: Backend, target_layer_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(config, self.weights_class(weights, config), backend, target_layer_ids)


class Qwen3_5Moe(Qwen3_5):
    """Hybrid decoder whose layers have a mixture of experts and a shared one."""

    supports = frozenset({"num_experts"})
