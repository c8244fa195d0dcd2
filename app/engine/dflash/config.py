"""Shape of a DFlash draft. `build/draft_config.py` reads it from a config.json."""

from dataclasses import dataclass

from app.engine.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Shape of a draft. `block_size` is the anchor plus the drafts; after the layers `target_layer_ids` of the target
    the residual stream is read."""

    decoder: DecoderConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
