"""Check of the attentions that DFlash needs, before any weight is loaded."""

from dataclasses import replace

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool
from app.engine.schedule.page_pool import SCRATCH_PAGES

TOLERANCE = 0.02
"""Largest error as a share of the largest value: bf16 rounding is far below it, a wrong mask far above."""


def check_attention(backend: Backend, decoder: DecoderConfig, page_size: int, rows: int, dtype: torch.dtype) -> None:
    """Run attention, causal, bidirectional and under the masks of `decoder`, with its sinks if any.

    Two sequences of `rows` rows lie on scattered pages. A window is narrowed until it hides tokens of every row of the
    second. Raises UnsupportedError for another result: a draft under a causal mask would have right text and no speed.
    """
    host_seq_lens = [rows + 1, rows + page_size]
    width = -(-host_seq_lens[1] // page_size)
    pages = torch.arange(2 * width) + SCRATCH_PAGES
    tables = torch.stack((pages[1::2].flip(0), pages[::2]))
    one_layer = replace(decoder, num_layers=1, gated_delta=None)
    pool = KvPool(one_layer, 2 * width + SCRATCH_PAGES, page_size, dtype, backend)
    noise = torch.Generator().manual_seed(0)

    def random(num_rows: int, heads: int) -> Tensor:
        return torch.randn(num_rows, heads, decoder.head_dim, generator=noise).to(backend.device, dtype)

    def int32(values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(backend.device)

    slots = (tables[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    k, v = (random(sum(host_seq_lens), decoder.num_kv_heads) for _ in range(2))
    backend.write_kv(k, v, pool.layers[0], int32(torch.cat([slots[i, :n] for i, n in enumerate(host_seq_lens)])))
    q = random(2 * rows, decoder.num_heads)
    sinks = torch.linspace(-1, 2, decoder.num_heads) if decoder.sinks else None
    on_device = None if sinks is None else backend.pack_sinks(sinks.to(backend.device, dtype))

    masks = [AttentionMask(causal=True), AttentionMask(causal=False), *decoder.masks]
    for mask in dict.fromkeys(mask._replace(window=mask.window and min(mask.window, page_size)) for mask in masks):
        lengths = int32([0, rows, 2 * rows]), int32(host_seq_lens), int32(tables)
        meta = AttentionMetadata(*lengths, [rows, rows], host_seq_lens, page_size)
        meta.plans[mask] = backend.plan_attention(meta, mask, decoder.num_heads // decoder.num_kv_heads)
        got = backend.attention(q, pool.layers[0], meta, mask, on_device).float()
        qs, ks, vs = (x.float().split(lens) for x, lens in ((q, [rows, rows]), (k, host_seq_lens), (v, host_seq_lens)))
        want = torch.cat([_dense(*one, mask, sinks) for one in zip(qs, ks, vs, strict=True)])
        error = float((got - want).abs().max() / want.abs().max())
        if not error < TOLERANCE:
            raise UnsupportedError(
                f"{backend.device}: {mask} attention over {rows} rows, head_dim "
                f"{decoder.head_dim}, pages of {page_size} is wrong here (error {error:.3f}): DFlash cannot run on it"
            )


def _dense(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, mask: AttentionMask, sinks: Tensor | None) -> Tensor:
    """Return one sequence's attention in fp32. Its rows are the last of its tokens."""
    group = q_thd.shape[1] // k_thd.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q_thd, k_thd, v_thd))
    scores = q @ k.repeat_interleave(group, dim=0).transpose(1, 2) * q.shape[-1] ** -0.5
    rows, tokens = scores.shape[1:]
    distance = torch.arange(tokens - rows, tokens)[:, None] - torch.arange(tokens)
    hidden = torch.zeros(rows, tokens, dtype=torch.bool)
    if mask.causal:
        hidden |= distance < 0
    if mask.window is not None:
        hidden |= distance.abs() >= mask.window
    scores = scores.masked_fill(hidden.to(q.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.device)[:, None, None].expand(-1, rows, 1)), dim=2)
    return (scores.softmax(dim=-1)[:, :, :tokens] @ v.repeat_interleave(group, dim=0)).transpose(0, 1)
