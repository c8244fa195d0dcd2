"""The draft model: target features in, hidden states of a whole block out."""

from dataclasses import replace
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
from app.engine.heartbeat import beat
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import DecoderLayer, StepRows, add_norm, frozen, read_projections, tied_head
from app.engine.models.weights import LayerSource, RoundedWeights, Weights, local_part
from app.engine.quantised import QuantisedWeight, Weight, joined

_ROUNDED_ROWS = 1 << 13
"""Rows of an lm_head that are rounded at once, because that takes 12 bytes a number."""


class DFlashModel(nn.Module):
    """Layers with q and k norms over a block, plus `fc` and `hidden_norm` that turn features into context.

    An embedding or lm_head of the checkpoint is used, unless it is equal to the target's. Otherwise the draft borrows
    the target's (DFlash, arXiv 2602.06036). With `tie_word_embeddings` the checkpoint's embedding is the lm_head too,
    if it has no other.
    `target_ids` [Vd] int32 maps the draft's tokens to the target's, or is None if both have one vocabulary.
    The layers are sharded over the ranks of `layers_comm`, and the lm_head over those of `comm`, like the target's.
    With a `kind` of 8 bits the products of layers and the lm_head are rounded to it, where the device multiplies by
    that. The products of context are not: features have outliers.
    """

    whole: Decode | None = None
    """Operator for all layers and the final norm, if the device has one."""
    mask_row: Tensor | None = None
    """Embedding [H] of the rows after the anchor, instead of the mask token's."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Weights,
        backend: Backend,
        embedding: nn.Parameter,
        lm_head: nn.Parameter,
        comm: Comm = ALONE,
        layers_comm: Comm = ALONE,
        *,
        kind: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        decoder = config.decoder
        hidden, vocab = decoder.hidden_size, decoder.vocab_size
        self.config = config
        features = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = frozen(backend.pack_weight(weights.get("fc.weight", hidden, features)))
        self.hidden_norm = frozen(weights.get("hidden_norm.weight", hidden))
        sources = [LayerSource(i, decoder, weights, backend, comm=layers_comm) for i in range(decoder.num_layers)]
        self.context_kv, self.context_bias = _context_projections(sources)
        if kind:
            sources = [replace(source, weights=RoundedWeights(weights, kind)) for source in sources]
        group = config.conv_group
        self.layers = nn.ModuleList(ConvolvedLayer(each, group) if group else DecoderLayer(each) for each in sources)
        self.norm = frozen(weights.get("norm.weight", hidden))
        self.embedding = embedding
        has_embedding = "embed_tokens.weight" in weights or hidden != config.target_hidden_size
        has_head = "lm_head.weight" in weights or config.draft_vocab_size != vocab
        if has_embedding:
            self.embedding = _shared(weights.get("embed_tokens.weight", vocab, hidden), embedding)
        if has_embedding and decoder.tie_word_embeddings and not has_head:
            if self.embedding is not embedding:
                self.embedding = frozen(backend.pack_weight(self.embedding))
            lm_head = tied_head(self.embedding, comm)
        elif has_head or hidden != config.target_hidden_size:
            local_rows = local_part(
                weights.get, "lm_head.weight", (config.draft_vocab_size // comm.size, hidden), comm, 0
            )
            lm_head = _shared(backend.pack_weight(local_rows), lm_head)
        self.lm_head = _in_8_bits(lm_head, kind, backend) if kind else lm_head
        is_reduced = "d2t" in weights or config.draft_vocab_size != vocab
        self.target_ids = frozen(_target_ids(weights, config.draft_vocab_size, vocab)) if is_reduced else None
        self.path = PathHead(config, weights, backend, comm, self.in_target_vocabulary) if config.path else None
        for name in ("t2d", "confidence_head.proj.weight", "confidence_head.proj.bias"):
            weights.skip(name)  # a confidence is not needed: widths are chosen by what was accepted before
        self._backend = backend

    def in_target_vocabulary(self, drafts: Tensor) -> Tensor:
        """Return drafts as tokens of the target's vocabulary."""
        return drafts if self.target_ids is None else self.target_ids[drafts]

    def forward(self, embedded: Tensor, rows: StepRows, pool: KvPool) -> Tensor:
        """Return the hidden states after the final norm [D * b, H] of embedded blocks [D * b, H].

        Attention reads the context's K and V in the pool. The block's are written after it, where the context grows.
        """
        if self.whole:
            result = self.whole(embedded, rows.rotation, rows.slot_mapping, rows.groups, pool.all_layers)
            if result:
                return result[0]
        hidden, residual = embedded, None
        for layer, kv in zip(self.layers, pool.layers, strict=True):
            beat()
            hidden, residual = layer.forward(*layer.enter(hidden, residual), rows, kv)
        return add_norm(self._backend, hidden, residual, self.norm, self.config.decoder.rms_norm_eps)[0]


def read_mask_row(folder: Path, draft: DFlashConfig, like: Tensor) -> Tensor | None:
    """Return the row [H] of `mask_embedding.pt`, or None without the file. Raises UnsupportedError."""
    if not (file := folder / "mask_embedding.pt").exists():
        return None
    try:
        saved = torch.load(file, weights_only=True, map_location=like.device)
        row, token = saved["embedding"].flatten().to(like.dtype), saved["mask_token_id"]
    except Exception as error:  # of unpickling, of the archive, or of another object
        raise UnsupportedError(f"{file} cannot be read: {error!r}") from None
    if token != draft.mask_token_id or len(row) != len(like):
        wanted = f"{len(like)} numbers of token {draft.mask_token_id}"
        raise UnsupportedError(f"{file} has {len(row)} numbers of token {token}, and the draft needs {wanted}")
    return cast(Tensor, row)


def _context_projections(sources: list[LayerSource]) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return k and v of all layers in one weight [layers * 2 * kv_heads * D, H], never in 8 bits, and their biases."""
    parts = [read_projections(source, "kv") for source in sources]
    packed = sources[0].backend.pack_weight(*(cast(Tensor, weight) for weights, _ in parts for weight in weights))
    biases = [bias for _, bias in parts if bias is not None]
    return frozen(packed), frozen(torch.cat(biases)) if biases else None


def _in_8_bits(lm_head: nn.Parameter, kind: torch.dtype, backend: Backend) -> Weight:
    """Return the lm_head [V, H] in 8 bits, or itself where the device does not multiply by that."""
    if not backend.multiplies(QuantisedWeight.rounded(lm_head.to("meta"), kind)):
        return lm_head
    return backend.pack_linear(joined([QuantisedWeight.rounded(part, kind) for part in lm_head.split(_ROUNDED_ROWS)]))


def _shared(weight: Tensor, target_weight: nn.Parameter) -> nn.Parameter:
    """Return the target's weight if the draft's is equal, so that the draft's memory is freed."""
    is_equal = weight.shape == target_weight.shape and torch.equal(weight, target_weight)
    return target_weight if is_equal else frozen(weight)


def _target_ids(weights: Weights, draft_vocab: int, vocab: int) -> Tensor:
    """Return the target's token [Vd] int32 of each draft token, by its distance `d2t`. `t2d` [V] marks the same."""
    distances = weights.get("d2t", draft_vocab, dtype=torch.int64)
    ids = torch.arange(draft_vocab, device=distances.device) + distances
    first, last = int(ids.min()), int(ids.max())
    if first < 0 or last >= vocab:
        raise UnsupportedError(f"draft: d2t leads to tokens {first} to {last}, and the target has {vocab}")
    marked = weights.get("t2d", vocab, dtype=torch.int64).nonzero().flatten() if "t2d" in weights else None
    if marked is not None and not torch.equal(marked, ids.sort().values):
        raise UnsupportedError("draft: d2t and t2d name other tokens; d2t must hold distances, not tokens")
    return ids.to(torch.int32)
