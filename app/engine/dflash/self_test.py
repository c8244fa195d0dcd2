"""Check of the attentions that DFlash needs, before any weight is loaded."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool

TOLERANCE = 0.02
"""Largest error as a share of the largest value: bf16 rounding is far below it, a wrong mask far above."""


def check_attention(backend: Backend, decoder: DecoderConfig, page_size: int, rows: int, dtype: torch.dtype) -> None:
    """Compare attention, causal, bidirectional and under the masks of `decoder`, with PyTorch's on the CPU in fp32.

    Raises UnsupportedError for another result: a draft under a causal mask would have right text and no speed.
    """
    masks = [AttentionMask(causal=True), AttentionMask(causal=False), *decoder.masks]
    masks = [*dict.fromkeys(mask._replace(window=mask.window and min(mask.window, page_size)) for mask in masks)]
    found = _attentions(backend, decoder, masks, page_size, rows, dtype, dtype)
    reference = TorchBackend(torch.device("cpu"))
    wanted = _attentions(reference, decoder, masks, page_size, rows, dtype, torch.float32)
    for mask, got, want in zip(masks, found, wanted, strict=True):
        error = float((got - want).abs().max() / want.abs().max())
        if not error < TOLERANCE:
            raise UnsupportedError(
                f"{backend.device}: {mask} attention over {rows} rows, head_dim "
                f"{decoder.head_dim}, pages of {page_size} is wrong here (error {error:.3f}): DFlash cannot run on it"
            )


def _attentions(
    backend: Backend,
    decoder: DecoderConfig,
    masks: list[AttentionMask],
    page_size: int,
    rows: int,
    rounded: torch.dtype,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """Yield the attention under each mask in fp32, of random numbers that are `rounded`, with the decoder's sinks.

    Two sequences of `rows` rows lie on scattered pages. A window of a page hides tokens of every row of the second.
    """
    seq_lens = [rows + 1, rows + page_size]
    width = -(-seq_lens[1] // page_size)
    tables = torch.stack((torch.arange(1, 2 * width, 2).flip(0), torch.arange(0, 2 * width, 2)))
    pool = KvPool(replace(decoder, num_layers=1, gated_delta=None), 2 * width, page_size, dtype, backend)
    noise = torch.Generator().manual_seed(0)

    def random(num_rows: int, heads: int) -> Tensor:
        return torch.randn(num_rows, heads, decoder.head_dim, generator=noise).to(rounded).to(backend.device, dtype)

    def int32(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(backend.device)

    slots = (tables[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    k, v = (random(sum(seq_lens), decoder.num_kv_heads) for _ in range(2))
    backend.write_kv(k, v, pool.layers[0], int32(torch.cat([slots[i, :n] for i, n in enumerate(seq_lens)])))
    q, sinks = random(2 * rows, decoder.num_heads), None
    if decoder.sinks:
        sinks = backend.pack_sinks(torch.linspace(-1, 2, decoder.num_heads).to(backend.device, dtype))
    for mask in masks:
        lengths = int32([0, rows, 2 * rows]), int32(seq_lens), int32(tables)
        meta = AttentionMetadata(*lengths, [rows, rows], seq_lens, page_size)
        meta.plans[mask] = backend.plan_attention(meta, mask, decoder.num_heads // decoder.num_kv_heads)
        yield backend.attention(q, pool.layers[0], meta, mask, sinks).float().cpu()
