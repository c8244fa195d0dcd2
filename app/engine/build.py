"""From an EngineConfig to a warm EngineCore: backend, weights, sizes, KV memory, checks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from app.engine.backend import Backend, make_backend
from app.engine.config import EngineConfig, Sizes, settle_pages, settle_sizes
from app.engine.core import EngineCore
from app.engine.decoder_config import DecoderConfig, read_config
from app.engine.dflash.config import DFlashConfig
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.dflash.model import DFlashModel
from app.engine.errors import UnsupportedError
from app.engine.kv_cache import PagePool
from app.engine.kv_pool import KvPool, bytes_per_token
from app.engine.layers import RotaryTable
from app.engine.loader import SafetensorsWeights
from app.engine.model_runner import ModelRunner
from app.engine.models.qwen3 import Qwen3, qwen3_config
from app.engine.sampler import LOGITS_CHUNK_BYTES, Sampler
from app.engine.scheduler import Scheduler
from app.engine.sequence import Request

M = TypeVar("M")
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total): stage "target" and "draft" in bytes, "warm-up" in steps."""

CPU_KV_BYTES = 1 << 30
"""KV memory on a CPU when nothing is asked for: a laptop's memory is not the server's to fill."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine and what it settled on. `draft` is None for a target alone."""

    core: EngineCore
    sizes: Sizes
    num_pages: int
    device: str
    dtype: str
    target: DecoderConfig
    draft: DFlashConfig | None


def build_engine(config: EngineConfig, on_progress: Progress = lambda *_: None) -> Engine:
    """Raises UnsupportedError, before any weight is read where it can, for what we would run wrongly."""
    backend = make_backend(config.device)
    target_config = qwen3_config(read_config(config.target))
    draft_config = None
    if config.draft is not None:
        draft_config = DFlashConfig.from_json(read_config(config.draft), target_config, config.block_size)
    block_size = draft_config.block_size if draft_config else 1
    sizes = settle_sizes(config, block_size, target_config.max_position_embeddings, backend.defaults)
    decoders = [target_config, *([draft_config.decoder] if draft_config else [])]
    backend.check(block_size, {decoder.head_dim for decoder in decoders})
    dtype = backend.defaults.dtype if config.dtype == "auto" else _DTYPES[config.dtype]

    taps = draft_config.taps if draft_config else ()
    target = _load(
        config.target, "target", backend, dtype, on_progress, lambda w: Qwen3(target_config, w, backend, taps)
    )
    model = None
    if draft_config and config.draft:
        model = _load(
            config.draft,
            "draft",
            backend,
            dtype,
            on_progress,
            lambda w: DFlashModel(draft_config, w, backend, target.embedding, target.lm_head),
        )

    kv_bytes = config.kv_cache_memory or _kv_bytes(config, sizes, target_config, dtype, backend)
    num_pages = settle_pages(sizes, kv_bytes, sum(bytes_per_token(decoder, dtype) for decoder in decoders))
    sampler = Sampler(target_config.vocab_size, backend)
    rotaries = [RotaryTable(d.head_dim, d.rope_theta, sizes.padded_len, dtype, backend.device) for d in decoders]
    pools = [KvPool(d, num_pages, sizes.page_size, dtype, backend.device) for d in decoders]
    drafter = DFlashDrafter(model, pools[1], rotaries[1], sampler, backend) if model else None
    runner = ModelRunner(
        target,
        pools[0],
        rotaries[0],
        sampler,
        backend,
        page_size=sizes.page_size,
        block_size=block_size,
        drafter=drafter,
    )
    scheduler = Scheduler(
        PagePool(num_pages, sizes.page_size),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        block_size=block_size,
    )
    core = EngineCore(scheduler, runner)
    _warm_up(core, sizes, on_progress)
    name = str(dtype).removeprefix("torch.")
    return Engine(core, sizes, num_pages, str(backend.device), name, target_config, draft_config)


def _load(
    folder: Path,
    stage: str,
    backend: Backend,
    dtype: torch.dtype,
    on_progress: Progress,
    build: Callable[[SafetensorsWeights], M],
) -> M:
    weights = SafetensorsWeights(folder, backend.device, dtype, lambda done, total: on_progress(stage, done, total))
    model = build(weights)
    if unused := weights.unused():
        raise UnsupportedError(
            f"{stage}: {folder} has {len(unused)} tensors this architecture does not use, such as {unused[0]}; "
            "running without them would be wrong"
        )
    return model


def _kv_bytes(config: EngineConfig, sizes: Sizes, target: DecoderConfig, dtype: torch.dtype, backend: Backend) -> int:
    """What is left of the device for KV after the weights, the widest activations and a chunk of logits."""
    free, total = backend.memory()
    if backend.device.type == "cpu":
        return min(CPU_KV_BYTES, int(free * config.memory_utilization))
    widest = 8 * target.hidden_size + 4 * target.intermediate_size
    activations = sizes.max_num_batched_tokens * widest * dtype.itemsize + 3 * LOGITS_CHUNK_BYTES
    return int(total * config.memory_utilization) - (total - free) - activations


def _warm_up(core: EngineCore, sizes: Sizes, on_progress: Progress) -> None:
    """One short request, so that the first client does not pay for lazy initialisation."""
    num_steps = 3
    room = sizes.max_model_len - 1
    core.add(Request("warm-up", (0,), max_tokens=min(num_steps * sizes.block_size, room)))
    for done in range(num_steps):
        if core.has_work:
            core.step()
        on_progress("warm-up", done + 1, num_steps)
    core.abort("warm-up")
