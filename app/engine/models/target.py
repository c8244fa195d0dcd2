"""The base class of all targets, a causal decoder that returns the residual stream after chosen layers, and gpt-oss."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Backend, Decode
from app.engine.heartbeat import beat
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import DecoderLayer, StepRows, add_norm, frozen, tied_head
from app.engine.models.weights import ExpertLayout, LayerSource, Weights, local_part


class Target(nn.Module):
    """Decoder of pre-norm layers, with a dense MLP or experts: Llama, Qwen2, Qwen3, Qwen3-MoE. Others are subclasses.

    `target_layer_ids` are zero-based and ascend; feature i is the residual stream after layer target_layer_ids[i].
    Ranks of `comm` split each layer, and `config` has the sizes of one rank's slice, and the lm_head [V / size, H].
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    expert_layout: ClassVar[ExpertLayout] = ExpertLayout()

    @classmethod
    def adapt(cls, weights: Weights, config: DecoderConfig) -> Weights:
        """Return the checkpoint's weights under the names and with the meaning that the shared layers expect."""
        return weights

    whole: Decode | None = None
    """Operator for all layers and the final norm, if the device has one."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        backend: Backend,
        target_layer_ids: tuple[int, ...] = (),
        comm: Comm = ALONE,
    ) -> None:
        super().__init__()
        weights = self.adapt(weights, config)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.config = config
        self.target_layer_ids = target_layer_ids
        self.embedding = frozen(weights.get("embed_tokens.weight", vocab, hidden))
        self.layers = nn.ModuleList(
            self.layer_class(LayerSource(i, config, weights, backend, self.expert_layout, comm))
            for i in range(config.num_layers)
        )
        self.norm = frozen(weights.get("norm.weight", hidden))
        if config.tie_word_embeddings:
            self.embedding = frozen(backend.pack_weight(self.embedding))
            self.lm_head = tied_head(self.embedding, comm)
            weights.skip("lm_head.weight")
        else:
            rows = local_part(weights.get, "lm_head.weight", (vocab // comm.size, hidden), comm, 0)
            self.lm_head = frozen(backend.pack_weight(rows))
        for name in weights.names:
            if name.endswith("rotary_emb.inv_freq"):  # RoPE's frequencies, in files of Llama 2
                weights.skip(name)
        self._backend = backend

    def forward(self, token_ids: Tensor, rows: StepRows, pool: KvPool) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states after the final norm [T, H], and the features [T, layers * H], of token ids [T].

        The features are None without `target_layer_ids`.
        """
        hidden, residual, features = F.embedding(token_ids, self.embedding), None, []
        if self.whole and (
            result := self.whole(hidden, rows.rotation, rows.slot_mapping, rows.groups, pool.all_layers)
        ):
            return result
        for i, (layer, kv) in enumerate(zip(self.layers, pool.layers, strict=True)):
            beat()
            normed, residual = layer.enter(hidden, residual)
            if i - 1 in self.target_layer_ids:
                features.append(residual)
            hidden, residual = layer.forward(normed, residual, rows, kv)
        hidden, residual = add_norm(self._backend, hidden, residual, self.norm, self.config.rms_norm_eps)
        if len(self.layers) - 1 in self.target_layer_ids:
            features.append(residual)
        return hidden, torch.cat(features, dim=-1) if features else None


class GptOss(Target):
    """gpt-oss (arXiv 2508.10925): a sink for each head, and experts with biases and clipped SwiGLU.

    Experts are stored in mxfp4, or as [E, in, out] in 16 bits. Rows of gate and up alternate.
    """

    expert_layout = ExpertLayout("router", interleaved=True, input_first=True)
