"""What is reported of a draft, at startup and in /server_info."""

import logging
import re

import torch

from app.engine.checkpoint.shapes import DFlashConfig

logger = logging.getLogger(__name__)


_TRAINED_FOR = (
    (r"Qwen3-[48]B-DFlash|dflash_qwen3_(4|8|14)b", "without", "false"),
    (r"Qwen3\.[568]-.*DFlash", "with", "true"),
)
"""Names of published drafts, and whether they were trained on answers with thinking (docs/drafts.md)."""


def log_draft(draft: DFlashConfig, dtype: torch.dtype, max_model_len: int, name: str = "") -> None:
    """Log what was read of the draft's config.json, and what will make few drafts right. `name` is its folder."""
    for pattern, mode, value in _TRAINED_FOR:
        if re.search(pattern, name):
            text = "draft: trained on answers %s thinking, so it is quickest with `enable_thinking` %s"
            logger.info(text, mode, value)
    for warning in draft.warnings:
        logger.warning("draft: %s", warning)
    if dtype == torch.float16:
        logger.warning("draft: features overflow in float16, so few drafts are right; --dtype bfloat16 avoids that")
    if (limit := draft.decoder.max_position_embeddings) < max_model_len:
        text = "draft: its config.json allows %d positions, and --max-model-len is %d: few drafts beyond are right"
        logger.warning(text, limit, max_model_len)
    logger.debug("draft: %s", ", ".join(f"{name} {value}" for name, value in report(draft).items()))


def report(draft: DFlashConfig) -> dict[str, str]:
    """Return what was read from the checkpoint's config, for people."""
    decoder, rope = draft.decoder, draft.decoder.rope
    turning = (f", {rope.dim} dims" if rope.dim else "") + (", adjacent pairs" if rope.adjacent_pairs else "")
    path, head = draft.path, "the best token of each row"
    if path:
        owner = "DFlash2's selector" if path.kind == "selector" else f"DSpark's {path.kind} head"
        head = f"{owner}, a path through {path.top_k} candidates"
    return {
        "layers": str(decoder.num_layers),
        "masks": "; ".join(f"{decoder.masks.count(mask)} {mask}" for mask in dict.fromkeys(decoder.masks)),
        "block": f"{draft.block_size - 1} drafts, the first from row {draft.first_draft_row}",
        "head": head,
        "convolutions": f"in groups of {draft.conv_group} channels" if draft.conv_group else "none",
        "taps": f"{','.join(map(str, draft.target_layer_ids))} of {draft.target_hidden_size}",
        "mask_token": str(draft.mask_token_id),
        "vocabulary": f"{draft.draft_vocab_size} of {decoder.vocab_size}",
        "hidden_size": str(decoder.hidden_size),
        "biases": "q, k, v, o" if decoder.o_bias else "q, k, v" if decoder.qkv_bias else "none",
        "rope": f"{rope.scaling or 'default'}, theta {rope.theta:g}{turning}",
        "dtype": decoder.dtype,
    }
