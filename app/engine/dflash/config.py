"""Shape of a DFlash draft. `build/draft_config.py` reads it from a config.json."""

from dataclasses import dataclass

from app.engine.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Shape of a draft. `block_size` is the anchor plus the drafts; after the layers `target_layer_ids` of the target
    the residual stream [T, target_hidden_size] is read.

    The draft's own lm_head has `draft_vocab_size` rows. Drafts are predicted by a block's rows from `first_draft_row`
    on. It is 1 if row k predicts the token at position k, and 0 if it predicts the one behind (`sample_from_anchor`).
    """

    decoder: DecoderConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    target_hidden_size: int
    draft_vocab_size: int
    first_draft_row: int = 1

    def report(self) -> dict[str, str]:
        """Return what was read from the checkpoint's config, for people."""
        decoder = self.decoder
        rope = decoder.rope
        kind = "default" if rope.scaling is None else str(rope.scaling)
        turning = f", {rope.dim} dims" if rope.dim else ""
        pairs = ", adjacent pairs" if rope.adjacent_pairs else ""
        return {
            "layers": str(decoder.num_layers),
            "masks": "; ".join(f"{decoder.masks.count(mask)} {mask}" for mask in dict.fromkeys(decoder.masks)),
            "block": f"{self.block_size - 1} drafts, the first from row {self.first_draft_row}",
            "taps": f"{','.join(map(str, self.target_layer_ids))} of {self.target_hidden_size}",
            "mask_token": str(self.mask_token_id),
            "vocabulary": f"{self.draft_vocab_size} of {decoder.vocab_size}",
            "hidden_size": str(decoder.hidden_size),
            "biases": "q, k, v, o" if decoder.o_bias else "q, k, v" if decoder.qkv_bias else "none",
            "rope": f"{kind}, theta {rope.theta:g}{turning}{pairs}",
            "dtype": decoder.dtype,
        }
