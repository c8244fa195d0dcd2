"""Recurrent state of a hybrid target: where it can run, and its memory."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from app.engine.backend.base import Backend
from app.engine.build.config import Sizes
from app.engine.errors import UnsupportedError
from app.engine.models.config import DecoderConfig
from app.engine.models.state_pool import StatePool
from app.engine_config import EngineConfig

logger = logging.getLogger(__name__)


def check_recurrent(config: EngineConfig, backend: Backend, dtype: torch.dtype) -> None:
    """Raise UnsupportedError if a hybrid target cannot run as the user wishes, and say what it does without."""
    if config.compile:
        raise UnsupportedError(f"--compile: a target with recurrent layers is not supported yet ({config.target})")
    if not backend.runs_recurrent_layers:
        raise UnsupportedError(
            f"{backend.device}: a target with recurrent layers is not supported there yet ({config.target}); "
            "give --device cpu"
        )
    if dtype != torch.float32:
        raise UnsupportedError(
            f"--dtype {str(dtype).removeprefix('torch.')}: a target with recurrent layers runs in float32 alone, "
            "because a narrower dtype rounds its norms and decays"
        )
    if config.prefix_caching:
        logger.info("prefix cache: off, because a cached prefix has no recurrent state yet")


def make_states(shape: DecoderConfig, sizes: Sizes, dtype: torch.dtype, backend: Backend) -> StatePool | None:
    """Return slots for all sequences and one more (`schedule/state_slots.py`), or None if no layer is recurrent.

    Raises UnsupportedError if they do not fit.
    """
    if shape.gated_delta is None:
        return None
    num_slots = sizes.max_num_seqs + 1
    needed = StatePool(shape.gated_delta, num_slots, sizes.block_size, dtype, without_memory).nbytes
    free, _ = backend.memory()
    if needed > free:
        raise UnsupportedError(
            f"recurrent state of --max-num-seqs {sizes.max_num_seqs} takes {needed >> 20} MiB, and {free >> 20} MiB "
            f"are free on {backend.device}: give a smaller number"
        )
    return StatePool(shape.gated_delta, num_slots, sizes.block_size, dtype, backend.zeros)


def without_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that has a size and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
