"""An operator of a device compared with PyTorch's on the CPU in float32, on the same random numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import AttentionMask, AttentionMetadata, Backend, LayerKv
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError

TOLERANCE = 0.02
"""Largest error as a share of the largest value: bf16 rounding is far below it, a wrong mask far above."""
NUMBER_BYTES = 2
SPLIT_TOKENS = 1500
"""Tokens of a single request that are enough for a device to share them among its cores, and no multiple of a page."""

Prepared = Callable[[], Any]
"""Runs the operator on its inputs. Tensors of the result are compared, one or a tuple of them."""
Lens = Sequence[tuple[int, int]]
"""Query rows and KV tokens of each request."""


@dataclass(slots=True)
class Inputs:
    """Random values of one case on a backend's device, rounded to `rounded` and held in `dtype`: the same on each.
    `past` fills the slots after a request's last token; None leaves random numbers there."""

    backend: Backend
    rounded: torch.dtype
    dtype: torch.dtype
    past: float | None = None
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.put(torch.randn(*shape, generator=self.noise) * scale)

    def put(self, values: Tensor) -> Tensor:
        return values.to(self.rounded).to(self.backend.device, self.dtype)

    def int32(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.backend.device)

    def scattered(self, count: int, below: int) -> Tensor:
        """Return distinct int32 numbers [count]."""
        return self.int32(torch.randperm(below, generator=self.noise)[:count])

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return int32 numbers from `low` to below `high`."""
        return self.int32(torch.randint(low, high, shape, generator=self.noise))

    def pages(self, slots: int, page: int, kv_heads: int, dim: int, *, ordered: bool = False) -> LayerKv:
        """Return pages of random numbers with room for `slots` rows, with K as `ordered` returns it if asked."""
        k, v = (self.normal(-(-slots // page), page, kv_heads, dim) for _ in range(2))
        return LayerKv(self.ordered(k) if ordered else k, v)

    def ordered(self, x: Tensor) -> Tensor:
        """Return x [..., D] with each head's dims in the order of this backend's RoPE."""
        return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if self.backend.interleaved_rope else x

    def restored(self, x: Tensor) -> Tensor:
        """Undo `ordered`, so that results of all backends compare."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.backend.interleaved_rope else x

    def rotation(self, rows: int, dim: int, turning: float = 1.0) -> tuple[Tensor, ...]:
        """Return a `Rotation` that turns the first `turning` of each head's dims."""
        angles = torch.arange(rows * dim // 2).view(rows, -1) / dim
        angles[:, round(turning * dim) // 2 :] = 0.0
        tables = self.backend.rotary_tables(angles, self.rounded)
        rotation = self.backend.rotation_at(tables, self.int32(range(rows)))
        return tuple(part if part.is_complex() else part.to(self.dtype) for part in rotation)


Operator = Callable[[Inputs], Prepared]
"""Makes the inputs on a backend, and returns the call that is compared and timed."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A planned call of a backend's attention over pages."""

    backend: Backend
    q: Tensor
    kv: LayerKv
    meta: AttentionMetadata
    mask: AttentionMask
    sinks: Tensor | None = None

    def __call__(self) -> Tensor:
        return self.backend.attention(self.q, self.kv, self.meta, self.mask, self.sinks)


@dataclass(frozen=True, slots=True)
class Paged:
    """Requests over scattered pages, whose query rows are their last tokens and whose K and V the backend wrote. With
    `sinks` each head has one."""

    lens: Lens
    heads: int
    kv_heads: int
    dim: int
    mask: AttentionMask
    page: int
    sinks: bool = False

    def __call__(self, at: Inputs) -> Attention:
        q_lens, kv_lens = [q for q, _ in self.lens], [kv for _, kv in self.lens]
        counts = [-(-kv // self.page) for kv in kv_lens]
        scattered = at.scattered(sum(counts), sum(counts) + 1).cpu().split(counts)
        # A backend that reads or writes pages in order must show, so no request's table ascends by chance.
        ids = [pages.flip(0) if pages.equal(pages.sort().values) else pages for pages in scattered]
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        kv = at.pages((sum(counts) + 1) * self.page, self.page, self.kv_heads, self.dim)
        for line, pages, kv_len in zip(table, ids, kv_lens, strict=True):
            line[: len(pages)] = pages
            if at.past is not None and kv_len:
                for pool in (kv.k, kv.v):
                    pool[int(pages[-1]), (kv_len - 1) % self.page + 1 :] = at.past
        slots = [
            (pages[:, None] * self.page + torch.arange(self.page)).flatten()[:kv_len]
            for pages, kv_len in zip(ids, kv_lens, strict=True)
        ]
        k, v = (at.normal(sum(kv_lens), self.kv_heads, self.dim) for _ in range(2))
        at.backend.write_kv(k, v, kv, at.int32(torch.cat(slots)))
        starts, lengths, table = (at.int32(x) for x in ([0, *accumulate(q_lens)], kv_lens, table))
        meta = AttentionMetadata(starts, lengths, table, q_lens, kv_lens, self.page)
        meta.plans[self.mask] = at.backend.plan_attention(meta, self.mask, self.heads // self.kv_heads)
        sinks = at.backend.pack_sinks(at.put(torch.linspace(-1, 2, self.heads))) if self.sinks else None
        return Attention(at.backend, at.normal(sum(q_lens), self.heads, self.dim), kv, meta, self.mask, sinks)

    @property
    def moved(self) -> int:
        window = self.mask.window or max(kv for _, kv in self.lens)
        numbers = sum(2 * q * self.heads + 2 * min(kv, q - 1 + window) * self.kv_heads for q, kv in self.lens)
        return NUMBER_BYTES * self.dim * numbers


@torch.inference_mode()
def difference(
    backend: Backend,
    operator: Operator,
    *,
    past: float | None = None,
    dtype: torch.dtype | None = None,
    against: Operator | None = None,
) -> tuple[float, float, Prepared]:
    """Compare `operator` on `backend` with `against`, itself by default, on the CPU. Returns the largest difference,
    its share of the largest value, and the call. They are NaN if a result has one."""
    dtype = dtype or backend.defaults.dtype
    call = operator(Inputs(backend, dtype, dtype, past))
    reference = Inputs(TorchBackend(torch.device("cpu")), dtype, torch.float32, None if past is None else 0.0)
    absolute, relative = [0.0], [0.0]
    results = (tree_leaves(made()) for made in (call, (against or operator)(reference)))
    for got, want in zip(*results, strict=True):
        if isinstance(want, Tensor) and want.numel():
            largest = float(want.double().abs().max())
            absolute.append(float((got.cpu().double() - want.double()).abs().max()))
            relative.append(absolute[-1] / largest if largest else absolute[-1])
    return float(np.max(absolute)), float(np.max(relative)), call


def check_attention(backend: Backend, decoder: DecoderConfig, page_size: int, rows: int, dtype: torch.dtype) -> None:
    """Compare attention over K and V that the backend wrote, causal, bidirectional and under the masks of `decoder`,
    before any weight is loaded.

    Raises UnsupportedError for another result: a draft under a causal mask would have right text and no speed.
    """
    masks = [AttentionMask(causal=True), AttentionMask(causal=False), *decoder.masks]
    masks = list(dict.fromkeys(mask._replace(window=mask.window and min(mask.window, page_size)) for mask in masks))
    # A window of a page hides tokens of every row of the second.
    loads: list[Lens] = [[(rows, rows + 1), (rows, rows + page_size)]]
    if backend.splits_long_requests:
        loads.append([(rows, SPLIT_TOKENS)])
    for mask, lens in product(masks, loads):
        heads = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        _, error, _ = difference(backend, Paged(lens, *heads, mask, page_size, decoder.sinks), dtype=dtype)
        if not error < TOLERANCE:
            raise UnsupportedError(
                f"{backend.device}: {mask} attention over {rows} rows of {max(lens)[1]} tokens, head_dim "
                f"{decoder.head_dim}, pages of {page_size} is wrong here (error {error:.3f}): DFlash cannot run on it"
            )
