"""What to load: shapes, dtype and sizes, from settings, checkpoints' shapes and the device. No file is read."""

import logging
from dataclasses import dataclass, replace

import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.read import Models
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.device.base import Backend, Defaults
from app.engine.dflash.context_kv import MAX_PENDING
from app.engine.dflash.draft_pages import window_pages
from app.engine.errors import UnsupportedError
from app.engine.load.refusals import Facts, check
from app.engine.models.page_pool import SCRATCH_PAGES
from app.engine.models.weights import shard
from app.engine.quantised import QuantisedWeight
from app.engine.schedule.graph_sizes import GraphSizes
from app.engine.step.graph_plan import plan_graphs

logger = logging.getLogger(__name__)

MIN_BATCHED_TOKENS = 2048
PREFILL_SHARE = 512
"""Rows that a derived token budget leaves for prefill when every sequence verifies a whole block."""
_DRAFT_KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Settled sizes."""

    block_size: int  # 1 without a draft
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    scratch_pages: int = SCRATCH_PAGES  # the first pages, where padded page tables and padding rows point
    draft_window: int = 0  # tokens before a sequence's rows that separate pages of the draft keep, 0 without such pages
    window_pages: int = 0  # separate pages of a decoding sequence

    @property
    def padded_len(self) -> int:
        """Return the positions that tables reach: two blocks past the limit, because no draft block is cut there."""
        return self.max_model_len + 2 * self.block_size

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.padded_len // self.page_size)

    @property
    def most_pages(self) -> int:
        """Return the pages that all sequences can use, with scratch pages."""
        return self.max_num_seqs * self.pages_per_sequence + self.scratch_pages


@dataclass(frozen=True, slots=True)
class Plan:
    """Shapes, dtype and sizes of an engine, or of one rank's slice of it."""

    config: EngineConfig
    target: DecoderConfig
    draft: DFlashConfig | None
    dtype: torch.dtype
    sizes: Sizes
    graph_sizes: GraphSizes | None
    sharing: int = 1  # ranks that share one memory: all of them on a host, else one
    draft_kind: torch.dtype | None = None  # the 8 bits that the draft is rounded to
    num_pages: int = 0  # settled last

    @property
    def decoders(self) -> list[DecoderConfig]:
        return [self.target, *([self.draft.decoder] if self.draft else [])]

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of recurrent states."""
        return torch.bfloat16 if self.config.mamba_ssm_cache_dtype == "bfloat16" else torch.float32

    @property
    def whole_draft(self) -> bool:
        """Return True if every rank has all of the draft's layers."""
        return self.config.draft_tensor_parallel_size == 1

    @property
    def max_rows(self) -> int:
        """Return the target rows of the widest step, padding included."""
        return max(self.sizes.max_num_batched_tokens, self.graph_sizes.max_rows if self.graph_sizes else 0)

    def shard(self, size: int) -> "Plan":
        """Return the plan of one of `size` ranks, which has a slice of the target and of a draft that is split."""
        draft = self.draft
        if draft and not self.whole_draft:
            draft = replace(draft, decoder=shard(draft.decoder, size))
        return replace(self, target=shard(self.target, size), draft=draft)


def make_plan(config: EngineConfig, models: Models, backend: Backend) -> Plan:
    """Return the plan of all ranks together. Raises UnsupportedError for a wish that cannot be met."""
    target, draft = models.target, models.draft
    dtype = dtype_of(config, target, backend)
    check(Facts(config, target, draft, name_of(dtype)))
    block_size = draft.block_size if draft else 1
    sizes = settle_sizes(config, block_size, target.max_position_embeddings, backend.defaults)
    graph_sizes = plan_graphs(config, sizes.max_num_seqs, block_size, backend)
    if graph_sizes:
        sizes = replace(sizes, scratch_pages=-(-graph_sizes.max_rows // sizes.page_size))
    windows = [mask.window or 0 for mask in draft.decoder.masks] if draft else [0]
    if min(windows):
        window = max(*windows, MAX_PENDING)  # rows of up to MAX_PENDING steps may be written late
        sizes = replace(sizes, draft_window=window, window_pages=window_pages(window, block_size, sizes.page_size))
    sharing = config.tensor_parallel_size if backend.memory_is_host else 1
    return Plan(config, target, draft, dtype, sizes, graph_sizes, sharing, draft_kind(config, draft, dtype, backend))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(config: EngineConfig, target: DecoderConfig, backend: Backend) -> torch.dtype:
    """Return the given dtype. "auto" is the checkpoint's, if the backend has no reason against it."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    stored, default = _DTYPES.get(target.dtype, torch.float32), backend.defaults.dtype
    is_narrow = stored.itemsize < default.itemsize
    moe = target.moe
    inner = moe.num_experts * moe.intermediate_size if moe else target.intermediate_size
    if reason := backend.why_not(stored, 2 * inner * target.hidden_size):
        half = f"; --dtype {name_of(stored)} takes half the memory" if is_narrow else ""
        logger.info("dtype %s, not the checkpoint's %s: %s%s", name_of(default), name_of(stored), reason, half)
        return default
    if is_narrow:
        why = "products read half the bytes here"
        exact = "takes twice the memory, and leaves texts with drafts equal but for margins below 1e-4"
        logger.info("dtype %s, like the checkpoint: %s; --dtype %s %s", name_of(stored), why, name_of(default), exact)
    return stored


def draft_kind(
    config: EngineConfig, draft: DFlashConfig | None, dtype: torch.dtype, backend: Backend
) -> torch.dtype | None:
    """Return the 8 bits that the draft's weights become, or None if they stay, because the settings say so, or because
    the device does not multiply by them."""
    asked = config.draft_quantization
    kind = _DRAFT_KINDS.get(asked)
    if asked == "auto" and dtype == torch.bfloat16:
        kind = backend.defaults.draft_kind
    if draft is None or kind is None:
        return None
    row = torch.empty(1, draft.decoder.hidden_size, dtype=dtype, device="meta")
    if backend.multiplies(QuantisedWeight.rounded(row, kind)):
        return kind
    if asked != "auto":
        text = "--draft-quantization %s: left out, because %s does not multiply by it with this draft in %s"
        logger.warning(text, asked, backend.device, name_of(dtype))
    return None


def settle_sizes(config: EngineConfig, block_size: int, model_limit: int, defaults: Defaults) -> Sizes:
    """Fill in sizes that the user left open. Raises UnsupportedError, with a number to use, if sizes do not fit."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        most = min(defaults.max_num_seqs, defaults.max_blocks if block_size > 1 else defaults.max_num_seqs)
        seqs = most if tokens is None else max(1, min(most, tokens // block_size))
    if tokens is None:
        tokens = max(MIN_BATCHED_TOKENS, seqs * block_size + PREFILL_SHARE)
    if tokens < seqs * block_size:
        raise UnsupportedError(
            f"--max-num-batched-tokens {tokens} is too small: {seqs} sequences verify blocks of {block_size} rows; "
            f"give at least {seqs * block_size}"
            + (f", or --max-num-seqs {tokens // block_size} at most" if tokens >= block_size else "")
        )
    return Sizes(block_size, config.max_model_len or model_limit, seqs, tokens, config.page_size or defaults.page_size)
