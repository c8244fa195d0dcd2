"""Launches of an engine that `tune` chooses, each with operands of the engine's sizes."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cuda import products, rows
from app.engine.cuda.attention import Tile, geometry, paged_attention
from app.engine.cuda.products import Product
from app.engine.cuda.tune import Question, Way
from app.engine.device.base import AttentionMask, AttentionMetadata, Heads, LayerKv, ProjectedRows

MOST_SEQS = 32
CONTEXT = 1024
"""Tokens behind which rows of attention are timed."""
CHAIN = 16
"""Calls of attention in a row, because a chained launch gains behind another kernel alone, and layers share a map."""
BLOCK = 16
EPS = 1e-6
RAGGED, OURS = (1,), (2,)
PROMPT_WAYS: dict[Way, str] = {RAGGED: "PyTorch's varlen_attn", OURS: "our kernel"}
PROMPTS = {False: ([1536, 512], [1536, 1024]), True: ([512], [8192])}
"""Rows and tokens of prompts that are timed: a whole one and a chunk behind others, and a chunk of a long one."""
LONG = 4096
"""Most tokens of a prompt that is not long, about midway by ratio between those that are timed."""
WINDOW = 16
"""A window of prompts that is compared too. It is not timed."""
OF_ONE_ROW = [Tile(64, 4, 5, 2, chained=1), Tile(32, 4, 5, 2), Tile(64, 4, 3, 2), Tile(64, 4, 5, 1), Tile(128, 4, 3, 2)]
OF_BLOCKS = [
    Tile(32, 4, 5, 1, chained=1),
    Tile(32, 4, 5, 1, mapped=1),
    Tile(32, 4, 5, 1, chained=1, mapped=1),
    Tile(32, 4, 7, 1),
    Tile(64, 4, 3, 1),
    Tile(64, 4, 5, 1),
    Tile(64, 8, 3, 1),
    Tile(32, 4, 5, 2),
]
"""Ways beside the default. The rows of a head of more than 128 dims have no others."""


class OfAttention(NamedTuple):
    """Launches of attention that share a way: one row a sequence or more, query heads a KV head, and their size.

    With `joining` the way is where so many parts are added.
    """

    plain: bool
    group: int
    head_dim: int
    joining: int = 0


class OfPrompts(NamedTuple):
    """Attention of prompts, by masks or one of PROMPT_WAYS: query heads, KV heads, their size, long ones or not."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_long: bool


class OfProduct(NamedTuple):
    """Products that share a way: shape of the weight, SwiGLU or not, and the most rows."""

    out_features: int
    in_features: int
    gated: bool
    most_rows: int


class OfChoice(NamedTuple):
    """Choices of the best logit that share a way: shape of the lm_head, and the most rows."""

    vocab_size: int
    hidden_size: int
    most_rows: int


class OfRows(NamedTuple):
    """Norms, rotations and SwiGLUs of an engine, which are chained launches or not."""

    hidden_size: int


Questions = dict[OfAttention | OfPrompts | OfProduct | OfChoice | OfRows, Question]
LM_HEAD = "lm_head"
"""Name of the matrix whose products are choices."""


def of_engine(
    decoders: Sequence[Heads],
    weights: Mapping[str, Sequence[Tensor]],
    num_seqs: int,
    page_size: int,
    multiprocessors: int,
    *,
    fixed: bool = False,
) -> Questions:
    """Return the questions of an engine in 16 bits, those that save most first.

    `weights` are matrices of layers by name, of which one called "gate_up" is `[2 * I, H]` and has its SwiGLU. With
    `fixed` attention is launched like under `--batch-invariant`.
    """
    weights = dict(weights)
    lm_head = weights.pop(LM_HEAD, [])
    some = [weight for named in weights.values() for weight in named]
    if not some or some[0].dtype.itemsize != 2:
        return {}
    asked: Questions = {}
    for most_rows in (16, 1, 64, 32):
        for name, named in weights.items():
            shape = named[0].shape
            gated = name == "gate_up"
            asked[OfProduct(shape[0], shape[1], gated, most_rows)] = product(list(named), most_rows, gated=gated)
    most = min(num_seqs, MOST_SEQS)
    for decoder in decoders:
        for plain in (False, True) if decoder.head_dim <= 128 else ():
            key = OfAttention(plain, decoder.num_heads // decoder.num_kv_heads, decoder.head_dim)
            sizes, how = (page_size, multiprocessors), {"plain": plain, "fixed": fixed}
            asked.setdefault(key, attention(decoder, some[0], most, *sizes, **how))
            # Of a block one program would read half a megabyte of parts.
            for seqs in (1, most, *(1 << i for i in range(1, most.bit_length()))) if plain else ():
                of_heads = key.group, decoder.num_kv_heads, some[0].dtype, multiprocessors, decoder.head_dim
                parts = geometry([1] * seqs, *of_heads).splits
                if parts > 1:
                    joining = attention(decoder, some[0], seqs, *sizes, **how, joining=parts)
                    asked.setdefault(key._replace(joining=parts), joining)
    if "qkv" in weights:
        between = chained_rows(decoders[0], list(weights["qkv"]), list(weights.get("gate_up", [])))
        asked[OfRows(weights["qkv"][0].shape[1])] = between
    for most_rows, weight in itertools.product((16, 1, 64, 32), lm_head):
        asked[OfChoice(len(weight), weight.shape[1], most_rows)] = choice(weight, most_rows)
    return asked


def of_fixed_engine(
    decoders: Sequence[Heads],
    weights: Mapping[str, Sequence[Tensor]],
    num_seqs: int,
    page_size: int,
    multiprocessors: int,
) -> Questions:
    """Return `of_engine` for launches that are the same for any rows."""
    of_rows = of_engine(decoders, weights, num_seqs, page_size, multiprocessors, fixed=True)
    kept = [key for key in of_rows if isinstance(key, OfRows) or (isinstance(key, OfAttention) and not key.plain)]
    asked: Questions = {key: of_rows[key] for key in kept}
    for named in weights.values() if of_rows else ():  # an lm_head too, whose choices have its product's way
        out_features, in_features = named[0].shape
        key = OfProduct(out_features, in_features, gated=False, most_rows=products.FIXED_ROWS)
        asked[key] = fixed_product(list(named), multiprocessors)
    return asked


def fixed_product(weights: list[Tensor], multiprocessors: int) -> Question:
    """Return the question how to multiply any number of rows. It is timed with one tile of them."""
    out_features, in_features = weights[0].shape
    noise = torch.Generator(weights[0].device).manual_seed(0)
    x = weights[0].new_empty(products.FIXED_ROWS, in_features).normal_(generator=noise)
    default = products.fixed_way(weights[0], multiprocessors)

    def run(way: Way | None, weight: Tensor = weights[0]) -> Tensor:
        return products.fixed_linear(x, weight, None, default if way is None else Product(*way), multiprocessors)

    def timed(way: Way | None) -> None:
        for weight in weights:
            run(way, weight)

    ways = [way for way in products.FIXED_WAYS if in_features % (way.splits * way.depth) == 0]
    name = f"fixed product {out_features} x {in_features}"
    return Question(name, ways, run, lambda: F.linear(x, weights[0]), timed, products.chained_ways)


def choice(lm_head: Tensor, num_rows: int) -> Question:
    """Return the question how to choose the best logit of `num_rows` rows. Ways are compared by the chosen logits."""
    noise = torch.Generator(lm_head.device).manual_seed(0)
    x = lm_head.new_empty(num_rows, lm_head.shape[1]).normal_(generator=noise)

    def run(way: Way | None) -> Tensor:
        if way is None:
            best, chosen = F.linear(x, lm_head).max(dim=-1)
            return chosen.masked_fill_((best - best).ne(0), 0)
        return products.choose(x, lm_head, Product(*way), lost=0)

    def logits(way: Way | None) -> Tensor:
        return F.linear(x, lm_head).gather(1, run(way)[:, None])

    vocab, hidden = lm_head.shape
    ways = [way for way in products.CHOICE_WAYS if products.fits(way, vocab, hidden, num_rows, gated=False)]
    return Question(f"choice {vocab} x {hidden}, {num_rows} rows", ways, logits, lambda: logits(None), run)


def product(weights: list[Tensor], num_rows: int, *, gated: bool) -> Question:
    """Return the question how to multiply `num_rows` rows. It is timed over all layers' weights in turn."""
    out_features, in_features = len(weights[0]) // (1 + gated), weights[0].shape[1]
    noise = torch.Generator(weights[0].device).manual_seed(0)
    x = torch.empty(num_rows, in_features, dtype=weights[0].dtype, device=weights[0].device)
    x.normal_(generator=noise)

    def run(way: Way | None, weight: Tensor = weights[0]) -> Tensor:
        if way is not None:
            return products.linear(x, weight, Product(*way), gated=gated)
        done = F.linear(x, weight)
        return rows.silu_mul(done) if gated else done

    def timed(way: Way | None) -> None:
        for weight in weights:
            run(way, weight)

    ways = [way for way in products.WAYS if products.fits(way, out_features, in_features, num_rows, gated=gated)]
    kind = "SwiGLU" if gated else "product"
    name = f"{kind} {out_features} x {in_features}, {num_rows} rows"
    return Question(name, ways, run, lambda: run(None), timed, products.chained_ways)


def chained_rows(decoder: Heads, qkv: list[Tensor], gate_up: list[Tensor]) -> Question:
    """Return the question whether kernels of rows begin before the products in front of them end."""
    num_rows, hidden, dim = BLOCK, qkv[0].shape[1], decoder.head_dim
    noise = torch.Generator(qkv[0].device).manual_seed(0)
    x, residual = (qkv[0].new_empty(num_rows, hidden).normal_(generator=noise) for _ in range(2))
    norm, head_norm = (qkv[0].new_empty(size).normal_(generator=noise) for size in (hidden, dim))
    cos, sin = qkv[0].new_empty(2, num_rows, 1, dim).normal_(generator=noise)
    kv = LayerKv(*qkv[0].new_empty(2, 1, num_rows, decoder.num_kv_heads, dim))
    slots = torch.arange(num_rows, dtype=torch.int32, device=x.device)

    def of_layer(way: Way | None, layer: int) -> list[Tensor]:
        chained = way is not None
        normed, total = rows.add_rms_norm(x, residual, norm, EPS, chained=chained)
        heads = F.linear(normed, qkv[layer]).view(num_rows, -1, dim)
        q = rows.qkv_into_kv(ProjectedRows(heads, head_norm, head_norm, EPS, (cos, sin), kv, slots), chained=chained)
        gated = [rows.silu_mul(F.linear(normed, weight), chained=chained) for weight in gate_up[layer : layer + 1]]
        return [total, q, kv.k, kv.v, *gated]

    def run(way: Way | None) -> Tensor:
        return torch.cat([part.flatten() for part in of_layer(way, 0)])

    def timed(way: Way | None) -> None:
        for layer in range(len(qkv)):
            of_layer(way, layer)

    return Question(f"kernels of rows of {hidden}", [(1,)], run, lambda: run(None), timed)


def attention(
    decoder: Heads,
    like: Tensor,
    num_seqs: int,
    page_size: int,
    multiprocessors: int,
    *,
    plain: bool,
    fixed: bool = False,
    joining: int = 0,
) -> Question:
    """Return the question how to launch attention over CONTEXT tokens a sequence; start-up checks the default.

    With `joining` the question is where so many parts are added, which the sequences have by default.
    """
    counts = [1 if plain else BLOCK] * num_seqs
    group, dim = decoder.num_heads // decoder.num_kv_heads, decoder.head_dim
    sizes = group, decoder.num_kv_heads, like.dtype, multiprocessors, dim
    operands = cache(partial(_paged, decoder, like, counts, [CONTEXT] * num_seqs, page_size))

    def run(way: Way | None, layers: int = 1) -> Tensor:
        q, kv, meta = operands()
        meta.of_forward.clear()
        tile = None if way is None or joining else Tile(*way)
        launch = geometry(counts, *sizes, tile, fixed=fixed, joined=() if way is None else (joining,))
        for _ in range(layers):
            o = paged_attention(q, kv, meta, AttentionMask(causal=True), launch)
        return o

    def timed(way: Way | None) -> None:
        run(way, CHAIN)

    name = f"{'fixed ' * fixed}attention of {'one row' if plain else 'blocks'}, {group} heads of {dim} a KV head"
    if joining:
        return Question(f"{joining} parts of {name}", [(1,)], run, lambda: run(None), timed)
    return Question(name, OF_ONE_ROW if plain else OF_BLOCKS, run, lambda: run(None), timed)


Planned = Callable[[AttentionMetadata, AttentionMask, Way | None], Any]
Attention = Callable[[Tensor, LayerKv, AttentionMetadata, AttentionMask], Tensor]


def prompts(
    decoder: Heads, like: Tensor, page_size: int, planned: Planned, attend: Attention, *, is_long: bool
) -> Question:
    """Return the question by which kernel `attend` reads prompts. `planned` makes a plan, for all layers, of a way."""
    masks = AttentionMask(causal=True), AttentionMask(causal=True, window=WINDOW)
    operands = cache(partial(_paged, decoder, like, *PROMPTS[is_long], page_size))
    plan = cache(lambda mask, way: planned(operands()[2], mask, way))

    def attended(way: Way | None, mask: AttentionMask = masks[0]) -> Tensor:
        q, kv, meta = operands()
        meta.plans[mask] = plan(mask, way)
        return attend(q, kv, meta, mask)

    def run(way: Way | None) -> Tensor:
        return torch.cat([attended(way, mask) for mask in masks])

    kind = f"{'long ' * is_long}prompts"
    name = f"attention of {kind}, {decoder.num_heads} and {decoder.num_kv_heads} heads of {decoder.head_dim}"
    return Question(name, list(PROMPT_WAYS), run, lambda: run(None), attended)


def _paged(
    decoder: Heads, like: Tensor, counts: list[int], lens: list[int], page_size: int
) -> tuple[Tensor, LayerKv, AttentionMetadata]:
    """Return q, K and V, and where they lie, of `counts` rows behind others of sequences of `lens` tokens."""
    noise, num_seqs = torch.Generator(like.device).manual_seed(0), len(counts)
    pages = -(-max(lens) // page_size)
    shape = (num_seqs * pages, page_size, decoder.num_kv_heads, decoder.head_dim)
    k, v, q = (
        like.new_empty(each).normal_(generator=noise)
        for each in (shape, shape, (sum(counts), decoder.num_heads, decoder.head_dim))
    )
    numbers = partial(torch.tensor, dtype=torch.int32, device=like.device)
    table = torch.arange(num_seqs * pages, dtype=torch.int32, device=like.device).view(pages, num_seqs).T
    starts = [0, *accumulate(counts)]
    meta = AttentionMetadata(numbers(starts), numbers(lens), table.contiguous(), counts, lens, page_size)
    return q, LayerKv(k, v), meta
