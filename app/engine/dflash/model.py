"""The draft model: target features in, hidden states of a whole block out."""

import re
from collections.abc import Iterable

from torch import Tensor

from app.engine.backend.base import Backend
from app.engine.dflash.config import DFlashConfig
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import DecoderLayer, StepRows, add_norm
from app.engine.models.loader import Weights

_TENSOR_NAME = re.compile(
    r"(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.weight"
)


def check_tensor_names(names: Iterable[str]) -> None:
    """Raises UnsupportedError for a tensor that only other drafts have: reduced vocabularies (d2t), in-block
    convolutions, candidate selectors, biases. Run without it, such a draft loses its acceptance silently."""
    unknown = sorted(name for name in names if not _TENSOR_NAME.fullmatch(name))
    if unknown:
        raise UnsupportedError(
            f"draft: tensor {unknown[0]} (one of {len(unknown)}) is of a variant of DFlash that is not supported yet"
        )


class DFlashModel:
    """Qwen3-style layers over a block, plus `fc` and `hidden_norm` that turn features into context.

    A draft that brings an embedding or an lm_head of its own keeps it; otherwise the target's serve.
    """

    def __init__(
        self, config: DFlashConfig, weights: Weights, backend: Backend, embedding: Tensor, lm_head: Tensor
    ) -> None:
        decoder = config.decoder
        hidden, vocab = decoder.hidden_size, decoder.vocab_size
        self.config = config
        self.fc = backend.pack_weight(weights.get("fc.weight", hidden, len(config.taps) * hidden))
        self.hidden_norm = weights.get("hidden_norm.weight", hidden)
        self.layers = [DecoderLayer(decoder, weights, f"layers.{i}", backend) for i in range(decoder.num_layers)]
        self._norm = weights.get("norm.weight", hidden)
        self.embedding = _own("embed_tokens.weight", weights, embedding, vocab, hidden)
        self.lm_head = _own("lm_head.weight", weights, lm_head, vocab, hidden)
        if self.lm_head is not lm_head:
            self.lm_head = backend.pack_weight(self.lm_head)
        if "embed_tokens.weight" in weights and "lm_head.weight" not in weights and decoder.tie_word_embeddings:
            raise UnsupportedError("draft: an lm_head tied to an embedding of its own is not supported yet")
        self._backend = backend

    def forward(self, embedded: Tensor, rows: StepRows, pool: KvPool) -> Tensor:
        """Embedded blocks [D * b, H] -> hidden states after the final norm [D * b, H].

        Reads the context's K/V from the pool, and writes the block's own past it, where the context will grow.
        """
        hidden, residual = embedded, None
        for layer, kv in zip(self.layers, pool.layers, strict=True):
            hidden, residual = layer.forward(*layer.enter(hidden, residual), rows, kv)
        return add_norm(self._backend, hidden, residual, self._norm, self.config.decoder.rms_norm_eps)[0]


def _own(name: str, weights: Weights, shared: Tensor, *shape: int) -> Tensor:
    return weights.get(name, *shape) if name in weights else shared
