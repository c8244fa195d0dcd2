"""What is reported of a draft: its configuration, at startup and in /server_info, and an acceptance that is too low."""

import logging
import re
from collections.abc import Iterable

import torch

from app.engine.checkpoint.shapes import DFlashConfig
from app.messages import TokenDelta

logger = logging.getLogger(__name__)

WINDOW = 2000
"""Draft tokens that are judged together."""
FEW = 0.1
"""Part of them whose acceptance is too little to be right."""
_WARNING = (
    "draft: %.1f %% of %d draft tokens were accepted. Texts are right all the same, and slow. The usual causes, most "
    "frequent first: the draft of another revision or size of the target; thinking on where it was trained without, or "
    "off; a quantised or rotated target; float16; a config.json of the draft with wrong taps, block or window; prompts "
    "of random tokens"
)

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


class AcceptanceWarning:
    """Acceptance of an engine's drafts. Warns once, if less than FEW of WINDOW drafts were accepted."""

    def __init__(self) -> None:
        self._verified = self._accepted = 0
        self._has_warned = False

    def add(self, deltas: Iterable[TokenDelta]) -> None:
        """Count the drafts of a step."""
        for delta in deltas:
            for step in delta.steps:
                self._verified += step.n_verified
                self._accepted += step.n_accepted
        if self._verified < WINDOW or self._has_warned:
            return
        if self._accepted < FEW * self._verified:
            logger.warning(_WARNING, 100 * self._accepted / self._verified, self._verified)
            self._has_warned = True
        self._verified = self._accepted = 0
