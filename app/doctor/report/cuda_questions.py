"""Questions of the CUDA backend alone: a kernel inside an operator, and other ways to launch attention."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.doctor.operators import CUDA, NUMBER_BYTES, Attention, Call, Case, Extent, Inputs, Paged
from app.doctor.report.command import Options
from app.doctor.report.part import Part, Result, describe
from app.doctor.report.timing import Timer, seconds_at_once, timer
from app.engine.backend.base import Backend
from app.engine.backend.factory import make_backend
from app.engine.cuda.attention import MAX_SPLITS, Geometry, paged_attention
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.rows import silu_mul

PROMPTS = [[(512, 512)] * 4, [(2048, 2048)], [(2048, 8192)]]
"""Query rows and KV tokens of the prompts of a step."""
WARM_UP = [(100, 100)]
"""A length that no prompt has, because a kind of attention does some work once in a process."""
CONTEXT = 1024
FASTEST = 5


def cases(extent: Extent) -> dict[str, list[Case]]:
    """Return the cases of kernels that `Backend` has no name for."""
    inner = extent.intermediate
    moved = 3 * NUMBER_BYTES * inner
    return {
        "silu_mul": [
            Case(f"[{n}, 2 x {inner}]", partial(_silu_mul, n, inner), extent.tolerance, n * moved)
            for n in extent.num_rows
        ]
    }


def _silu_mul(rows: int, inner: int, backend: Backend, inputs: Inputs) -> Call:
    gate_up = inputs.normal(rows, 2 * inner)
    if isinstance(backend, CudaBackend):
        return lambda: (silu_mul(gate_up),)
    gate, up = gate_up.chunk(2, dim=-1)
    return lambda: (torch.nn.functional.silu(gate) * up,)


def launches_parts(options: Options, ends: float) -> list[Part]:
    return launches_of(cache(partial(make_backend, options.device)), CUDA, CONTEXT)


def launches_of(opened: Callable[[], Backend], extent: Extent, context: int, timed: Timer = timer) -> list[Part]:
    """Return parts for verification from graphs: plain and of whole blocks, beside padding."""
    return [
        Part(f"{batch} x {width}", partial(launches, opened, extent, [(width, context)] * batch + [(0, 0)], timed))
        for batch in extent.batches
        for width in (1, extent.block)
    ]


@torch.inference_mode()
def launches(
    opened: Callable[[], Backend],
    extent: Extent,
    lens: list[tuple[int, int]],
    timed: Timer,
) -> Result:
    """Time other launches. Cases are the fastest, the backend's own, which is marked, and those that are refused."""
    call = _attention(opened(), extent, lens)
    own, seconds = call.backend.geometry(call.q, call.kv, call.meta), timed(call.backend)  # type: ignore[attr-defined]
    taken: list[tuple[float, Geometry]] = []
    rows: list[Result] = []
    refused: Result = {}
    for at in _others(own):
        try:
            taken.append((seconds(partial(paged_attention, call.q, call.kv, call.meta, at)), at))
        except Exception as error:  # Triton has errors of its own, which are no RuntimeError
            refused = {"error": describe(error)}
            rows.append({"launch": _shown(at), "failed": refused["error"]["says"]})
    fastest = sorted(taken, key=lambda pair: pair[0])
    for us, at in fastest[:FASTEST] + [pair for pair in fastest[FASTEST:] if pair[1] == own]:
        mark = " (the backend's own)" if at == own else ""
        rows.append({"launch": _shown(at) + mark, "us": 1e6 * us})
    return {"cases": rows} | refused


def _attention(backend: Backend, extent: Extent, lens: list[tuple[int, int]]) -> Attention:
    dtype = backend.defaults.dtype
    paged = Paged(lens, *extent.heads[0], causal=True, page=extent.page)
    return paged(backend, Inputs(backend, dtype, dtype, past=0.0))


def _others(own: Geometry) -> list[Geometry]:
    """Return launches to try, the own one first."""
    tiles = ((64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 8, 3), (32, 4, 3), (32, 4, 5), (128, 8, 3))
    splits = (own.splits, max(1, own.splits // 2), min(MAX_SPLITS, 2 * own.splits))
    others = [replace(own, splits=count) for count in splits]
    others += [replace(own, tokens=tokens, warps=warps, stages=stages) for tokens, warps, stages in tiles]
    return list(dict.fromkeys(others))


def _shown(at: Geometry) -> str:
    return f"{at.splits} splits, {at.tokens} tokens, {at.warps} warps, {at.stages} stages"


def prompts_parts(options: Options, ends: float) -> list[Part]:
    return prompts_of(cache(partial(make_backend, options.device)), CUDA)


def prompts_of(opened: Callable[[], Backend], extent: Extent, timed: Timer = timer) -> list[Part]:
    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "PyTorch's, as the backend calls it": nullcontext,
        "PyTorch's, cuDNN": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        "PyTorch's, memory-efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        "ours": nullcontext,
    }
    return [Part(kind, partial(prompts, opened, extent, kind, among, timed)) for kind, among in kinds.items()]


@torch.inference_mode()
def prompts(
    opened: Callable[[], Backend],
    extent: Extent,
    kind: str,
    among: Callable[[], AbstractContextManager[None]],
    timed: Timer,
) -> Result:
    """Time one kind of attention over each of PROMPTS: its first call as it is made, the others in a graph."""
    backend, rows = opened(), list[Result]()
    refused: Result = {}
    for lens in (WARM_UP, *PROMPTS):
        call = _attention(backend, extent, lens)
        run: Callable[[], object] = call
        if kind == "ours":
            geometry = backend.geometry(call.q, call.kv, call.meta)  # type: ignore[attr-defined]
            run = partial(paged_attention, call.q, call.kv, call.meta, geometry)
        row: Result = {"rows": str([q for q, _ in lens]), "tokens": str([kv for _, kv in lens])}
        try:
            with among():
                row |= {"first call ms": 1e3 * seconds_at_once(backend, run), "us": 1e6 * timed(backend)(run)}
        except Exception as error:
            refused = {"error": describe(error)}
            row["failed"] = refused["error"]["says"]
        rows.append(row)
    return {"cases": rows[1:]} | refused
