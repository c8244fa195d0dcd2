"""Drafts of a target whose residual stream is rotated (QuaRot, arXiv 2404.00456): its rows are h Q instead of h.

The embedding in its files is E Q, and its head is W diag(gamma) Q, into which the last norm's gamma was folded. A draft
was trained on h. So its fc becomes fc Q for each tap, and a borrowed embedding or head is rotated back.
"""

from collections.abc import Callable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from app.config.engine import EngineConfig
from app.engine.checkpoint.files import Checkpoint, find_file_of
from app.engine.checkpoint.quantised import rotation_file
from app.engine.checkpoint.shapes import DFlashConfig
from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.models.layers import frozen
from app.engine.models.weights import Weights


def read_rotation(target: Checkpoint, backend: Backend, hidden: int) -> Tensor | None:
    """Return the rotation Q [H, H] fp32 of a target, or None. Raises UnsupportedError if it is rotated without one."""
    file = rotation_file(target.folder, target.description)
    if file is None:
        return None
    try:
        with safe_open(file, framework="pt", device=str(backend.device)) as opened:
            rotation: Tensor = opened.get_tensor("global_rotation").float()
    except (OSError, SafetensorError) as error:
        raise UnsupportedError(f"{file} cannot be read: {error}") from None
    if rotation.shape != (hidden, hidden):
        raise UnsupportedError(f"{file}: global_rotation is {list(rotation.shape)}, and hidden_size is {hidden}")
    return rotation


def turned_fc(fc: Tensor, rotation: Tensor, backend: Backend) -> nn.Parameter:
    """Return a draft's packed fc [H, taps * H] for features that are rotated, packed again."""
    taps = fc.float().unflatten(1, (-1, len(rotation)))
    return frozen(backend.pack_weight((taps @ rotation).flatten(1).to(fc.dtype)))


def turned_back(
    config: EngineConfig,
    draft: DFlashConfig,
    weights: Weights,
    rotation: Tensor,
    embedding: nn.Parameter,
    lm_head: nn.Parameter,
    open_original: Callable[[Checkpoint], Weights],
    backend: Backend,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the target's embedding [V, H] and this rank's rows of its head as a draft was trained with them.

    Only what the draft's checkpoint lacks is changed. `open_original` gets the file of the original that holds the last
    norm. Raises UnsupportedError if the original of a borrowed head is not given.
    """
    borrows = draft.decoder.hidden_size == draft.target_hidden_size
    if borrows and "embed_tokens.weight" not in weights:
        embedding = frozen((embedding.float() @ rotation.T).to(embedding.dtype))
    if borrows and not ("lm_head.weight" in weights or draft.decoder.tie_word_embeddings):
        if config.draft_head_from is None:
            raise UnsupportedError(
                f"{config.draft} borrows the head of {config.target}, whose weights are rotated (QuaRot) and have lost "
                "the last norm. Give the model's original in bfloat16 as --draft-head-from, or a draft with its own "
                "head, or --no-speculation"
            )
        original = open_original(Checkpoint(find_file_of("norm.weight", config.draft_head_from)))
        gamma = original.get("norm.weight", len(rotation), dtype=torch.float32)
        lm_head = frozen(backend.pack_weight((lm_head.float() @ rotation.T / gamma).to(lm_head.dtype)))
    return embedding, lm_head
