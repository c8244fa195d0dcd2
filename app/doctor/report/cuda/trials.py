"""Other ways to launch attention than the backend's, to choose by on a GPU."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.doctor.report.cuda.kernels import Cases, Sizes
from app.doctor.report.cuda.parts import Part, Row, in_a_line
from app.engine.cuda.attention import MAX_SPLITS, Geometry, paged_attention
from app.engine.cuda.backend import CudaBackend

Seconds = Callable[[Callable[[], object]], float]
PROMPTS = [([512] * 4, [512] * 4), ([2048], [2048]), ([2048], [8192])]
WARM_UP = ([100], [100])
"""Of rows and tokens that no prompt has: what a kind of attention does once in a process is done with it."""


def of_launches(backend: CudaBackend, cases: Cases, sizes: Sizes, seconds: Seconds) -> list[Part]:
    """Of verification from graphs: plain and of whole blocks, beside nobody's sequence."""
    return [
        Part(f"{batch} x {width}", partial(launches, backend, cases, batch, width, sizes.context, seconds))
        for batch in sizes.batches
        for width in (1, sizes.block)
    ]


@torch.inference_mode()
def launches(backend: CudaBackend, cases: Cases, batch: int, width: int, context: int, seconds: Seconds) -> list[Row]:
    """The five fastest, and the backend's own, which is marked; and those that cannot be."""
    q, kv, meta = cases.attention([width] * batch + [0], [context] * batch + [0], causal=True)
    own = backend.geometry(q, kv, meta)
    call = f"{batch} x {width}"
    found: list[tuple[float, Geometry]] = []
    rows: list[Row] = []
    for at in _others(own):
        try:
            found.append((seconds(partial(paged_attention, q, kv, meta, at)), at))
        except Exception as error:  # Triton has errors of its own, that are no RuntimeError
            rows.append({"call": call, "launch": _said(at), "failed": in_a_line(error)})
    fastest = sorted(found, key=lambda pair: pair[0])
    for taken, at in fastest[:5] + [pair for pair in fastest[5:] if pair[1] == own]:
        mark = " (the backend's own)" if at == own else ""
        rows.append({"call": call, "launch": _said(at) + mark, "us": 1e6 * taken})
    return rows


def _others(own: Geometry) -> list[Geometry]:
    """The own one first."""
    others = ((64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 8, 3), (32, 4, 3), (32, 4, 5), (128, 8, 3))
    found = [
        replace(own, splits=some) for some in (own.splits, max(1, own.splits // 2), min(MAX_SPLITS, 2 * own.splits))
    ]
    found += [replace(own, tokens=tokens, warps=warps, stages=forward) for tokens, warps, forward in others]
    return list(dict.fromkeys(found))


def _said(at: Geometry) -> str:
    return f"{at.splits} splits, {at.tokens} tokens, {at.warps} warps, {at.stages} stages"


def of_prompts(backend: CudaBackend, cases: Cases, seconds: Seconds, first: Seconds) -> list[Part]:
    """`first` takes the time of a call as it is made; the others of it are in a graph."""
    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "PyTorch's, as the backend calls it": nullcontext,
        "PyTorch's, cuDNN": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        "PyTorch's, memory-efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        "ours": nullcontext,
    }
    return [Part(kind, partial(prompts, backend, cases, kind, among, seconds, first)) for kind, among in kinds.items()]


@torch.inference_mode()
def prompts(
    backend: CudaBackend,
    cases: Cases,
    kind: str,
    among: Callable[[], AbstractContextManager[None]],
    seconds: Seconds,
    first: Seconds,
) -> list[Row]:
    """One kind of attention over each of PROMPTS."""
    rows: list[Row] = []
    for query_lens, host_seq_lens in (WARM_UP, *PROMPTS):
        q, kv, meta = cases.attention(query_lens, host_seq_lens, causal=True)
        for pool in (kv.k, kv.v):
            pool.nan_to_num_()
        planned = replace(meta, plan=backend.plan_attention(meta, q.shape[1] // kv.k.shape[2]))
        run: Callable[[], object] = partial(backend.attention, q, kv, planned)
        if kind == "ours":
            run = partial(paged_attention, q, kv, meta, backend.geometry(q, kv, meta))
        row: Row = {"attention": kind, "rows": str(query_lens), "tokens": str(host_seq_lens)}
        try:
            with among():
                row |= {"first call ms": 1e3 * first(run), "us": 1e6 * seconds(run)}
        except Exception as error:
            row["failed"] = in_a_line(error)
        rows.append(row)
    return rows[1:]


def seconds_at_once(run: Callable[[], object]) -> float:
    """Of one call, from its start on the host to its end on the device."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started
