"""The draft model: target features in, hidden states of a whole block out."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from app.engine.checkpoint.shapes import DFlashConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Backend, Decode
from app.engine.dflash.conv import ConvolvedLayer
from app.engine.dflash.path import PathHead
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import DecoderLayer, StepRows, add_norm, frozen, tied_head
from app.engine.models.weights import LayerSource, Weights, own_part


class DFlashModel(nn.Module):
    """Layers with q and k norms over a block, plus `fc` and `hidden_norm` that turn features into context.

    A draft that has its own embedding or lm_head keeps it, unless it is equal to the target's. Otherwise those of the
    target serve (DFlash, arXiv 2602.06036). With `tie_word_embeddings` its own embedding is its lm_head, if the
    checkpoint has no other.
    `target_ids` [Vd] int32 are the target's tokens of the draft's, or None if both have one vocabulary.
    Ranks of `layers_comm` share the layers and ranks of `comm` the lm_head, like those of the target.
    """

    whole: Decode | None = None
    """Operator for all layers and the final norm, if the device has one."""
    mask_row: Tensor | None = None
    """Embedding [H] of the rows behind the anchor, in place of the mask token's."""

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
        sources = [LayerSource(i, decoder, weights, backend, comm=layers_comm) for i in range(decoder.num_layers)]
        group = config.conv_group
        self.layers = nn.ModuleList(ConvolvedLayer(own, group) if group else DecoderLayer(own) for own in sources)
        self.norm = frozen(weights.get("norm.weight", hidden))
        self.embedding, self.lm_head = embedding, lm_head
        has_embedding = "embed_tokens.weight" in weights or hidden != config.target_hidden_size
        has_head = "lm_head.weight" in weights or config.draft_vocab_size != vocab
        if has_embedding:
            self.embedding = _shared(weights.get("embed_tokens.weight", vocab, hidden), embedding)
        if has_embedding and decoder.tie_word_embeddings and not has_head:
            if self.embedding is not embedding:
                self.embedding = frozen(backend.pack_weight(self.embedding))
            self.lm_head = tied_head(self.embedding, comm)
        elif has_head or hidden != config.target_hidden_size:
            own_rows = own_part(weights.get, "lm_head.weight", (config.draft_vocab_size // comm.size, hidden), comm, 0)
            self.lm_head = _shared(backend.pack_weight(own_rows), lm_head)
        is_reduced = "d2t" in weights or config.draft_vocab_size != vocab
        self.target_ids = frozen(_target_ids(weights, config.draft_vocab_size, vocab)) if is_reduced else None
        self.path = PathHead(config, weights, backend, comm, self.in_target_vocabulary) if config.path else None
        for name in ("t2d", "confidence_head.proj.weight", "confidence_head.proj.bias"):
            weights.skip(name)  # a confidence is not needed: widths are chosen by what was accepted before
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


def read_mask_row(folder: Path, draft: DFlashConfig, like: Tensor) -> Tensor | None:
    """Return the row [H] of `mask_embedding.pt`, or None without the file. Raises UnsupportedError."""
    if not (file := folder / "mask_embedding.pt").exists():
        return None
    try:
        found = torch.load(file, weights_only=True, map_location=like.device)
        row, token = found["embedding"].flatten().to(like.dtype), found["mask_token_id"]
    except Exception as error:  # of unpickling, of the archive, or of another object
        raise UnsupportedError(f"{file} cannot be read: {error!r}") from None
    if token != draft.mask_token_id or len(row) != len(like):
        wanted = f"{len(like)} numbers of token {draft.mask_token_id}"
        raise UnsupportedError(f"{file} has {len(row)} numbers of token {token}, and the draft needs {wanted}")
    return cast(Tensor, row)


def _shared(own: Tensor, of_target: nn.Parameter) -> nn.Parameter:
    """Return the target's weight if the draft's is the same, and the draft's memory is given back."""
    return of_target if own.shape == of_target.shape and torch.equal(own, of_target) else frozen(own)


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
