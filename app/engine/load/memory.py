"""The split of memory: weights, recurrent states, the widest step, and KV in the rest."""

import logging
import math
from dataclasses import replace
from functools import partial

import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.gguf import GGUF_FILE
from app.engine.checkpoint.gguf_folder import weights_of
from app.engine.comm.comm import Comm
from app.engine.device.base import Backend
from app.engine.device.gated_delta import CHUNK
from app.engine.dflash.draft_pages import num_draft_pages
from app.engine.errors import UnsupportedError
from app.engine.load.plan import PREFILL_SHARE, Plan, Sizes
from app.engine.models.kv_pool import bytes_per_token
from app.engine.models.state_pool import StatePool
from app.engine.models.weights import Weights
from app.engine.quantised import QuantisedWeight
from app.engine.schedule.state_slots import StateSlots

logger = logging.getLogger(__name__)

SIZES_ONLY = partial(torch.empty, device="meta")
"""Makes tensors without memory."""
MIN_MODEL_LEN = 2
"""A token of prompt and one of answer."""
CPU_KV_BYTES = 4 << 30
"""KV memory on a CPU if none is given. At most half of free memory, because steps and other processes need the rest."""
CHECKPOINT_INTERVAL = PREFILL_SHARE
"""Tokens between the positions where prompts are cut and their states kept: one chunk of prefill reaches the next."""
PER_SEQUENCE = 2
"""Checkpoints for each sequence that may run, if the user gives no number: after its prompt and after its answer."""
CHECKPOINTS_FRACTION = 1 / 4
"""Checkpoints take at most 1/4 of free memory by default; KV needs the rest."""


def check_weights(plan: Plan, target: Weights, draft: Weights | None, backend: Backend, comm: Comm) -> None:
    """Raise UnsupportedError with both numbers if the weights are larger than the memory that is free."""
    config = plan.config
    slices = comm.size // plan.sharing  # a rank has a slice of products, and all of embeddings and norms
    to = torch.int8 if config.quantization == "int8" else None
    sizes = {config.target: target.num_bytes(backend.multiplies, to=to) // slices}
    if config.draft and draft:
        whole = draft.num_bytes(backend.multiplies, to=plan.draft_kind)
        if plan.draft_kind and plan.draft:  # in addition to the head that it is made from, which may be the target's
            shape = plan.draft.draft_vocab_size, plan.draft.decoder.hidden_size
            head = QuantisedWeight.rounded(SIZES_ONLY(shape, dtype=plan.dtype), plan.draft_kind)
            whole += head.nbytes if backend.multiplies(head) else 0
        sizes[config.draft] = whole // (1 if plan.whole_draft else slices)
    needed, free = sum(sizes.values()), comm.minimum(backend.memory()[0])  # no rank has read weights before this
    listed = " and ".join(f"{size >> 20} MiB of {weights_of(folder)}" for folder, size in sizes.items())
    told = f"the weights take {needed >> 20} MiB ({listed}), and {free >> 20} MiB are free on {backend.device}"
    logger.info(told)
    if needed > free:
        widened = f"; of a GGUF file they take {plan.dtype.itemsize} bytes a weight, whatever its types"
        why = widened if (config.target / GGUF_FILE).exists() else ""
        raise UnsupportedError(f"{told}, too few: free some, or give a smaller model or --quantization int8{why}")


def make_states(plan: Plan, backend: Backend, comm: Comm) -> StatePool | None:
    """Return slots for all sequences, a spare one, and the checkpoints of the prefix cache (`schedule/state_slots.py`),
    as many on all ranks, or None if no layer is recurrent. Raises UnsupportedError if they do not fit."""
    if plan.target.gated_delta is None:
        return None
    num_slots = plan.sizes.max_num_seqs + 1
    slot = plan.sizes.block_size, plan.dtype
    pool = partial(StatePool, state_dtype=plan.state_dtype)
    needed = plan.sharing * pool(plan.target.gated_delta, num_slots, *slot, SIZES_ONLY).nbytes
    if needed > (free := backend.memory()[0]):
        raise UnsupportedError(
            f"recurrent state of --max-num-seqs {num_slots - 1} takes {needed >> 20} MiB, and {free >> 20} MiB are "
            f"free on {backend.device}: give a smaller number"
        )
    num_checkpoints = 0
    if plan.config.prefix_caching:
        size = needed // (num_slots + 1)
        num_checkpoints = comm.minimum(checkpoints_in(plan.config, plan.sizes, size, free - needed, backend))
    return pool(plan.target.gated_delta, num_slots + num_checkpoints, *slot, backend.zeros, num_checkpoints)


def checkpoints_in(config: EngineConfig, sizes: Sizes, size: int, free: int, backend: Backend) -> int:
    """Return the number of checkpoints of `size` bytes for `free` bytes. Raises UnsupportedError if the given
    --state-cache-memory holds none or exceeds them."""
    wanted = config.state_cache_memory
    if wanted is None:
        number = min(PER_SEQUENCE * sizes.max_num_seqs, max(0, int(free * CHECKPOINTS_FRACTION) // size))
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
            f"{backend.device} in addition to the states of --max-num-seqs {sizes.max_num_seqs}"
        )
    return wanted // size


def make_state_slots(states: StatePool, sizes: Sizes) -> StateSlots:
    """Return the slots of `states` for the scheduler, all of them free."""
    interval = math.lcm(sizes.page_size, CHUNK)
    interval *= max(1, CHECKPOINT_INTERVAL // interval)
    return StateSlots(sizes.max_num_seqs, states.num_checkpoints, interval)


def kv_bytes(plan: Plan, backend: Backend, states: StatePool | None, step: int) -> int:
    """Return the bytes for KV: as given, or the rest after the weights and the `step` bytes of steps.
    Raises UnsupportedError if the given number does not fit."""
    free, total = backend.memory()
    if backend.memory_is_host and states:  # a host counts memory when it is first written
        free -= plan.sharing * states.nbytes
    wanted = plan.config.kv_cache_memory
    if wanted is None:
        rest = int(total * plan.config.memory_utilization) - (total - free) - step
        return min(CPU_KV_BYTES, free // 2) if backend.memory_is_host else rest
    if wanted + step > free:
        rows = f" next to {step >> 20} MiB for a step of {plan.sizes.max_num_batched_tokens} rows" if step else ""
        raise UnsupportedError(
            f"--kv-cache-memory {wanted >> 20}MiB does not fit: {free >> 20} MiB are free on "
            f"{backend.device}; give at most {max(0, free - step) >> 20}MiB{rows}"
        )
    return wanted


def with_pages(plan: Plan, kv_bytes: int) -> Plan:
    """Return the plan with the pages that `kv_bytes` hold. The draft gets separate ones only if they are fewer."""
    sizes = plan.sizes
    separate = num_draft_pages(sizes)
    target_bytes, *rest = (plan.sharing * bytes_per_token(each, plan.dtype) for each in plan.decoders)
    draft_bytes = sum(rest)
    shared = min(sizes.most_pages, kv_bytes // (sizes.page_size * (target_bytes + draft_bytes)))
    least = sizes.pages_per_sequence + sizes.scratch_pages if plan.config.max_model_len else 0
    if 0 < separate < max(shared, least):
        reserved = separate * sizes.page_size * draft_bytes
        sizes, num_pages = settle_pages(plan.config, sizes, kv_bytes, target_bytes, reserved)
        logger.info(
            "KV: %d pages, and %d separate ones of a windowed draft, not %d for both", num_pages, separate, shared
        )
    else:
        sizes = replace(sizes, draft_window=0, window_pages=0)
        sizes, num_pages = settle_pages(plan.config, sizes, kv_bytes, target_bytes + draft_bytes)
    return replace(plan, sizes=sizes, num_pages=num_pages)


def settle_pages(
    config: EngineConfig, sizes: Sizes, kv_bytes: int, token_bytes: int, reserved: int = 0
) -> tuple[Sizes, int]:
    """Return the sizes, and the pages in `kv_bytes` less `reserved` bytes, with scratch pages, at most as many as all
    sequences can use. One sequence of `max_model_len` must fit, which is shortened until it does, with a warning, if
    the user left it open. Otherwise raises UnsupportedError with the numbers."""
    page_bytes = sizes.page_size * token_bytes
    num_pages = max(0, kv_bytes - reserved) // page_bytes
    needed = sizes.pages_per_sequence + sizes.scratch_pages
    enough = f"--kv-cache-memory {-(-(needed * page_bytes + reserved) // 2**20)}MiB"
    given = f"{max(0, kv_bytes) / 2**20:.0f} MiB for KV"
    if num_pages < needed and config.max_model_len is None:
        fitting = (num_pages - sizes.scratch_pages) * sizes.page_size - 2 * sizes.block_size
        if fitting >= MIN_MODEL_LEN:
            logger.warning(
                "context shortened from %d to %d tokens, because %s hold no more: give %s, or --max-model-len %d",
                *(sizes.max_model_len, fitting, given, enough, fitting),
            )
            sizes = replace(sizes, max_model_len=fitting)
            needed = num_pages
    if num_pages < needed:
        raise UnsupportedError(
            f"{given} hold {num_pages} pages of {sizes.page_size} tokens, but one sequence of --max-model-len "
            f"{sizes.max_model_len} needs {needed}: give {enough}, or a smaller --max-model-len"
        )
    return sizes, min(num_pages, sizes.most_pages)
