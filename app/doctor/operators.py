"""Cases of every operator that a backend runs in a step, against PyTorch on the CPU in float32.

One set serves `check` and both device reports. A relative error is a share of the largest value of the result;
integers must be equal.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import isnan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.doctor.probes import Finding, failed, ok
from app.engine.backend.base import AttentionMetadata, Backend, LayerKv
from app.engine.backend.torch import TorchBackend
from app.engine.build.self_test import TOLERANCE
from app.engine.sampling.sampler import Sampler

EPS = 1e-6
BF16 = 2.0**-7
"""Two roundings to eight bits, as a share of the largest value."""
GUMBEL_TOLERANCE = 1e-4
NUMBER_BYTES = 2
HINT = "do not serve on it; with versions that belong together, report this output"

Outputs = tuple[Tensor, ...]
Call = Callable[[], Outputs]
Lens = Sequence[tuple[int, int]]
"""Query rows and KV tokens of each request."""


class Inputs:
    """Random values of one case, rounded to `rounded` and held in `dtype` on a backend's device.

    Equal seeds give every backend the same values. `past` fills the slots behind a request's last token; None leaves
    random numbers there.
    """

    def __init__(self, backend: Backend, rounded: torch.dtype, dtype: torch.dtype, past: float | None = None) -> None:
        self.device, self.dtype, self.rounded, self.past = backend.device, dtype, rounded, past
        self._noise = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.put(torch.randn(*shape, generator=self._noise) * scale)

    def put(self, values: Tensor) -> Tensor:
        return values.to(self.rounded).to(self.device, self.dtype)

    def scattered(self, count: int, below: int) -> Tensor:
        """Return distinct int32 numbers [count]."""
        return torch.randperm(below, generator=self._noise)[:count].to(self.device, torch.int32)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return int32 numbers from `low` to below `high`."""
        return torch.randint(low, high, shape, generator=self._noise).to(self.device, torch.int32)

    def pages(self, slots: int, page: int, kv_heads: int, dim: int) -> LayerKv:
        """Return pages of random numbers with room for `slots` rows."""
        return LayerKv(*(self.normal(-(-slots // page), page, kv_heads, dim) for _ in range(2)))

    def int32(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)


Operator = Callable[[Backend, Inputs], Call]
"""Make the inputs on a backend, and return the call that is compared and timed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one shape. `moved` is the least number of bytes that the call reads and writes, 0 if unknown."""

    shape: str
    operator: Operator
    tolerance: float = 0.0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """Shapes that are compared: heads are (query heads, KV heads, D), `causal` and `both_ways` requests by name."""

    heads: tuple[tuple[int, int, int], ...]
    causal: dict[str, Lens]
    both_ways: dict[str, Lens]
    page: int = 128
    past: float | None = None
    tolerance: float = TOLERANCE
    hidden: int = 4096
    intermediate: int = 12288
    vocab: int = 151936
    num_rows: tuple[int, ...] = (1, 16, 257)
    layers: int = 5
    block: int = 16
    batches: tuple[int, ...] = (16,)


def about_pages(rows: Sequence[int], edges: Sequence[int], long: Sequence[int], chunk: int) -> dict[str, Any]:
    """Return the loads of an Extent: lengths about the edges of pages, long ones, and chunks of prompts."""
    both_ways = {
        "about page edges": [(q, max(q, kv)) for kv in edges for q in rows],
        "long": [(q, kv) for kv in long for q in (1, rows[-1])],
    }
    prefill = [(chunk, chunk), (chunk - 1, chunk + 129), (1, 1)]
    return {"causal": both_ways | {"prefill": prefill}, "both_ways": both_ways}


def of_graphs(batches: Sequence[int], block: int, context: int) -> dict[str, Any]:
    """Return the loads of an Extent: batches as graphs replay them, with padding behind the sequences."""
    causal: dict[str, Lens] = {}
    both_ways: dict[str, Lens] = {}
    for batch in batches:
        kv_lens = [context - 37 * i % (context // 2 + 1) for i in range(batch)]
        for width in (1, block):
            even = [(width, max(width, kv)) for kv in kv_lens]
            ragged = [(1 + 5 * i % width, max(width, kv)) for i, kv in enumerate(kv_lens)]
            rest = batch * width - sum(q for q, _ in ragged)
            name = f"{batch} x {width} rows"
            causal |= {name: even, f"{name}, and padding": [*even, (0, 0)]}
            if width > 1:
                both_ways[name] = even
                if batch > 1:
                    causal[f"{name}, ragged, and {rest} of padding"] = [*ragged, (rest, rest)]
    return {"causal": causal, "both_ways": both_ways}


SMALL = Extent(
    heads=((8, 2, 128),),
    causal={"blocks of 16": [(16, 17), (16, 144)]},
    both_ways={"blocks of 16": [(16, 17), (16, 144)]},
    hidden=256,
    intermediate=512,
    vocab=1024,
    num_rows=(20,),
)
"""Enough for `check` to tell an operator that works from one that does not, in a second."""
NPU = Extent(
    heads=((8, 8, 64), (8, 2, 64), (4, 2, 128), (8, 8, 128), (32, 8, 128), (64, 4, 128)),
    **about_pages(range(1, 17), (16, 127, 128, 129, 255, 256, 257), (4095, 4096, 8193), 512),
    tolerance=BF16,
)
CUDA = Extent(
    heads=((32, 8, 128),),
    **of_graphs((1, 32), 16, 1024),
    page=16,
    past=float("nan"),
    num_rows=(1, 16, 32, 512),
    batches=(1, 32),
)
"""One layer of Qwen3-8B and of its draft, at the widths that graphs serve."""


def cases(extent: Extent) -> dict[str, list[Case]]:
    """Return the cases of each operator."""
    hidden, inner, vocab, page, block = extent.hidden, extent.intermediate, extent.vocab, extent.page, extent.block
    rounding, loose = extent.tolerance, max(extent.tolerance, TOLERANCE)
    row_bytes, weight_bytes = NUMBER_BYTES * hidden, NUMBER_BYTES * hidden * inner
    made: dict[str, list[Case]] = defaultdict(list)

    def add(name: str, shape: str, operator: Operator, tolerance: float = 0.0, moved: int = 0) -> None:
        made[name].append(Case(shape, operator, tolerance, moved))

    for heads, kv_heads, dim in extent.heads:
        for causal, loads in ((True, extent.causal), (False, extent.both_ways)):
            for load, lens in loads.items():
                paged = Paged(lens, heads, kv_heads, dim, causal, page)
                shape = f"{heads} heads to {kv_heads}, D {dim}, {load}: {len(lens)} requests"
                add("causal_attention" if causal else "bidirectional_attention", shape, paged, loose, paged.moved)
    for rows in extent.num_rows:
        shape, product = f"[{rows}, {hidden}]", f"[{rows}, {hidden}] x {inner}"
        add("rms_norm", shape, partial(_rms_norm, (rows, hidden)), rounding, 2 * rows * row_bytes)
        add("add_rms_norm", shape, partial(_add_rms_norm, rows, hidden), rounding, 4 * rows * row_bytes)
        add("linear", product, partial(_linear, rows, hidden, inner), rounding, weight_bytes)
        add("gated_mlp", product, partial(_gated_mlp, rows, hidden, inner), loose, 3 * weight_bytes)
        add("argmax", f"ties in [{rows}, {vocab}]", partial(_argmax, rows, vocab))
        for _, kv_heads, dim in extent.heads:
            add("write_kv", f"{rows} rows of {kv_heads} x {dim}", partial(_write_kv, rows, kv_heads, dim, page))
        for heads, dim in sorted({(heads, dim) for heads, _, dim in extent.heads}):
            add("rope", f"[{rows}, {heads}, {dim}]", partial(_rope, rows, heads, dim), rounding)
            add("rms_norm", f"[{rows}, {heads}, {dim}]", partial(_rms_norm, (rows, heads, dim)), rounding)
        heads, kv_heads, dim = extent.heads[-1]
        width, layers = (heads + 2 * kv_heads) * dim, extent.layers
        qkv, context = partial(_qkv_into_kv, rows, heads), partial(_context_into_kv, rows, layers)
        at = (kv_heads, dim, page)
        add("qkv_into_kv", f"[{rows}, {width}]", partial(qkv, *at), loose, 2 * NUMBER_BYTES * rows * width)
        moved = 4 * NUMBER_BYTES * rows * layers * kv_heads * dim
        add("context_into_kv", f"{rows} rows of {layers} layers", partial(context, *at), loose, moved)
    for batch in extent.batches:
        blocks = f"{batch} sequences, blocks of {block}"
        add("positions_and_slots", f"{batch} sequences, to {block} rows", partial(_positions, batch, block, page))
        add("embed_blocks", blocks, partial(_embed_blocks, batch, block, hidden))
        add("verify", blocks, partial(_verify, batch, block))
        add("advance_by_accepted", f"{batch} sequences", partial(_advance, batch, block))
    add("noise", f"bits [16, {vocab}]", partial(_noise, "noise_bits", vocab))
    add("noise", f"Gumbel [16, {vocab}]", partial(_noise, "gumbel", vocab), GUMBEL_TOLERANCE)
    add("integers", "the first that is wrong", _first_wrong)
    add("integers", "take by int32 index", _take)
    add("integers", "put by int32 index", _put)
    add("integers", "embedding", partial(_embedding, vocab))
    return dict(made)


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of a backend's attention over pages, planned."""

    backend: Backend
    q: Tensor
    kv: LayerKv
    meta: AttentionMetadata

    def __call__(self) -> Outputs:
        return (self.backend.attention(self.q, self.kv, self.meta),)


@dataclass(frozen=True, slots=True)
class Paged:
    """Requests over scattered pages, whose query rows are the last of their tokens."""

    lens: Lens
    heads: int
    kv_heads: int
    dim: int
    causal: bool
    page: int

    def __call__(self, backend: Backend, inputs: Inputs) -> Attention:
        q_lens, kv_lens = [q for q, _ in self.lens], [kv for _, kv in self.lens]
        counts = [-(-kv // self.page) for kv in kv_lens]
        ids = inputs.scattered(sum(counts), sum(counts) + 1).cpu().split(counts)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        kv = inputs.pages((sum(counts) + 1) * self.page, self.page, self.kv_heads, self.dim)
        for line, own, kv_len in zip(table, ids, kv_lens, strict=True):
            line[: len(own)] = own
            if inputs.past is not None and kv_len:
                for pool in (kv.k, kv.v):
                    pool[int(own[-1]), (kv_len - 1) % self.page + 1 :] = inputs.past
        starts, lengths, table = (inputs.int32(x) for x in ([0, *accumulate(q_lens)], kv_lens, table))
        meta = AttentionMetadata(starts, lengths, table, q_lens, kv_lens, self.page, self.causal)
        meta.plan = backend.plan_attention(meta, self.heads // self.kv_heads)
        return Attention(backend, inputs.normal(sum(q_lens), self.heads, self.dim), kv, meta)

    @property
    def moved(self) -> int:
        numbers = sum(2 * q * self.heads + 2 * kv * self.kv_heads for q, kv in self.lens)
        return NUMBER_BYTES * self.dim * numbers


def _write_kv(rows: int, kv_heads: int, dim: int, page: int, backend: Backend, inputs: Inputs) -> Call:
    """Compare all pages, so that a row at a wrong slot shows. The rows are views of a wider tensor."""
    num_slots = (rows // page + 2) * page
    kv = inputs.pages(num_slots, page, kv_heads, dim)
    k, v = inputs.normal(rows, 2 * kv_heads, dim).chunk(2, dim=1)
    slots = inputs.scattered(rows, num_slots)

    def call() -> Outputs:
        backend.write_kv(k, v, kv, slots)
        return kv.k, kv.v

    return call


def _rms_norm(shape: tuple[int, ...], backend: Backend, inputs: Inputs) -> Call:
    x, weight = inputs.normal(*shape), inputs.normal(shape[-1])
    return lambda: (backend.rms_norm(x, weight, EPS),)


def _add_rms_norm(rows: int, hidden: int, backend: Backend, inputs: Inputs) -> Call:
    x, residual, weight = inputs.normal(rows, hidden), inputs.normal(rows, hidden), inputs.normal(hidden)
    return lambda: backend.add_rms_norm(x, residual, weight, EPS)


def _rotation(rows: int, dim: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    angles = torch.arange(rows * dim // 2).view(rows, -1) / dim
    tables = (table.unsqueeze(1) for table in backend.rotary_tables(angles, inputs.rounded))
    return tuple(table if table.is_complex() else table.to(inputs.dtype) for table in tables)


def _rope(rows: int, heads: int, dim: int, backend: Backend, inputs: Inputs) -> Call:
    rotation = _rotation(rows, dim, backend, inputs)
    halves = inputs.normal(rows, heads, 2, dim // 2)
    x = (halves.transpose(2, 3) if backend.interleaved_rope else halves).flatten(2)

    def call() -> Outputs:
        turned = backend.rope(x, rotation)
        pairs = turned.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2) if backend.interleaved_rope else turned
        return (pairs,)

    return call


def _gated_mlp(rows: int, hidden: int, inner: int, backend: Backend, inputs: Inputs) -> Call:
    gate_up, down = inputs.normal(2 * inner, hidden), inputs.normal(hidden, inner)
    x = inputs.normal(rows, hidden, scale=hidden**-0.5)
    return lambda: (backend.gated_mlp(x, gate_up, down),)


def _linear(rows: int, hidden: int, width: int, backend: Backend, inputs: Inputs) -> Call:
    x, weight = inputs.normal(rows, hidden), inputs.normal(width, hidden)
    return lambda: (backend.linear(x, weight),)


def _qkv_into_kv(rows: int, heads: int, kv_heads: int, dim: int, page: int, backend: Backend, inputs: Inputs) -> Call:
    qkv = inputs.normal(rows, heads + 2 * kv_heads, dim)
    q_norm, k_norm = inputs.normal(dim), inputs.normal(dim)
    kv, slots = inputs.pages(rows, page, kv_heads, dim), inputs.scattered(rows, rows)
    rotation = _rotation(rows, dim, backend, inputs)
    return lambda: (backend.qkv_into_kv(qkv, q_norm, k_norm, EPS, rotation, kv, slots), kv.k, kv.v)


def _context_into_kv(
    rows: int, layers: int, kv_heads: int, dim: int, page: int, backend: Backend, inputs: Inputs
) -> Call:
    context, norm = inputs.normal(rows, layers, 2, kv_heads, dim), inputs.normal(layers, dim)
    kv, slots = inputs.pages(rows * layers, page, kv_heads, dim), inputs.scattered(rows * layers, rows * layers)
    rotation, ones = _rotation(rows, dim, backend, inputs), torch.ones_like(norm[0])

    def call() -> Outputs:
        backend.context_into_kv(context, norm, ones, EPS, rotation, kv, slots)
        return kv.k, kv.v

    return call


def _noise(name: str, vocab: int, backend: Backend, inputs: Inputs) -> Call:
    sampler, states = Sampler(vocab, backend), inputs.integers(-(1 << 31), 1 << 31, 16)
    return lambda: (getattr(sampler, name)(states),)


def _argmax(rows: int, vocab: int, backend: Backend, inputs: Inputs) -> Call:
    """Draw from a few distinct values, so that the largest occurs many times; the lowest id must win."""
    logits = inputs.put(inputs.integers(0, 8, rows, vocab).float())
    return lambda: (logits.argmax(dim=-1),)


def _first_wrong(backend: Backend, inputs: Inputs) -> Call:
    agree, column = inputs.integers(0, 8, 16, 15) > 0, torch.arange(15, device=backend.device)
    return lambda: (torch.where(agree, 15, column).amin(dim=1, keepdim=True),)


def _take(backend: Backend, inputs: Inputs) -> Call:
    table, rows, columns = inputs.integers(0, 999, 16, 8), inputs.integers(0, 16, 64), inputs.integers(0, 8, 64)
    return lambda: (table[rows], table[rows, columns])


def _put(backend: Backend, inputs: Inputs) -> Call:
    table, at, values = inputs.integers(0, 999, 64), inputs.scattered(16, 64), inputs.integers(0, 999, 16)

    def call() -> Outputs:
        table[at] = values
        return (table,)

    return call


def _embedding(vocab: int, backend: Backend, inputs: Inputs) -> Call:
    ids, table = inputs.integers(0, vocab, 16), inputs.normal(vocab, 64)
    return lambda: (F.embedding(ids, table),)


def _embed_blocks(batch: int, block: int, hidden: int, backend: Backend, inputs: Inputs) -> Call:
    anchors, embedding = inputs.integers(0, 63, batch), inputs.normal(64, hidden)
    return lambda: (backend.embed_blocks(anchors, 63, block, embedding),)


def _positions(batch: int, block: int, page: int, backend: Backend, inputs: Inputs) -> Call:
    query_lens = [1 + i % block for i in range(batch)]
    query_start_loc = inputs.int32([0, *accumulate(query_lens)])
    seq_ids = inputs.int32([i for i, rows in enumerate(query_lens) for _ in range(rows)])
    offsets = inputs.integers(0, 7 * page, batch) - query_start_loc[:-1]
    table, numbers = inputs.scattered(batch * 8, batch * 9).view(batch, 8), torch.arange(sum(query_lens))
    row_numbers = inputs.int32(numbers)
    return lambda: backend.positions_and_slots(seq_ids, offsets, row_numbers, table, page)


def _verify(batch: int, block: int, backend: Backend, inputs: Inputs) -> Call:
    """Propose drafts of which about two thirds are the target's own."""
    num_drafts = inputs.integers(0, block, batch)
    counts = num_drafts.cpu() + 1
    first = (counts.cumsum(0) - counts).to(backend.device, torch.int32)
    choices, drafts = inputs.integers(0, 3, batch * block).long(), inputs.integers(0, 2, batch, block - 1)
    order = inputs.scattered(batch, batch)
    return lambda: (backend.verify(choices, drafts, first, num_drafts, order),)


def _advance(batch: int, block: int, backend: Backend, inputs: Inputs) -> Call:
    """Advance copies, so that a call may be repeated."""
    verified, prev_row = inputs.integers(0, block, batch, block + 1).long(), inputs.scattered(batch, batch)
    rows, anchors = inputs.integers(0, 999, batch * block), inputs.int32([block * i for i in range(batch)])
    offsets, seq_lens = inputs.integers(0, 999, batch), inputs.integers(0, 999, batch)

    def call() -> Outputs:
        advanced = rows.clone(), offsets.clone(), seq_lens.clone()
        backend.advance_by_accepted(verified, prev_row, advanced[0], anchors, *advanced[1:])
        return advanced

    return call


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference from the CPU, and its share of the largest value. NaN where either result has one."""

    absolute: float
    relative: float


@torch.inference_mode()
def difference(
    backend: Backend,
    operator: Operator,
    *,
    past: float | None = None,
    dtype: torch.dtype | None = None,
    against: Operator | None = None,
) -> tuple[Difference, Call]:
    """Compare `operator` on `backend` with `against`, itself by default, on the CPU. Returns also the call."""
    reference, dtype = TorchBackend(torch.device("cpu")), dtype or backend.defaults.dtype
    call = operator(backend, Inputs(backend, dtype, dtype, past))
    finite = None if past is None else 0.0
    wanted = (against or operator)(reference, Inputs(reference, dtype, torch.float32, finite))()
    absolute, relative = [0.0], [0.0]
    for got, want in zip(call(), wanted, strict=True):
        if want.numel():
            largest = float(want.double().abs().max())
            absolute.append(float((got.cpu().double() - want.double()).abs().max()))
            relative.append(absolute[-1] / largest if largest else absolute[-1])
    if any(isnan(error) for error in absolute):
        return Difference(float("nan"), float("nan")), call
    return Difference(max(absolute), max(relative)), call


def compare(backend: Backend, case: Case, past: float | None = None) -> tuple[dict[str, Any], Call]:
    """Return the numbers of one case, None where the result is not all numbers, and the call to time."""
    error, call = difference(backend, case.operator, past=past)
    is_number = not isnan(error.relative)
    numbers = (
        {"absolute": error.absolute, "relative": error.relative}
        if is_number
        else dict.fromkeys(("absolute", "relative"))
    )
    passed = is_number and error.relative <= case.tolerance
    return {"shape": case.shape, **numbers, "tolerance": case.tolerance, "passed": passed}, call


def find(backend: Backend, name: str) -> Finding:
    """Return what `check` says of one operator."""
    largest = 0.0
    for case in cases(replace(SMALL, page=backend.defaults.page_size))[name]:
        row, _ = compare(backend, case)
        if row["relative"] is None:
            return failed("the result is not all numbers", HINT)
        if not row["passed"]:
            return failed(f"differs from the CPU by up to {row['relative']:.1%} of the largest value", HINT)
        largest = max(largest, row["relative"])
    return ok(f"as on the CPU, to {largest:.1%} of the largest value" if largest else "exactly as on the CPU")
