"""Every kernel of the CUDA backend against PyTorch's operators in fp32, and how long it takes, on this device; and what
the device gives at most."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from app.doctor.report.cuda.floor import BANDWIDTH
from app.doctor.report.cuda.parts import Part, Row, failure
from app.engine.backend.base import AttentionMetadata, Backend, LayerKv, Rotation
from app.engine.build.self_test import TOLERANCE
from app.engine.cuda import rows as rows_of_backend
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.torch_backend import TorchCudaBackend
from app.engine.models.layers import RotaryTable

CALLS = 20
"""Of a kernel in the graph that is timed: a launch from Python costs more than most of them take."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layer of a target, and of a draft's context; by default Qwen3-8B's."""

    hidden: int = 4096
    inner: int = 12288
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    layers: int = 5
    block: int = 16
    context: int = 1024
    batches: tuple[int, ...] = (1, 32)


@dataclass(frozen=True, slots=True)
class Case:
    """`run` gives what `expected` gives in fp32, and moves so many bytes at least; `exact` is bit by bit."""

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    expected: Callable[[], tuple[Tensor, ...]]
    moved: int
    exact: bool = False


class Cases:
    """Inputs on the device of `backend`, and every kernel over them."""

    def __init__(self, backend: CudaBackend, sizes: Sizes, dtype: torch.dtype) -> None:
        self._backend, self._sizes, self._dtype = backend, sizes, dtype
        self._reference = TorchCudaBackend(backend.device)
        self._noise = torch.Generator(backend.device).manual_seed(0)

    def all(self) -> list[Case]:
        made = []
        for batch in self._sizes.batches:
            for width in (1, self._sizes.block):
                made += [*self._of_rows(batch * width), *self._attentions(batch, width)]
            made += self._of_blocks(batch)
        return made

    def attention(
        self, query_lens: list[int], host_seq_lens: list[int], *, causal: bool
    ) -> tuple[Tensor, LayerKv, AttentionMetadata]:
        """q, pages and meta; what is past a sequence's tokens is NaN."""
        sizes, page = self._sizes, 16
        counts = [-(-kv_len // page) for kv_len in host_seq_lens]
        ids = torch.randperm(sum(counts), generator=self._noise, device=self._backend.device).to(torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=self._backend.device)
        kv = LayerKv(*(self._normal(sum(counts), page, sizes.kv_heads, sizes.dim) for _ in range(2)))
        for i, (own, kv_len) in enumerate(zip(ids.split(counts), host_seq_lens, strict=True)):
            table[i, : len(own)] = own
            for pool in (kv.k, kv.v) if kv_len else ():
                pool[own[-1].long(), (kv_len - 1) % page + 1 :] = float("nan")
        query_start_loc, lengths = (self._ints(x) for x in ([0, *accumulate(query_lens)], host_seq_lens))
        q = self._normal(sum(query_lens), sizes.heads, sizes.dim)
        return q, kv, AttentionMetadata(query_start_loc, lengths, table, query_lens, host_seq_lens, page, causal)

    def _attentions(self, batch: int, width: int) -> list[Case]:
        """Of verification, eagerly, and from a graph, where nobody's sequence has the rows that are left; and of a
        draft's blocks."""
        even, lengths = [width] * batch, self._lengths(batch, width)
        ragged = [1 + 5 * i % width for i in range(batch)]
        rest = sum(even) - sum(ragged)
        shapes = [("causal", even, lengths), ("causal, and nobody's", [*even, 0], [*lengths, 0])]
        if width > 1:
            shapes.append(("both ways", even, lengths))
        if width > 1 and batch > 1:
            shapes.append((f"ragged, causal, and nobody's {rest}", [*ragged, rest], [*lengths, rest]))
        made = []
        for name, query_lens, host_seq_lens in shapes:
            q, kv, meta = self.attention(query_lens, host_seq_lens, causal=name != "both ways")
            moved = 2 * q.nbytes + 2 * sum(meta.host_seq_lens) * kv.k[0, 0].nbytes
            name = f"attention, {batch} x {width} rows, {name}"
            made.append(Case(name, partial(self._own, q, kv, meta), partial(self._dense, q, kv, meta), moved))
        return made

    def _lengths(self, batch: int, width: int) -> list[int]:
        """Around the context, each its own."""
        return [max(width, self._sizes.context - 37 * i % (self._sizes.context // 2 + 1)) for i in range(batch)]

    def _own(self, q: Tensor, kv: LayerKv, meta: AttentionMetadata) -> tuple[Tensor, ...]:
        return (self._backend.attention(q, kv, meta),)

    def _dense(self, q: Tensor, kv: LayerKv, meta: AttentionMetadata) -> tuple[Tensor, ...]:
        """In fp32, without what is not a number: PyTorch's attention multiplies it by a weight of nothing."""
        wide = LayerKv(*(torch.nan_to_num(pool.float()) for pool in (kv.k, kv.v)))
        plan = self._reference.plan_attention(meta, q.shape[1] // kv.k.shape[2])
        return (self._reference.attention(q.float(), wide, replace(meta, plan=plan)),)

    def _of_rows(self, rows: int) -> list[Case]:
        backend, reference, sizes = self._backend, self._reference, self._sizes
        x, residual = self._normal(rows, sizes.hidden), self._normal(rows, sizes.hidden)
        weight, gate_up = self._normal(sizes.hidden), self._normal(rows, 2 * sizes.inner)
        norms = self._normal(sizes.dim), self._normal(sizes.dim)
        qkv = self._normal(rows, sizes.heads + 2 * sizes.kv_heads, sizes.dim)
        context = self._normal(rows, sizes.layers, 2, sizes.kv_heads, sizes.dim)
        context_norm, ones = self._normal(sizes.layers, sizes.dim), torch.ones_like(norms[0])
        rotation = RotaryTable(sizes.dim, 1e6, 4096, self._dtype, backend).at(torch.arange(rows, device=x.device))
        slot_mapping, layer_slots = self._slots(rows), self._slots(rows * sizes.layers)
        kv, layers_kv = self._pages(rows), self._pages(rows * sizes.layers)

        def qkv_into_kv(on: Backend, cast: Callable[[Tensor], Tensor], turns: Rotation) -> tuple[Tensor, ...]:
            pages = LayerKv(cast(kv.k), cast(kv.v))
            q = on.qkv_into_kv(cast(qkv), cast(norms[0]), cast(norms[1]), 1e-6, turns, pages, slot_mapping)
            return q, pages.k, pages.v

        def context_into_kv(on: Backend, cast: Callable[[Tensor], Tensor], turns: Rotation) -> tuple[Tensor, ...]:
            pages = LayerKv(cast(layers_kv.k), cast(layers_kv.v))
            on.context_into_kv(cast(context), cast(context_norm), cast(ones), 1e-6, turns, pages, layer_slots)
            return pages.k, pages.v

        def silu_mul(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.float().chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

        def added() -> tuple[Tensor, ...]:
            total = x + residual
            return reference.rms_norm(total.float(), weight.float(), 1e-6), total.float()

        wide = tuple(part.float() for part in rotation)
        return [
            Case(
                f"rms_norm, {rows} rows",
                lambda: (backend.rms_norm(x, weight, 1e-6),),
                lambda: (reference.rms_norm(x.float(), weight.float(), 1e-6),),
                2 * x.nbytes,
            ),
            Case(
                f"add_rms_norm, {rows} rows",
                lambda: backend.add_rms_norm(x, residual, weight, 1e-6),
                added,
                4 * x.nbytes,
            ),
            Case(
                f"silu_mul, {rows} rows",
                lambda: (rows_of_backend.silu_mul(gate_up),),
                lambda: (silu_mul(gate_up),),
                3 * gate_up.nbytes // 2,
            ),
            Case(
                f"qkv_into_kv, {rows} rows",
                lambda: qkv_into_kv(backend, lambda x: x, rotation),
                lambda: qkv_into_kv(reference, lambda x: x.float(), wide),
                2 * qkv.nbytes,
            ),
            Case(
                f"context_into_kv, {rows} rows",
                lambda: context_into_kv(backend, lambda x: x, rotation),
                lambda: context_into_kv(reference, lambda x: x.float(), wide),
                2 * context.nbytes,
            ),
        ]

    def _of_blocks(self, batch: int) -> list[Case]:
        """Integers and copies: the same bit by bit."""
        backend, reference, sizes = self._backend, self._reference, self._sizes
        rows, drafts = batch * sizes.block, batch * (sizes.block - 1)
        seq_ids = self._ints([i // sizes.block for i in range(rows)])
        position_offsets = self._ints([self._sizes.context - sizes.block * i for i in range(batch)])
        table = self._slots(batch * (sizes.context // 16 + 2)).view(batch, -1)
        numbers = self._ints(list(range(rows)))
        embedding, anchors = self._normal(64, sizes.hidden), self._ints([i % 64 for i in range(batch)])
        choices = torch.randint(2, (rows,), generator=self._noise, device=backend.device)
        said = torch.randint(2, (drafts,), generator=self._noise, device=backend.device).to(torch.int32)
        lengths = [self._ints([k * i for i in range(batch)]) for k in (sizes.block, 0, 1)]
        lengths[1] += sizes.block - 1
        blocks = said.view(batch, -1)
        verified = torch.randint(sizes.block, (batch, sizes.block + 1), generator=self._noise, device=backend.device)
        lines = self._ints(list(reversed(range(batch))))

        def advanced(on: Backend) -> tuple[Tensor, ...]:
            token_ids, starts, kv_len = numbers.clone(), position_offsets.clone(), position_offsets.clone()
            on.advance_by_accepted(verified, lines, token_ids, lengths[0], starts, kv_len)
            return token_ids, starts, kv_len

        return [
            Case(
                f"positions_and_slots, {rows} rows",
                lambda: backend.positions_and_slots(seq_ids, position_offsets, numbers, table, 16),
                lambda: reference.positions_and_slots(seq_ids, position_offsets, numbers, table, 16),
                12 * rows,
                exact=True,
            ),
            Case(
                f"embed_blocks, {rows} rows",
                lambda: (backend.embed_blocks(anchors, 63, sizes.block, embedding),),
                lambda: (Backend.embed_blocks(backend, anchors, 63, sizes.block, embedding),),
                2 * rows * embedding[0].nbytes,
                exact=True,
            ),
            Case(
                f"verify, {batch} sequences",
                lambda: (backend.verify(choices, blocks, *lengths),),
                lambda: (reference.verify(choices, blocks, *lengths),),
                12 * rows,
                exact=True,
            ),
            Case(
                f"advance_by_accepted, {batch} sequences, and three copies",
                lambda: advanced(backend),
                lambda: advanced(reference),
                8 * rows,
                exact=True,
            ),
        ]

    def _pages(self, slot_mapping: int) -> LayerKv:
        shape = (-(-slot_mapping // 16), 16, self._sizes.kv_heads, self._sizes.dim)
        return LayerKv(*(torch.zeros(shape, dtype=self._dtype, device=self._backend.device) for _ in range(2)))

    def _slots(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._noise, device=self._backend.device).to(torch.int32)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._backend.device)

    def _normal(self, *shape: int) -> Tensor:
        device = self._backend.device
        return torch.randn(shape, dtype=torch.float32, device=device, generator=self._noise).to(self._dtype)


def of_device(
    device: torch.device, seconds: Callable[[Callable[[], object]], float], copied: int = 1 << 30, size: int = 8192
) -> list[Part]:
    """What this memory and these multipliers give: a copy of `copied` bytes, and a product of square matrices."""

    @torch.inference_mode()
    def copy() -> list[Row]:
        source = torch.zeros(copied, dtype=torch.uint8, device=device)
        to = torch.empty_like(source)
        return [{"what": "copy", "TB/s": 2 * copied / seconds(lambda: to.copy_(source)) / 1e12}]

    @torch.inference_mode()
    def product() -> list[Row]:
        a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        return [{"what": f"matrix product of {size}", "TFLOP/s": 2 * size**3 / seconds(lambda: a @ b) / 1e12}]

    return [Part("copy", copy), Part("matrix product", product)]


def parts(cases: Cases, seconds: Callable[[Callable[[], object]], float]) -> list[Part]:
    """One a kernel and size."""
    return [Part(case.name, partial(checked, case, seconds)) for case in cases.all()]


@torch.inference_mode()
def checked(case: Case, seconds: Callable[[Callable[[], object]], float | None]) -> list[Row]:
    """The kernel's largest difference as a share of the largest value, its time, and its share of the bandwidth."""
    expected = case.expected()  # before anything is written
    found = case.run()
    error = max(_error(got, want) for got, want in zip(found, expected, strict=True))
    row = {"kernel": case.name, "error": error, "passed": error == 0 if case.exact else error < TOLERANCE}
    try:
        taken = seconds(case.run)
    except Exception as failed:
        return [row | failure(failed)]
    if taken is None:
        return [row]
    return [row | {"us": 1e6 * taken, "share of bandwidth": case.moved / BANDWIDTH / taken}]


def _error(found: Tensor, expected: Tensor) -> float:
    """Infinite where something is not a number."""
    difference = float((found.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max())
    return difference / max(1e-9, float(expected.double().abs().max()))


def seconds_in_a_graph(backend: CudaBackend, run: Callable[[], object], repeats: int = 5) -> float:
    """Of one `run`, from CALLS of them in a graph; the least of some replays."""

    def calls() -> tuple[Tensor, ...]:
        for _ in range(CALLS):
            run()
        return ()

    graph, taken = backend.capture_apart(calls), []
    for _ in range(repeats):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        taken.append(started.elapsed_time(ended) / 1e3 / CALLS)
    return min(taken)
