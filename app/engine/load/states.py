"""Memory for the recurrent state of a hybrid target."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.comm.comm import Comm
from app.engine.device.base import Backend
from app.engine.device.gated_delta import CHUNK
from app.engine.errors import UnsupportedError
from app.engine.load.sizes import PREFILL_SHARE, Sizes
from app.engine.models.state_pool import StatePool
from app.engine.schedule.state_slots import StateSlots

logger = logging.getLogger(__name__)

CHECKPOINT_INTERVAL = PREFILL_SHARE
"""Tokens between the places where prompts are cut, and their states kept. So many rows are left to prefill beside full
blocks, so a chunk reaches the next place. The state of a 27B takes as much memory as KV of 2,300 tokens."""
PER_SEQUENCE = 2
"""Checkpoints for each sequence that may run, if the user gives no number: after its prompt and after its answer."""
DEFAULT_SHARE = 4
"""Checkpoints take at most this part of free memory if the user gives no number, because KV needs the most."""


def make_states(
    config: EngineConfig, shape: DecoderConfig, sizes: Sizes, dtype: torch.dtype, backend: Backend, comm: Comm
) -> StatePool | None:
    """Return slots for all sequences, a spare one, and the checkpoints of the prefix cache (`schedule/state_slots.py`).

    The result is None if no layer is recurrent. All ranks have as many slots. Those of one host share its memory, and
    what the user gave of it. Raises UnsupportedError if the slots do not fit.
    """
    if shape.gated_delta is None:
        return None
    num_slots, of_slots = sizes.max_num_seqs + 1, (sizes.block_size, dtype)
    sharing = comm.size if backend.memory_is_host else 1
    needed = sharing * StatePool(shape.gated_delta, num_slots, *of_slots, without_memory).nbytes
    free, _ = backend.memory()
    if needed > free:
        raise UnsupportedError(
            f"recurrent state of --max-num-seqs {sizes.max_num_seqs} takes {needed >> 20} MiB, and {free >> 20} MiB "
            f"are free on {backend.device}: give a smaller number"
        )
    num_checkpoints = 0
    if config.prefix_caching:
        num_checkpoints = checkpoints_in(config, sizes, needed // (num_slots + 1), free - needed, backend)
        num_checkpoints = comm.minimum(num_checkpoints)
    return StatePool(shape.gated_delta, num_slots + num_checkpoints, *of_slots, backend.zeros, num_checkpoints)


def make_state_slots(states: StatePool, sizes: Sizes) -> StateSlots:
    """Return the slots of `states` for the scheduler, all of them free."""
    interval = math.lcm(sizes.page_size, CHUNK)
    interval *= max(1, CHECKPOINT_INTERVAL // interval)
    return StateSlots(sizes.max_num_seqs, states.num_checkpoints, interval)


def checkpoints_in(config: EngineConfig, sizes: Sizes, size: int, free: int, backend: Backend) -> int:
    """Return the number of checkpoints of `size` bytes, if so many bytes are `free`.

    Raises UnsupportedError if the memory that was given holds none, or is not there.
    """
    wanted = config.state_cache_memory
    if wanted is None:
        number = min(PER_SEQUENCE * sizes.max_num_seqs, max(0, free // DEFAULT_SHARE // size))
        if not number:
            logger.warning("prefix cache: off, because a recurrent state takes %d MiB of the free memory", size >> 20)
        return number
    if wanted < size:
        raise UnsupportedError(
            f"--state-cache-memory {wanted >> 20}MiB holds no recurrent state, which takes {-(-size // 2**20)} MiB: "
            f"give at least {-(-size // 2**20)}MiB, or --no-prefix-caching"
        )
    if wanted > free:
        raise UnsupportedError(
            f"--state-cache-memory {wanted >> 20}MiB does not fit: {max(0, free) >> 20} MiB are free on "
            f"{backend.device} beside the states of --max-num-seqs {sizes.max_num_seqs}"
        )
    return wanted // size


def without_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that has a size and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
