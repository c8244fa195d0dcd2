"""What is logged of a draft at startup."""

import logging

import torch

from app.engine.checkpoint.shapes import DFlashConfig

logger = logging.getLogger(__name__)


def log_draft(draft: DFlashConfig, dtype: torch.dtype, max_model_len: int) -> None:
    """Log what was read of the draft's config.json, and what will make few drafts right."""
    for warning in draft.warnings:
        logger.warning("draft: %s", warning)
    if dtype == torch.float16:
        logger.warning("draft: features overflow in float16, so few drafts are right; --dtype bfloat16 avoids that")
    if (limit := draft.decoder.max_position_embeddings) < max_model_len:
        text = "draft: its config.json allows %d positions, and --max-model-len is %d: few drafts beyond are right"
        logger.warning(text, limit, max_model_len)
    logger.info("draft: %s", ", ".join(f"{name} {value}" for name, value in draft.report().items()))
