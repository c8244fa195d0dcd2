"""Every operator of the backend, and those of PyTorch that a step uses, against the CPU in float32.

A relative error is a share of the largest value of the result. Integers must be exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from math import isnan

import torch
import torch.nn.functional as F
from torch import Tensor

from app.doctor.operators import Inputs, Operator, difference
from app.doctor.report.npu.part import Part, Prompts, Result, rounded
from app.engine.backend.base import AttentionMetadata, Backend, LayerKv
from app.engine.backend.factory import make_backend
from app.engine.sampling.sampler import Sampler

PAGE = 128
BF16 = 2.0**-7
"""Two roundings to eight bits, of the largest value."""
TOLERANCES = {"attention": 0.02, "gated_mlp": 0.02, "gumbel": 1e-4}
"""Shares of the largest value; BF16 for other operators on floats, 0 for those on integers."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is compared: (query heads, KV heads, D) of attention, rows of a request, KV lengths, sizes of rows."""

    heads: tuple[tuple[int, int, int], ...] = (
        (8, 8, 64),
        (8, 2, 64),
        (4, 2, 128),
        (8, 8, 128),
        (32, 8, 128),
        (64, 4, 128),
    )
    rows: tuple[int, ...] = tuple(range(1, 17))
    edges: tuple[int, ...] = (16, 127, 128, 129, 255, 256, 257)
    long: tuple[int, ...] = (4095, 4096, 8193)
    chunk: int = 512
    hidden: int = 4096
    intermediate: int = 12288
    vocab: int = 151936
    num_rows: tuple[int, ...] = (1, 16, 257)


@dataclass(frozen=True, slots=True)
class Case:
    """`kind` is the name of its tolerance."""

    shape: str
    operator: Operator
    kind: str = ""
    exact: bool = field(default=False, kw_only=True)

    @property
    def tolerance(self) -> float:
        return 0.0 if self.exact else TOLERANCES.get(self.kind, BF16)


def parts(device: str, prompts: Prompts) -> list[Part]:
    opened = cache(partial(make_backend, device))
    return [Part(name, lambda some=some: compare(opened(), some)) for name, some in cases(Extent()).items()]  # type: ignore[misc]


def compare(backend: Backend, some: Sequence[Case]) -> Result:
    """Numbers of each case."""
    found = []
    for case in some:
        error = difference(backend, case.operator)
        passed = not isnan(error.relative) and error.relative <= case.tolerance
        numbers = {"absolute": error.absolute, "relative": error.relative}
        shown = {name: None if isnan(x) else rounded(x) for name, x in numbers.items()}
        found.append({"shape": case.shape, **shown, "tolerance": rounded(case.tolerance), "passed": passed})
    return {"cases": found, "passed": all(case["passed"] for case in found)}


def cases(extent: Extent) -> dict[str, list[Case]]:
    """Operator -> cases."""
    hidden, num_rows, vocab = extent.hidden, extent.num_rows, extent.vocab
    dims = sorted({(heads, dim) for heads, _, dim in extent.heads})
    return {
        "attention, causal": _attention_cases(extent, causal=True),
        "attention, bidirectional": _attention_cases(extent, causal=False),
        "write_kv": [
            Case(f"{n} rows of {kv} x {dim}", partial(_write_kv, n, kv, dim), exact=True)
            for n in num_rows
            for _, kv, dim in extent.heads
        ],
        "rms_norm": [
            *(Case(f"[{n}, {hidden}]", partial(_rms_norm, (n, hidden))) for n in num_rows),
            *(Case(f"[{num_rows[-1]}, {h}, {d}]", partial(_rms_norm, (num_rows[-1], h, d))) for h, d in dims),
        ],
        "add_rms_norm": [Case(f"[{n}, {hidden}]", partial(_add_rms_norm, n, hidden)) for n in num_rows],
        "rope": [Case(f"[{n}, {h}, {d}]", partial(_rope, n, h, d)) for n in num_rows for h, d in dims],
        "gated_mlp": [
            Case(f"[{n}, {hidden}] x {extent.intermediate}", partial(_gated_mlp, n, extent), "gated_mlp")
            for n in num_rows
        ],
        "linear": [
            Case(f"[{n}, {hidden}] x {extent.intermediate}", partial(_linear, n, hidden, extent.intermediate))
            for n in num_rows
        ],
        "noise": [
            Case(f"bits [16, {vocab}]", partial(_noise_bits, vocab), exact=True),
            Case(f"Gumbel [16, {vocab}]", partial(_gumbel, vocab), "gumbel"),
        ],
        "argmax": [Case(f"ties in [{n}, {vocab}]", partial(_argmax, n, vocab), exact=True) for n in num_rows],
        "integers": [
            Case("the first that is wrong", _first_wrong, exact=True),
            Case("take by int32 index", _take, exact=True),
            Case("put by int32 index", _put, exact=True),
            Case("embedding", partial(_embedding, vocab), exact=True),
        ],
        "places": [Case("positions and slots of 16 sequences", _places, exact=True)],
        "verify": [Case("16 sequences, blocks of 16", _verify, exact=True)],
    }


def _attention_cases(extent: Extent, *, causal: bool) -> list[Case]:
    lengths = {
        "about page edges": [(rows, max(rows, kv)) for kv in extent.edges for rows in extent.rows],
        "long": [(rows, kv) for kv in extent.long for rows in (1, extent.rows[-1])],
    }
    if causal:
        lengths["prefill"] = [(extent.chunk, extent.chunk), (extent.chunk - 1, extent.chunk + PAGE + 1), (1, 1)]
    return [
        Case(
            f"{heads} heads to {kv_heads}, D {dim}, {name}: {len(lens)} requests",
            partial(attend, lens, heads, kv_heads, dim, causal),
            "attention",
        )
        for heads, kv_heads, dim in extent.heads
        for name, lens in lengths.items()
    ]


def attend(
    lens: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    backend: Backend,
    inputs: Inputs,
) -> tuple[Tensor, ...]:
    """Attention of requests with these (rows, KV tokens), over scattered pages that hold numbers to their end."""
    query_lens, host_seq_lens = [q for q, _ in lens], [kv for _, kv in lens]
    counts = [-(-kv // PAGE) for kv in host_seq_lens]
    order = inputs.scattered(sum(counts), sum(counts) + 1).tolist()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
    k, v = (inputs.normal(sum(counts) + 1, PAGE, kv_heads, dim) for _ in range(2))
    query_start_loc, lengths = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, *accumulate(query_lens)], host_seq_lens)
    )
    query_start_loc, lengths, table = (x.to(backend.device) for x in (query_start_loc, lengths, table))
    meta = AttentionMetadata(query_start_loc, lengths, table, query_lens, host_seq_lens, PAGE, causal)
    meta.plan = backend.plan_attention(meta, heads // kv_heads)
    return (backend.attention(inputs.normal(sum(query_lens), heads, dim), LayerKv(k, v), meta),)


def _write_kv(rows: int, kv_heads: int, dim: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    num_pages = rows // PAGE + 2
    pages = [inputs.normal(num_pages, PAGE, kv_heads, dim) for _ in range(2)]
    k, v = inputs.normal(rows, 2 * kv_heads, dim).chunk(2, dim=1)
    backend.write_kv(k, v, LayerKv(*pages), inputs.scattered(rows, num_pages * PAGE))
    return tuple(pages)


def _rms_norm(shape: tuple[int, ...], backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    return (backend.rms_norm(inputs.normal(*shape), inputs.normal(shape[-1]), 1e-6),)


def _add_rms_norm(rows: int, hidden: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    x, residual = inputs.normal(rows, hidden), inputs.normal(rows, hidden)
    return backend.add_rms_norm(x, residual, inputs.normal(hidden), 1e-6)


def _rope(rows: int, heads: int, dim: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    angles = torch.arange(rows * dim // 2).view(rows, 1, -1) / dim
    cos, sin = (inputs.put(torch.cat((half, half), dim=-1)) for half in (angles.cos(), angles.sin()))
    return (backend.rope(inputs.normal(rows, heads, dim), (cos, sin)),)


def _gated_mlp(rows: int, extent: Extent, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    gate_up = inputs.normal(2 * extent.intermediate, extent.hidden)
    down = inputs.normal(extent.hidden, extent.intermediate)
    return (backend.gated_mlp(inputs.normal(rows, extent.hidden, scale=extent.hidden**-0.5), gate_up, down),)


def _linear(rows: int, hidden: int, width: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    return (backend.linear(inputs.normal(rows, hidden), inputs.normal(width, hidden)),)


def _noise_states(inputs: Inputs) -> Tensor:
    return inputs.integers(-(1 << 31), 1 << 31, 16)


def _noise_bits(vocab: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    return (Sampler(vocab, backend).noise_bits(_noise_states(inputs)),)


def _gumbel(vocab: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    return (Sampler(vocab, backend).gumbel(_noise_states(inputs)),)


def _argmax(rows: int, vocab: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    """A few distinct values, so that the largest is there many times; the lowest id is wanted."""
    return (inputs.put(inputs.integers(0, 8, rows, vocab).float()).argmax(dim=-1),)


def _first_wrong(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    agree = inputs.integers(0, 8, 16, 15) > 0
    column = torch.arange(15, device=backend.device)
    return (torch.where(agree, 15, column).amin(dim=1, keepdim=True),)


def _take(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    table, rows, columns = inputs.integers(0, 999, 16, 8), inputs.integers(0, 16, 64), inputs.integers(0, 8, 64)
    return table[rows], table[rows, columns]


def _put(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    places = inputs.integers(0, 999, 64)
    places[inputs.scattered(16, 64)] = inputs.integers(0, 999, 16)
    return (places,)


def _embedding(vocab: int, backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    return (F.embedding(inputs.integers(0, vocab, 16), inputs.normal(vocab, 64)),)


def _places(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    query_lens = [1 + i for i in range(16)]
    query_start_loc = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32).to(backend.device)
    starts, table = inputs.integers(0, 900, 16), inputs.scattered(16 * 8, 999).view(16, 8)
    numbers = torch.arange(sum(query_lens), dtype=torch.int32, device=backend.device)
    owners = torch.tensor([i for i, rows in enumerate(query_lens) for _ in range(rows)], dtype=torch.int32)
    return backend.positions_and_slots(owners.to(backend.device), starts - query_start_loc[:-1], numbers, table, PAGE)


def _verify(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    """Drafts of which about two thirds of the tokens are the target's own."""
    num_drafts = inputs.integers(0, 16, 16)
    counts = num_drafts.cpu() + 1
    first = (counts.cumsum(0) - counts).to(backend.device, torch.int32)
    choices, drafts = inputs.integers(0, 3, 16 * 16).long(), inputs.integers(0, 2, 16, 15)
    return (backend.verify(choices, drafts, first, num_drafts, inputs.scattered(16, 16)),)
