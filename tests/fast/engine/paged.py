"""Paged attention with a dense answer. Pages are shuffled, and slots that no row may read hold garbage."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv

Numbers = tuple[Tensor, Tensor, Tensor]
"""q of a sequence's query rows, and k and v of all its tokens, each [T, heads, D]."""


@dataclass
class Paged:
    """Sequences of `host_seq_lens` tokens, of which the last `query_lens` are queried.

    Slots past a sequence's tokens, and pages without an owner, page 0 among them, hold `garbage`. Columns of the page
    table past a sequence's pages hold `filler`. `numbers` are drawn unless they are given.
    """

    query_lens: list[int]
    host_seq_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    causal: bool = True
    window: int | None = None
    sinks: Tensor | None = None
    dtype: torch.dtype = torch.float32
    garbage: float = math.nan
    extra_columns: int = 1
    filler: int = 0
    seed: int = 0
    numbers: list[Numbers] | None = None

    def __post_init__(self) -> None:
        noise = torch.Generator().manual_seed(self.seed)

        def draw(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, self.dim, generator=noise).to(self.dtype)

        self.numbers = self.numbers or [
            (draw(q_len, self.heads), draw(kv_len, self.kv_heads), draw(kv_len, self.kv_heads))
            for q_len, kv_len in zip(self.query_lens, self.host_seq_lens, strict=True)
        ]
        counts = [-(-kv_len // self.page_size) for kv_len in self.host_seq_lens]
        shuffled = 1 + torch.randperm(sum(counts) + 3, generator=noise)
        self.pages = [own.tolist() for own in shuffled[: sum(counts)].split(counts)]
        shape = (len(shuffled) + 1, self.page_size, self.kv_heads, self.dim)
        self.kv = LayerKv(*(torch.full(shape, self.garbage, dtype=self.dtype) for _ in range(2)))
        table = torch.full((len(counts), max(counts) + self.extra_columns), self.filler, dtype=torch.int32)
        for line, own, (_, k, v) in zip(table, self.pages, self.numbers, strict=True):
            line[: len(own)] = torch.tensor(own)
            tokens = torch.arange(len(k))
            for pool, part in ((self.kv.k, k), (self.kv.v, v)):
                pool[line[tokens // self.page_size].long(), tokens % self.page_size] = part
        starts, lengths = (
            torch.tensor(x, dtype=torch.int32) for x in ([0, *accumulate(self.query_lens)], self.host_seq_lens)
        )
        self.meta = AttentionMetadata(starts, lengths, table, self.query_lens, self.host_seq_lens, self.page_size)

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(self.causal, self.window)

    @property
    def q(self) -> Tensor:
        """[T, heads, D] of all sequences."""
        return torch.cat([q for q, _, _ in self.numbers])

    def run(self, backend: Any) -> Tensor:
        self.meta.plans[self.mask] = backend.plan_attention(self.meta, self.mask, self.heads // self.kv_heads)
        return backend.attention(self.q, self.kv, self.meta, self.mask, self.sinks)

    @property
    def expected(self) -> Tensor:
        """A dense attention in float64."""
        return torch.cat([self._of_one(*(x.double().transpose(0, 1) for x in one)) for one in self.numbers])

    def _of_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(self.dim)
        rows, tokens = scores.shape[1:]
        ahead = torch.arange(tokens) - torch.arange(tokens - rows, tokens)[:, None]
        hidden = (ahead > 0) & self.causal
        if self.window is not None:
            hidden |= ahead.abs() >= self.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, rows, 1)), dim=2)
        return (scores.softmax(dim=-1)[..., :tokens] @ v).transpose(0, 1)


def attended(backend: Any, shares: list[tuple[Numbers, int, int]], mask: AttentionMask, **how: Any) -> list[Tensor]:
    """Attention of the rows [start, end) of whole sequences, one result a sequence."""
    numbers = [(q[start:end], k[:end], v[:end]) for (q, k, v), start, end in shares]
    lens, ends = [end - start for _, start, end in shares], [end for *_, end in shares]
    case = Paged(lens, ends, causal=mask.causal, window=mask.window, dtype=numbers[0][0].dtype, numbers=numbers, **how)
    return [*case.run(backend).split(lens)]
