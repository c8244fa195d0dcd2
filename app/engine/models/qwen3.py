"""Qwen3 dense: a causal target that hands out the residual stream after chosen layers."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.backend.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.models.config import DecoderConfig
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import DecoderLayer, StepRows, add_norm
from app.engine.models.loader import Weights


def qwen3_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises UnsupportedError for anything but a dense Qwen3."""
    kind = raw.get("model_type")
    if kind != "qwen3":
        raise UnsupportedError(f"target: model_type {kind!r} is not supported yet; supported: 'qwen3' (dense Qwen3)")
    return DecoderConfig.from_json(raw, "target")


class Qwen3:
    """`taps` are zero-based layer numbers, ascending; feature i is the residual stream after layer taps[i]."""

    def __init__(self, config: DecoderConfig, weights: Weights, backend: Backend, taps: tuple[int, ...] = ()) -> None:
        self.config = config
        self.taps = taps
        self.embedding = weights.get("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [DecoderLayer(config, weights, f"layers.{i}", backend) for i in range(config.num_layers)]
        self._norm = weights.get("norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head = self.embedding = backend.pack_weight(self.embedding)
            weights.skip("lm_head.weight")
        else:
            self.lm_head = backend.pack_weight(weights.get("lm_head.weight", config.vocab_size, config.hidden_size))
        self._backend = backend

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding)

    def forward(self, token_ids: Tensor, rows: StepRows, pool: KvPool) -> tuple[Tensor, Tensor | None]:
        """Token ids [T] -> (hidden states after the final norm [T, H], features [T, taps * H] or None without taps)."""
        hidden, residual, features = self.embed(token_ids), None, []
        for i, (layer, kv) in enumerate(zip(self._layers, pool.layers, strict=True)):
            normed, residual = layer.enter(hidden, residual)
            if i - 1 in self.taps:
                features.append(residual)
            hidden, residual = layer.forward(normed, residual, rows, kv)
        hidden, residual = add_norm(self._backend, hidden, residual, self._norm, self.config.rms_norm_eps)
        if len(self._layers) - 1 in self.taps:
            features.append(residual)
        return hidden, torch.cat(features, dim=-1) if features else None
