"""The conformance suite of a device: every operator of its backend against PyTorch's on the CPU in float32.

`check`, the reports and the tests of each device folder run these cases, at different sizes. A relative error is a
fraction of the largest value of the result; integers must be equal.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import isnan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.base import AttentionMask, Backend, ProjectedRows
from app.engine.device.comparison import (
    NUMBER_BYTES,
    SPLIT_TOKENS,
    TOLERANCE,
    Inputs,
    Lens,
    Operator,
    Paged,
    Prepared,
    difference,
)
from app.engine.device.moe import ExpertWeights, MoeConfig
from app.engine.device.probe import Finding, failed, ok
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep, GatedDeltaWeights, LayerState
from app.engine.quantised import E4M3_GROUP, FP4_BLOCK, ExpertWeight, PackedFp4, QuantisedWeight, Weight

EPS = 1e-6
FLOAT32_BYTES = 4
WINDOW = 100
"""Tokens that a row of sliding attention sees. Not a multiple of a page, so pages are cut."""
HINT = "do not serve on it; with versions that belong together, report this output"
EXPERTS = MoeConfig(16, 4, intermediate_size=256, norm_topk_prob=True)
GPT_OSS = replace(EXPERTS, intermediate_size=288, has_bias=True, swiglu_limit=7.0)
GPT_OSS_HIDDEN = 736
"""Like 2880, whole blocks of mxfp4, and no whole tiles."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one shape. `moved` is the least number of bytes that the call reads and writes, 0 if unknown."""

    shape: str
    operator: Operator
    tolerance: float = 0.0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """Shapes that are compared: heads are (query heads, KV heads, D), `causal` and `both_ways` requests by name.
    RoPE turns the first `turning` of a head's dims, and with `sinks` each head has one. Products are by weights in 16
    bits and in `formats`, names of FORMATS. `recurrent` is (k heads, v heads, D) of a Gated DeltaNet layer; the default
    is Qwen3.5-9B's."""

    heads: tuple[tuple[int, int, int], ...]
    causal: dict[str, Lens]
    both_ways: dict[str, Lens]
    turning: float = 1.0
    sinks: bool = False
    formats: tuple[str, ...] = ("int8",)
    page: int = 128
    past: float | None = None
    tolerance: float = TOLERANCE
    hidden: int = 4096
    intermediate: int = 12288
    experts: MoeConfig = EXPERTS
    num_rows: tuple[int, ...] = (1, 16, 257)
    layers: int = 5
    recurrent: tuple[int, int, int] = (16, 32, 128)
    block: int = 16
    batches: tuple[int, ...] = (16,)


SMALL = Extent(
    heads=((8, 2, 128),),
    causal={"blocks of 16": [(16, 17), (16, 144)], "one long request": [(1, SPLIT_TOKENS)]},
    both_ways={"blocks of 16": [(16, 17), (16, 144)], "one long request": [(1, SPLIT_TOKENS)]},
    hidden=256,
    intermediate=512,
    num_rows=(20,),
    recurrent=(2, 4, 32),
)
"""Enough for `check` to tell an operator that works from one that does not, in a second."""


def of_heads(extent: Extent) -> dict[str, list[Case]]:
    """Return the cases of attention, RoPE and the writing of KV, for all heads."""
    loose, page, made = max(extent.tolerance, TOLERANCE), extent.page, defaultdict[str, list[Case]](list)
    for heads, kv_heads, dim in extent.heads:
        attentions = [
            ("causal_attention", AttentionMask(causal=True), extent.causal),
            ("bidirectional_attention", AttentionMask(causal=False), extent.both_ways),
            ("sliding_attention", AttentionMask(causal=True, window=WINDOW), extent.both_ways),
            ("sliding_attention", AttentionMask(causal=False, window=WINDOW), extent.both_ways),
        ]
        traits = ", sinks" * extent.sinks
        for name, mask, loads in attentions:
            for load, lens in loads.items():
                paged = Paged(lens, heads, kv_heads, dim, mask, page, extent.sinks)
                shape = f"{heads} heads to {kv_heads}, D {dim}{traits}, {mask}, {load}: {len(lens)} requests"
                made[name].append(Case(shape, paged, loose, paged.moved))
        for n in extent.num_rows:
            sizes = [n, heads, kv_heads, dim, page]
            write = partial(_qkv_into_kv, sizes=sizes, turning=extent.turning)
            moved = 2 * NUMBER_BYTES * n * (heads + 2 * kv_heads) * dim
            turned = f", {extent.turning:g} turned" * (extent.turning < 1)
            made["qkv_into_kv"].append(Case(f"{sizes}{turned}", write, loose, moved))
    return made


def cases(extent: Extent) -> dict[str, list[Case]]:
    """Return the cases of each operator. A shape lists the sizes in the order of the function that makes the inputs."""
    hidden, inner, page, block = extent.hidden, extent.intermediate, extent.page, extent.block
    rounding, loose = extent.tolerance, max(extent.tolerance, TOLERANCE)
    row_bytes, weight_bytes = NUMBER_BYTES * hidden, NUMBER_BYTES * hidden * inner
    made = of_heads(extent)

    def add(name: str, make: Callable[..., Prepared], *sizes: int, tolerance: float = 0.0, moved: int = 0) -> None:
        made[name].append(Case(str(list(sizes)), lambda at: make(at, *sizes), tolerance, moved))

    heads, kv_heads, dim = extent.heads[-1]
    for n in extent.num_rows:
        add("rms_norm", _rms_norm, n, hidden, tolerance=rounding, moved=2 * n * row_bytes)
        add("add_rms_norm", _add_rms_norm, n, hidden, tolerance=rounding, moved=4 * n * row_bytes)
        add("linear", _linear, n, hidden, inner, tolerance=rounding, moved=weight_bytes)
        add("gated_mlp", _gated_mlp, n, hidden, inner, tolerance=loose, moved=3 * weight_bytes)
        add("moe", partial(_moe, moe=extent.experts), n, hidden, tolerance=loose)
        for name in extent.formats:
            product = partial(_linear, rows=n, hidden=hidden, width=inner, name=name)
            made["linear"].append(Case(f"{[n, hidden, inner]} in {name}", product, loose, weight_bytes // 2))
            normed = partial(_normed_product, rows=n, hidden=hidden, width=inner, name=name)
            made["add_rms_norm"].append(Case(f"{[n, hidden, inner]} in {name}", normed, FORMATS[name].twice * loose))
            mixture = partial(_moe, rows=n, hidden=hidden, moe=extent.experts, name=name)
            made["moe"].append(Case(f"{[n, hidden]} in {name}", mixture, FORMATS[name].twice * loose))
        made["moe"].append(Case(f"{[n, GPT_OSS_HIDDEN]} in mxfp4", partial(_moe_in_mxfp4, rows=n), loose))
        for _, kv, d in extent.heads:
            add("write_kv", _write_kv, n, kv, d, page)
        for h, d in sorted({(heads, dim) for heads, _, dim in extent.heads}):
            add("rope", _rope, n, h, d, tolerance=rounding)
            add("rms_norm", _rms_norm, n, h, d, tolerance=rounding)
        moved = 4 * NUMBER_BYTES * n * extent.layers * kv_heads * dim
        add("context_into_kv", _context_into_kv, n, extent.layers, kv_heads, dim, page, tolerance=loose, moved=moved)
    for batch in extent.batches:
        add("positions_and_slots", _positions, batch, block, page)
        add("embed_blocks", _embed_blocks, batch, block, hidden)
        add("verify", _verify, batch, block)
        add("advance_by_accepted", _advance, batch, block)
        heads, dim = extent.recurrent[1:]
        moved = 2 * FLOAT32_BYTES * batch * heads * dim * dim
        for width in (1, block):
            add("commit_and_verify", _commit_and_verify, batch, width, *extent.recurrent, tolerance=loose, moved=moved)
    for n in extent.num_rows:
        add("commit_prompts", _commit_prompts, n, *extent.recurrent, tolerance=loose)
    return dict(made)


def _write_kv(at: Inputs, rows: int, kv_heads: int, dim: int, page: int) -> Prepared:
    """Compare all pages, so that a row at a wrong slot shows. The rows are views of a wider tensor."""
    num_slots = (rows // page + 2) * page
    kv = at.pages(num_slots, page, kv_heads, dim)
    k, v = at.normal(rows, 2 * kv_heads, dim).chunk(2, dim=1)
    slots = at.scattered(rows, num_slots)
    return lambda: (at.backend.write_kv(k, v, kv, slots), kv.k, kv.v)  # type: ignore[func-returns-value]


def _rms_norm(at: Inputs, *shape: int) -> Prepared:
    x, weight = at.normal(*shape), at.normal(shape[-1])
    return lambda: at.backend.rms_norm(x, weight, EPS)


def _add_rms_norm(at: Inputs, rows: int, hidden: int) -> Prepared:
    x, residual, weight = at.normal(rows, hidden), at.normal(rows, hidden), at.normal(hidden)
    return lambda: at.backend.add_rms_norm(x, residual, weight, EPS)


def _normed_product(at: Inputs, rows: int, hidden: int, width: int, name: str) -> Prepared:
    """Compare a product of a norm's rows, which may leave the norm quantised."""
    x, residual, weight = at.normal(rows, hidden), at.normal(rows, hidden), at.normal(hidden)
    packed = at.backend.pack_linear(FORMATS[name].of(at.normal(width, hidden)))

    def call() -> tuple[Tensor, Tensor]:
        normed, total = at.backend.norm_for(x, residual, weight, EPS, [packed])
        return at.backend.linear(normed, packed), total

    return call


def _rope(at: Inputs, rows: int, heads: int, dim: int) -> Prepared:
    rotation, x = at.rotation(rows, dim), at.ordered(at.normal(rows, heads, dim))
    return lambda: at.restored(at.backend.rope(x, rotation))


def _gated_mlp(at: Inputs, rows: int, hidden: int, inner: int) -> Prepared:
    gate_up, down = at.normal(2 * inner, hidden), at.normal(hidden, inner)
    x = at.normal(rows, hidden, scale=hidden**-0.5)
    return lambda: at.backend.gated_mlp(x, gate_up, down)


def _moe(at: Inputs, rows: int, hidden: int, moe: MoeConfig, name: str = "") -> Prepared:
    x, weights = at.normal(rows, hidden), experts(at, hidden, moe, name)
    return lambda: at.backend.moe(x, weights, moe)


def experts(at: Inputs, hidden: int, moe: MoeConfig, name: str = "") -> ExpertWeights:
    """Return random experts, in the format `name` if this backend multiplies by it."""
    count, inner = moe.num_experts, moe.intermediate_size

    def packed(out_features: int, in_features: int, pack: Callable[[QuantisedWeight], Weight]) -> Weight:
        shape = count, out_features, in_features
        values = at.normal(*shape, scale=in_features**-0.5)
        if not name:
            return at.backend.empty_experts(values, *shape).copy_(values)
        quantised = FORMATS[name].of(values)
        if not at.backend.multiplies(quantised):
            return at.backend.empty_experts(values, *shape).copy_(quantised.dequantised())
        data = at.backend.empty_experts(quantised.data, *shape).copy_(quantised.data)
        return pack(replace(quantised, data=data))

    router, backend = at.normal(count, hidden, scale=hidden**-0.5).float(), at.backend
    gate_up = packed(2 * inner, hidden, backend.pack_gate_up)
    return ExpertWeights(router, gate_up, packed(hidden, inner, backend.pack_linear))


def _moe_in_mxfp4(at: Inputs, rows: int) -> Prepared:
    """Compare experts like gpt-oss's, which stay packed if this backend multiplies by them so."""
    count, inner, hidden = GPT_OSS.num_experts, GPT_OSS.intermediate_size, GPT_OSS_HIDDEN

    def drawn(out: int, columns: int) -> ExpertWeight:
        blocks = columns // FP4_BLOCK
        data, scales = at.integers(0, 256, count, out, columns // 2), at.integers(119, 122, count, blocks, out)
        weight = PackedFp4(data.to(torch.uint8), scales.to(torch.uint8), at.dtype, 0, columns)
        if at.backend.multiplies(weight):
            return weight
        return at.backend.empty_experts(at.normal(1), count, out, columns).copy_(weight.dequantised())

    x, gate_up, down = at.normal(rows, hidden), drawn(2 * inner, hidden), drawn(hidden, inner)
    shapes = (count, hidden), (count,), (count, 2 * inner), (count, hidden)
    router, *biases = (at.normal(*shape).float() for shape in shapes)
    weights = ExpertWeights(router, gate_up, down, *biases)
    return lambda: at.backend.moe(x, weights, GPT_OSS)


def _linear(at: Inputs, rows: int, hidden: int, width: int, name: str = "") -> Prepared:
    x, weight = at.normal(rows, hidden), at.normal(width, hidden)
    if name:
        x = at.put(FORMATS[name].rows(x.cpu()))
    packed = at.backend.pack_linear(FORMATS[name].of(weight) if name else weight)
    return lambda: at.backend.linear(x, packed)


def rows_of_e4m3(x: Tensor) -> Tensor:
    """Return rows like x that e4m3 holds exactly, with a scale of 1 a group, so that no rounding hides an error."""
    rows = (64 * x).round().clamp(-6, 6) * 64
    rows[..., ::E4M3_GROUP] = 448
    return rows


class Format(NamedTuple):
    """A format of weights in 8 bits: `of` quantises, and `rows` turns random rows into those of a product. The error of
    a product whose rows the device rounds, or of experts, is at most `twice` times others'."""

    of: Callable[[Tensor], QuantisedWeight]
    rows: Callable[[Tensor], Tensor]
    twice: int


FORMATS = {
    "int8": Format(partial(QuantisedWeight.rounded, kind=torch.int8), lambda x: x, 2),
    "e4m3": Format(partial(QuantisedWeight.rounded, kind=torch.float8_e4m3fn), rows_of_e4m3, 4),
}


def _qkv_into_kv(at: Inputs, sizes: Sequence[int], turning: float) -> Prepared:
    rows, heads, kv_heads, dim, page = sizes
    qk, v = at.normal(rows, heads + kv_heads, dim), at.normal(rows, kv_heads, dim)
    qkv, norms = torch.cat((at.ordered(qk), v), dim=1), (at.ordered(at.normal(dim)), at.ordered(at.normal(dim)))
    kv, slots = at.pages(rows, page, kv_heads, dim, ordered=True), at.scattered(rows, rows)
    rotation = at.rotation(rows, dim, turning)

    def call() -> tuple[Tensor, ...]:
        q = at.backend.qkv_into_kv(ProjectedRows(qkv, *norms, EPS, rotation, kv, slots))
        return at.restored(q), at.restored(kv.k), kv.v

    return call


def _context_into_kv(at: Inputs, rows: int, layers: int, kv_heads: int, dim: int, page: int) -> Prepared:
    k, v = at.normal(rows, layers, kv_heads, dim), at.normal(rows, layers, kv_heads, dim)
    context, norm = torch.cat((at.ordered(k), v), dim=2).flatten(0, 1), at.ordered(at.normal(layers, dim))
    kv, slots = at.pages(rows * layers, page, kv_heads, dim, ordered=True), at.scattered(rows * layers, rows * layers)
    rotation, ones = at.rotation(rows, dim), torch.ones_like(norm[0])

    def call() -> tuple[Tensor, ...]:
        at.backend.context_into_kv(ProjectedRows(context, ones, norm, EPS, rotation, kv, slots))
        return at.restored(kv.k), kv.v

    return call


def _embed_blocks(at: Inputs, batch: int, block: int, hidden: int) -> Prepared:
    anchors, embedding = at.integers(0, 63, batch), at.normal(64, hidden)
    return lambda: at.backend.embed_blocks(anchors, 63, block, embedding)


def _positions(at: Inputs, batch: int, block: int, page: int) -> Prepared:
    query_lens = [1 + i % block for i in range(batch)]
    seq_ids = at.int32([i for i, rows in enumerate(query_lens) for _ in range(rows)])
    offsets = at.integers(0, 7 * page, batch) - at.int32([0, *accumulate(query_lens)][:-1])
    table, rows = at.scattered(batch * 8, batch * 9).view(batch, 8), at.int32(range(sum(query_lens)))
    return lambda: at.backend.positions_and_slots(seq_ids, offsets, rows, table, page)


def _verify(at: Inputs, batch: int, block: int) -> Prepared:
    """Propose drafts, about half of which are the target's choices. Some choices are -1 (`NOT_FINITE`)."""
    num_drafts, order = at.integers(0, block, batch), at.scattered(batch, batch)
    first = (num_drafts.cumsum(0) - num_drafts).int() + at.int32(range(batch))
    choices, drafts = at.integers(-1, 3, batch * block).long(), at.integers(0, 2, batch, block - 1)
    return lambda: at.backend.verify(choices, drafts, first, num_drafts, order)


def _advance(at: Inputs, batch: int, block: int) -> Prepared:
    """Advance copies, so that a call may be repeated. Every third sequence was not in the previous step."""
    verified, prev_row = at.integers(-1, block, batch, block + 1).long(), at.scattered(batch, batch)
    verified[:, -1].clamp_(min=0)
    prev_row[2::3] = -1
    rows, anchors = at.integers(0, 999, batch * block), at.int32([block * i for i in range(batch)])
    offsets, seq_lens = at.integers(0, 999, batch), at.integers(0, 999, batch)

    def call() -> tuple[Tensor, ...]:
        advanced = rows.clone(), offsets.clone(), seq_lens.clone()
        at.backend.advance_by_accepted(verified, prev_row, advanced[0], anchors, *advanced[1:])
        return advanced

    return call


def _commit_and_verify(at: Inputs, batch: int, width: int, k_heads: int, v_heads: int, dim: int) -> Prepared:
    """Commit some rows of a last step, and verify others. States go to other slots, so that a call may be repeated."""
    shape = GatedDeltaConfig((0,), 4, k_heads, v_heads, dim, dim)
    block, each = 16, torch.arange(batch)
    counts, accepted = 1 + 5 * each % width, (3 + each) % (block + 1)
    is_new = (each == batch // 2) & (each > 0)
    memory = LayerState(
        at.normal(2 * batch + 1, v_heads, dim, dim).float(),
        at.normal(2 * batch + 1, 3, shape.channels),
        at.normal(2 * batch + 1, block, shape.input_width),
        at.int32([40] * (2 * batch + 1)),
    )
    gates = at.normal(v_heads).float() - 1, at.normal(v_heads).float() - 1
    weights = GatedDeltaWeights.of(at.normal(shape.channels, 4), *gates)
    slots, next_slots = at.int32(1 + each), at.int32(1 + batch + each)
    starts, lens = at.int32((40 + accepted) * ~is_new), at.int32(counts)
    row, first = torch.arange(width), counts.cumsum(0) - counts
    is_row = row < counts[:, None]
    rows = at.int32(torch.where(is_row, first[:, None] + row, 0)).long()
    row_indices = at.int32(is_row.flatten().nonzero()[:, 0])
    inputs = at.normal(int(counts.sum()), shape.input_width)
    places = slots.long(), next_slots.long(), starts, lens, rows, row_indices
    step = GatedDeltaStep(inputs, weights, memory, *places, at.backend.memory_is_host)
    kept = is_row.to(at.backend.device)[..., None]

    def call() -> tuple[Tensor, ...]:
        o = at.backend.commit_and_verify(step)
        pending = memory.pending[step.next_slots, :width].masked_fill(~kept, 0.0)
        return o, memory.matrix, memory.conv, memory.num_tokens, pending

    return call


def _commit_prompts(at: Inputs, count: int, k_heads: int, v_heads: int, dim: int) -> Prepared:
    """A new prompt of `count` rows, and one that goes on behind pending rows and leaves a state in its middle."""
    shape, block = GatedDeltaConfig((0,), 4, k_heads, v_heads, dim, dim), 16
    memory = LayerState(
        at.normal(6, v_heads, dim, dim).float(),
        at.normal(6, 3, shape.channels),
        at.normal(6, block, shape.input_width),
        at.int32([40] * 6),
    )
    gates = at.normal(v_heads).float() - 1, at.normal(v_heads).float() - 1
    weights = GatedDeltaWeights.of(at.normal(shape.channels, 4), *gates)
    slots, next_slots, split_slots = (at.int32(numbers).long() for numbers in ([1, 2], [3, 4], [0, 5]))
    rows = at.int32([0, 45]), at.int32([0, count]), at.int32([0, count, 2 * count + 7])
    inputs, parts = at.normal(2 * count + 7, shape.input_width), ([[count], [count, 7]], [True, False])
    step = GatedDeltaPrompts(
        inputs, weights, memory, slots, next_slots, split_slots, *rows, *parts, at.backend.memory_is_host
    )
    return lambda: (at.backend.commit_prompts(step), memory.matrix, memory.conv, memory.num_tokens)


def find(backend: Backend, name: str) -> Finding:
    """Return what `check` says of one operator."""
    compared = cases(replace(SMALL, page=backend.defaults.page_size))[name]
    errors = [difference(backend, case.operator)[1] for case in compared]
    largest = float(np.max(errors))
    if isnan(largest):
        return failed("the result is not all numbers", HINT)
    if any(error > case.tolerance for error, case in zip(errors, compared, strict=True)):
        return failed(f"differs from the CPU by up to {largest:.1%} of the largest value", HINT)
    return ok(f"as on the CPU, to {largest:.1%} of the largest value" if largest else "exactly as on the CPU")
