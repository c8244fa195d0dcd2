"""Paged attention cases with a dense answer. Pages are shuffled, and slots that no row may read hold garbage."""

import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv


@dataclass
class Paged:
    """Return sequences of `host_seq_lens` tokens, of which the last `query_lens` are queried.

    Slots past a sequence's tokens, and pages without an owner, hold `garbage`.
    """

    query_lens: list[int]
    host_seq_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    causal: bool = True
    dtype: torch.dtype = torch.float32
    garbage: float = math.nan
    extra_columns: int = 1
    window: int | None = None
    sinks: Tensor | None = None
    q: Tensor = field(init=False)
    kv: LayerKv = field(init=False)
    meta: AttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        noise = torch.Generator().manual_seed(len(self.query_lens) + sum(self.host_seq_lens))
        counts = [-(-kv_len // self.page_size) for kv_len in self.host_seq_lens]
        pages = (torch.randperm(sum(counts) + 3, generator=noise) + 1).tolist()
        shape = (len(pages) + 1, self.page_size, self.kv_heads, self.dim)
        self.kv = LayerKv(*(torch.full(shape, self.garbage, dtype=self.dtype) for _ in range(2)))
        table = torch.randint(len(pages), (len(counts), max(counts) + self.extra_columns), generator=noise)
        self.contexts = []
        for line, kv_len, count in zip(table, self.host_seq_lens, counts, strict=True):
            line[:count] = torch.tensor([pages.pop() for _ in range(count)])
            tokens = torch.arange(kv_len)
            k, v = (torch.randn(kv_len, *shape[2:], generator=noise).to(self.dtype) for _ in range(2))
            for pool, own in ((self.kv.k, k), (self.kv.v, v)):
                pool[line[tokens // self.page_size], tokens % self.page_size] = own
            self.contexts.append((k.double(), v.double()))
        self.q = torch.randn(sum(self.query_lens), self.heads, self.dim, generator=noise).to(self.dtype)
        query_start_loc, kv_len = (
            torch.tensor(x, dtype=torch.int32) for x in ([0, *accumulate(self.query_lens)], self.host_seq_lens)
        )
        table = table.to(torch.int32)
        self.meta = AttentionMetadata(
            query_start_loc, kv_len, table, self.query_lens, self.host_seq_lens, self.page_size
        )

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(self.causal, self.window)

    @property
    def expected(self) -> Tensor:
        """Row by row, in fp64."""
        rows = []
        for q, (k, v) in zip(torch.split(self.q.double(), self.query_lens), self.contexts, strict=True):
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
            for i in range(len(q)):
                own = len(k) - len(q) + i
                after = own + 1 if self.causal else len(k)
                seen = [t for t in range(after) if self.window is None or abs(t - own) < self.window]
                scores = torch.einsum("hd,thd->ht", q[i], k[seen]) / math.sqrt(self.dim)
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks.double()[:, None]), dim=1)
                rows.append(torch.einsum("ht,thd->hd", scores.softmax(dim=-1)[:, : len(seen)], v[seen]))
        return torch.stack(rows)
