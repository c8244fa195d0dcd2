"""The draft model: target features in, hidden states of a whole block out."""

import torch
from torch import Tensor, nn

from app.engine.checkpoint.shapes import DFlashConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Backend, Decode
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import DecoderLayer, StepRows, add_norm, frozen, tied_head
from app.engine.models.weights import LayerSource, Weights, own_part


class DFlashModel(nn.Module):
    """Layers with q and k norms over a block, plus `fc` and `hidden_norm` that turn features into context.

    A draft that has its own embedding or lm_head keeps it; otherwise those of the target serve (DFlash, arXiv
    2602.06036). With `tie_word_embeddings` its own embedding is its lm_head, if the checkpoint has no other.
    `target_ids` [Vd] int32 are the target's tokens of the draft's, or None if both have one vocabulary.
    Ranks of `layers_comm` share the layers and ranks of `comm` the lm_head, like those of the target.
    """

    whole: Decode | None = None
    """Operator for all layers and the final norm, if the device has one."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Weights,
        backend: Backend,
        embedding: nn.Parameter,
        lm_head: nn.Parameter,
        comm: Comm = ALONE,
        layers_comm: Comm = ALONE,
    ) -> None:
        super().__init__()
        decoder = config.decoder
        hidden, vocab = decoder.hidden_size, decoder.vocab_size
        self.config = config
        features = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = frozen(backend.pack_weight(weights.get("fc.weight", hidden, features)))
        self.hidden_norm = frozen(weights.get("hidden_norm.weight", hidden))
        self.layers = nn.ModuleList(
            DecoderLayer(LayerSource(i, decoder, weights, backend, comm=layers_comm)) for i in range(decoder.num_layers)
        )
        self.norm = frozen(weights.get("norm.weight", hidden))
        self.embedding, self.lm_head = embedding, lm_head
        has_embedding = "embed_tokens.weight" in weights or hidden != config.target_hidden_size
        has_head = "lm_head.weight" in weights or config.draft_vocab_size != vocab
        if has_embedding:
            self.embedding = frozen(weights.get("embed_tokens.weight", vocab, hidden))
        if has_embedding and decoder.tie_word_embeddings and not has_head:
            self.embedding = frozen(backend.pack_weight(self.embedding))
            self.lm_head = tied_head(self.embedding, comm)
        elif has_head or hidden != config.target_hidden_size:
            own_rows = own_part(weights.get, "lm_head.weight", (config.draft_vocab_size // comm.size, hidden), comm, 0)
            self.lm_head = frozen(backend.pack_weight(own_rows))
        is_reduced = "d2t" in weights or config.draft_vocab_size != vocab
        self.target_ids = frozen(_target_ids(weights, config.draft_vocab_size, vocab)) if is_reduced else None
        weights.skip("t2d")
        self._backend = backend

    def in_target_vocabulary(self, drafts: Tensor) -> Tensor:
        """Return the target's tokens for those of the draft."""
        return drafts if self.target_ids is None else self.target_ids[drafts]

    def forward(self, embedded: Tensor, rows: StepRows, pool: KvPool) -> Tensor:
        """Return the hidden states after the final norm [D * b, H] of embedded blocks [D * b, H].

        Attention reads the context's K and V in the pool. The block's own are written past it, where the context grows.
        """
        of_rows = rows.rotation, rows.slot_mapping, rows.groups
        if self.whole and (found := self.whole(embedded, *of_rows, pool.all_layers)):
            return found[0]
        hidden, residual = embedded, None
        for layer, kv in zip(self.layers, pool.layers, strict=True):
            hidden, residual = layer.forward(*layer.enter(hidden, residual), rows, kv)
        return add_norm(self._backend, hidden, residual, self.norm, self.config.decoder.rms_norm_eps)[0]


def _target_ids(weights: Weights, draft_vocab: int, vocab: int) -> Tensor:
    """Return the target's tokens [Vd] int32 of the draft's, by their distances `d2t`. `t2d` [V] marks the same."""
    distances = weights.get("d2t", draft_vocab, dtype=torch.int64)
    ids = torch.arange(draft_vocab, device=distances.device) + distances
    first, last = int(ids.min()), int(ids.max())
    if first < 0 or last >= vocab:
        raise UnsupportedError(f"draft: d2t leads to tokens {first} to {last}, and the target has {vocab}")
    marked = weights.get("t2d", vocab, dtype=torch.int64).nonzero().flatten() if "t2d" in weights else None
    if marked is not None and not torch.equal(marked, ids.sort().values):
        raise UnsupportedError("draft: d2t and t2d name other tokens; d2t must hold distances, not tokens")
    return ids.to(torch.int32)
