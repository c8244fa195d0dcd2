"""Sizes of an engine, settled from the wishes of an EngineConfig."""

from dataclasses import dataclass, replace

import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import Defaults
from app.engine.errors import UnsupportedError
from app.engine.schedule.page_pool import SCRATCH_PAGES

MIN_BATCHED_TOKENS = 2048
MIN_MODEL_LEN = 2
"""A token of prompt and one of answer."""
PREFILL_SHARE = 512
"""Rows a derived token budget leaves to prefill when every sequence verifies a whole block."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Settled sizes. `block_size` is 1 without a draft. A sequence's pages cover `padded_len` positions.

    Padded page tables and padding rows point to the first `scratch_pages` pages.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    scratch_pages: int = SCRATCH_PAGES

    @property
    def padded_len(self) -> int:
        """Return the positions that tables reach: two blocks past the limit, because no draft block is cut there."""
        return self.max_model_len + 2 * self.block_size

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.padded_len // self.page_size)


def settle_sizes(config: EngineConfig, block_size: int, model_limit: int, defaults: Defaults) -> Sizes:
    """Fill in sizes that the user left open. Raises UnsupportedError, with a number to use, if sizes do not fit."""
    max_model_len = config.max_model_len or model_limit
    if not MIN_MODEL_LEN <= max_model_len <= model_limit:
        raise UnsupportedError(
            f"--max-model-len {max_model_len} is outside {MIN_MODEL_LEN}..{model_limit}: config.json allows "
            f"{model_limit} positions; a longer context needs rope_scaling of type yarn there"
        )
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = defaults.max_num_seqs if tokens is None else max(1, min(defaults.max_num_seqs, tokens // block_size))
    if tokens is None:
        tokens = max(MIN_BATCHED_TOKENS, seqs * block_size + PREFILL_SHARE)
    if tokens < seqs * block_size:
        raise UnsupportedError(
            f"--max-num-batched-tokens {tokens} is too small: {seqs} sequences verify blocks of {block_size} rows; "
            f"give at least {seqs * block_size}"
            + (f", or --max-num-seqs {tokens // block_size} at most" if tokens >= block_size else "")
        )
    return Sizes(block_size, max_model_len, seqs, tokens, config.page_size or defaults.page_size)


def settle_pages(config: EngineConfig, sizes: Sizes, kv_bytes: int, token_bytes: int) -> tuple[Sizes, int]:
    """Return the sizes, and the pages in `kv_bytes` with scratch pages, at most as many as all sequences can use.

    One sequence of `max_model_len` must fit. If the user left that open, it is shortened until it does. Otherwise
    raises UnsupportedError with the numbers.
    """
    page_bytes = sizes.page_size * token_bytes
    num_pages = max(0, kv_bytes) // page_bytes
    needed = sizes.pages_per_sequence + sizes.scratch_pages
    if num_pages < needed and config.max_model_len is None:
        fitting = (num_pages - sizes.scratch_pages) * sizes.page_size - 2 * sizes.block_size
        if fitting >= MIN_MODEL_LEN:
            sizes = replace(sizes, max_model_len=fitting)
            needed = num_pages
    if num_pages < needed:
        raise UnsupportedError(
            f"{max(0, kv_bytes) / 2**20:.0f} MiB for KV hold {num_pages} pages of {sizes.page_size} tokens, but one "
            f"sequence of --max-model-len {sizes.max_model_len} needs {needed}: give --kv-cache-memory "
            f"{-(-needed * page_bytes // 2**20)}MiB, or a smaller --max-model-len"
        )
    return sizes, min(num_pages, sizes.max_num_seqs * sizes.pages_per_sequence + sizes.scratch_pages)


def bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of one token in all layers with attention."""
    return 2 * config.num_kv_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
