"""The draft model: target features in, hidden states of a whole block out."""

from torch import Tensor, nn

from app.engine.backend.base import Backend
from app.engine.dflash.config import DFlashConfig
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import DecoderLayer, StepRows, add_norm, frozen
from app.engine.models.weights import Weights


class DFlashModel(nn.Module):
    """Layers with q and k norms over a block, plus `fc` and `hidden_norm` that turn features into context.

    A draft with an embedding or an lm_head of its own keeps it; otherwise those of the target serve (DFlash, arXiv
    2602.06036).
    """

    def __init__(
        self, config: DFlashConfig, weights: Weights, backend: Backend, embedding: nn.Parameter, lm_head: nn.Parameter
    ) -> None:
        super().__init__()
        decoder = config.decoder
        hidden, vocab = decoder.hidden_size, decoder.vocab_size
        self.config = config
        self.fc = frozen(backend.pack_weight(weights.get("fc.weight", hidden, len(config.target_layer_ids) * hidden)))
        self.hidden_norm = frozen(weights.get("hidden_norm.weight", hidden))
        self.layers = nn.ModuleList(
            DecoderLayer(decoder, weights, f"layers.{i}", backend, mask, qk_norm=True)
            for i, mask in enumerate(decoder.masks)
        )
        self.norm = frozen(weights.get("norm.weight", hidden))
        self.embedding, self.lm_head = embedding, lm_head
        if "embed_tokens.weight" in weights:
            self.embedding = frozen(weights.get("embed_tokens.weight", vocab, hidden))
        if "lm_head.weight" in weights:
            self.lm_head = frozen(backend.pack_weight(weights.get("lm_head.weight", vocab, hidden)))
        if "embed_tokens.weight" in weights and "lm_head.weight" not in weights and decoder.tie_word_embeddings:
            raise UnsupportedError("draft: an lm_head tied to an embedding of its own is not supported yet")
        self._backend = backend

    def forward(self, embedded: Tensor, rows: StepRows, pool: KvPool) -> Tensor:
        """Return the hidden states after the final norm [D * b, H] of embedded blocks [D * b, H].

        Attention reads the context's K and V in the pool. The block's own are written past it, where the context grows.
        """
        hidden, residual = embedded, None
        for layer, kv in zip(self.layers, pool.layers, strict=True):
            hidden, residual = layer.forward(*layer.enter(hidden, residual), rows, kv)
        return add_norm(self._backend, hidden, residual, self.norm, self.config.decoder.rms_norm_eps)[0]
