"""The launches that are timed at startup, each with operands of the engine's sizes. Nothing else is timed.

A launch has variants where a model of bytes and launches says that one may win 5 % of a step. The model is of Qwen3-8B
on 132 multiprocessors at 4.3 TB/s, with 0.9 us between launches:

| question | variants | wins of a step |
|---|---|---|
| products of 1, 16, 32, 64 rows, by shape | cuBLAS; `products.VARIANTS`, SwiGLU inside | 8 % at 1, 6 % at 32 |
| attention of one row | `default_tile`; ONE_ROW | 2 % at 32 x 1,000 tokens, 5 to 10 % at 40,000 |

What has one variant, because another would win less than 5 %: programmatic dependent launch (4 % at 1, 3 % at 32),
attention of blocks (three tiles in flight reach the memory's rate), the place of partial results (the last program of
a tile of one row saves a launch), the search for a tile's sequence (a map saves 0.03 ms), the argmax (inside of the
lm_head's product it saves 0.02 ms), and prompts (`varlen_attn` needs 0.66 ms for 2,048 rows after 8,000 tokens, and
tiles of 16 rows at least 0.95).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import products, rows
from app.engine.cuda.attention import Tile, geometry, paged_attention
from app.engine.cuda.products import Product
from app.engine.cuda.tune import Outputs, Question
from app.engine.device.base import AttentionMask, AttentionMetadata, Heads, LayerKv

MAX_SEQS = 32
CONTEXT = 1024
"""Tokens of a sequence whose last row is timed."""
CALLS = 16
"""Calls of attention in a row, because a single launch is too short to time."""
CAUSAL = AttentionMask(causal=True)
ONE_ROW = [Tile(32, 1, 5, 2), Tile(32, 2, 5, 2), Tile(64, 4, 7, 2)]
"""Fewer warps have fewer barriers a tile, and more stages more bytes in flight."""
Weights = Mapping[str, Sequence[Tensor]]
"""Weights `[out, in]` of all layers by name. One called "gate_up" is `[2 * I, H]` and has its SwiGLU."""


def of_products(weights: Weights, chosen: dict[products.Key, Product]) -> Iterator[Question]:
    """Yield how to multiply by each shape of a weight, the numbers of rows that save most first."""
    for num_rows, (name, layers) in itertools.product((16, 1, 32, 64), weights.items()):
        gated = name == "gate_up"
        use = partial(chosen.__setitem__, products.key(layers[0], num_rows, gated=gated))
        yield _product(layers, num_rows, use, gated=gated)


def _product(layers: Sequence[Tensor], num_rows: int, use: Callable[[Product], None], *, gated: bool) -> Question:
    out_features, in_features = len(layers[0]) // (1 + gated), layers[0].shape[1]
    x = _noise(layers[0], num_rows, in_features)

    def run(variant: Product | None) -> Outputs:
        for weight in layers:
            if variant is not None:
                result = products.linear(x, weight, variant, gated=gated)
            else:
                result = rows.silu_mul(F.linear(x, weight)) if gated else F.linear(x, weight)
        return (result,)

    variants = [v for v in products.VARIANTS if products.fits(v, out_features, in_features, num_rows, gated=gated)]
    name = f"{'SwiGLU' if gated else 'product'} {out_features} x {in_features}, {num_rows} rows"
    return Question(name, variants, run, use)


def of_attention(
    heads: Heads, like: Tensor, num_seqs: int, page_size: int, multiprocessors: int, chosen: dict[Heads, Tile]
) -> Question:
    """Return how to launch attention of one row a sequence."""
    num_seqs = min(num_seqs, MAX_SEQS)
    operands = cache(partial(_paged, heads, like, num_seqs, page_size))

    def run(tile: Tile | None) -> Outputs:
        q, kv, meta = operands()
        launch = geometry(meta.query_lens, heads, like.dtype, multiprocessors, tile)
        for _ in range(CALLS):
            o = paged_attention(q, kv, meta, CAUSAL, launch)
        return (o,)

    sizes = f"{heads.num_heads} and {heads.num_kv_heads} heads of {heads.head_dim}"
    name = f"attention of one row, {sizes}, {num_seqs} sequences, pages of {page_size}"
    return Question(name, ONE_ROW, run, partial(chosen.__setitem__, heads))


def _noise(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape).normal_(generator=torch.Generator(like.device).manual_seed(sum(shape)))


def _paged(heads: Heads, like: Tensor, num_seqs: int, page_size: int) -> tuple[Tensor, LayerKv, AttentionMetadata]:
    """Return q of one row a sequence, K and V, and their places: CONTEXT tokens each, on interleaved pages."""
    pages = -(-CONTEXT // page_size)
    shape = (num_seqs * pages, page_size, heads.num_kv_heads, heads.head_dim)
    q = _noise(like, num_seqs, heads.num_heads, heads.head_dim)
    numbers = partial(torch.tensor, dtype=torch.int32, device=like.device)
    table = torch.arange(num_seqs * pages, dtype=torch.int32, device=like.device).view(pages, num_seqs).T.contiguous()
    ones, lens, starts = [1] * num_seqs, [CONTEXT] * num_seqs, numbers(range(num_seqs + 1))
    meta = AttentionMetadata(starts, numbers(lens), table, ones, lens, page_size, {CAUSAL: None})
    return q, LayerKv(_noise(like, *shape), _noise(like, *shape).add_(1.0)), meta
