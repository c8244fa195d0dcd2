"""Attention of the CUDA backend, timed: other ways to launch it, and other kinds for prompts."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from math import inf

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.check.operators import Attention, Extent, Inputs, Lens, Paged
from app.engine.cuda.attention import MAX_SPLITS, Geometry, paged_attention
from app.engine.device.base import AttentionMask, Backend
from app.engine.device.factory import make_backend
from tools.lab import expected
from tools.report.command import Options
from tools.report.operators import CUDA
from tools.report.part import Part, Result, describe
from tools.report.timing import Timer, timer

PROMPTS = [[(512, 512)] * 4, [(2048, 2048)], [(2048, 8192)]]
"""Query rows and KV tokens of the prompts of a step."""
WARM_UP = [(100, 100)]
"""A length that no prompt has, because a kind of attention does some work once in a process."""
CONTEXT = 1024
TILES = ((64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 8, 3), (32, 4, 3), (32, 4, 5), (128, 8, 3))
"""Tokens, warps and stages of other launches."""
OWN = " (the backend's own)"
KINDS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "PyTorch's, as the backend calls it": nullcontext,
    "PyTorch's, cuDNN": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    "PyTorch's, memory-efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "ours": nullcontext,
}

Open = Callable[[], Backend]
Attempt = tuple[Result, Callable[[], Result]]
"""Head of a row, and a function that measures the rest or raises."""


def launches_parts(options: Options, ends: float) -> list[Part]:
    return launches_of(cache(partial(make_backend, options.device)), options.model, CUDA, CONTEXT)


def launches_of(opened: Open, model: str, extent: Extent, context: int, timed: Timer = timer) -> list[Part]:
    """Return parts for verification from graphs: plain and of whole blocks, beside padding."""

    def part(batch: int, width: int) -> Result:
        found = launches(opened, extent, [(width, context)] * batch + [(0, 0)], timed)
        step = expected.of_rows(model, batch, width)
        return {"expected us": step and 1e3 * step.attention / expected.LAYERS} | found

    return [
        Part(f"{batch} x {width}", partial(part, batch, width))
        for batch in extent.batches
        for width in (1, extent.block)
    ]


@torch.inference_mode()
def launches(opened: Open, extent: Extent, lens: Lens, timed: Timer) -> Result:
    """Time other launches, the fastest first. The backend's own is marked."""
    call, seconds = _attention(opened(), extent, lens), timed(opened())
    own = _geometry(call)
    most = min(MAX_SPLITS, 2 * own.splits)
    others = [replace(own, splits=count) for count in (own.splits, max(1, own.splits // 2), most)]
    others += [replace(own, tokens=tokens, warps=warps, stages=stages) for tokens, warps, stages in TILES]

    def us(at: Geometry) -> Result:
        return {"us": 1e6 * seconds(partial(paged_attention, call.q, call.kv, call.meta, call.mask, at))}

    attempts = [({"launch": _shown(at) + OWN * (at == own)}, partial(us, at)) for at in dict.fromkeys(others)]
    attempts.append(({"launch": _shown(own) + ", again"}, partial(us, own)))  # differs by noise alone
    result = _answers(attempts)
    cases = sorted(result["cases"], key=lambda row: row.get("us", inf))
    told = [f"{row['us']:.4g} us with {row['launch']}" for row in cases if "us" in row]
    default = [text for text in told if text.endswith(OWN)]
    return result | {"cases": cases, "found": "; ".join(dict.fromkeys([*told[:1], *default]))}


def _shown(at: Geometry) -> str:
    return f"{at.splits} splits, {at.tokens} tokens, {at.warps} warps, {at.stages} stages"


def prompts_parts(options: Options, ends: float) -> list[Part]:
    return prompts_of(cache(partial(make_backend, options.device)), options.model, CUDA)


def prompts_of(opened: Open, model: str, extent: Extent, timed: Timer = timer) -> list[Part]:
    return [Part(kind, partial(prompts, opened, model, extent, kind, timed)) for kind in KINDS]


@torch.inference_mode()
def prompts(opened: Open, model: str, extent: Extent, kind: str, timed: Timer) -> Result:
    """Time one kind of attention over each of PROMPTS: its first call as it is made, the others in a graph.

    The performance model has all of a layer but its products in one figure, for the first of PROMPTS.
    """
    at_most = expected.PROMPT_REST_US if model == expected.MODEL else None

    def times(lens: Lens) -> Result:
        backend, call = opened(), _attention(opened(), extent, lens)
        run: Callable[[], object] = call
        if kind == "ours":
            run = partial(paged_attention, call.q, call.kv, call.meta, call.mask, _geometry(call))
        with KINDS[kind]():
            return {"first call ms": 1e3 * seconds_at_once(backend, run), "us": 1e6 * timed(backend)(run)}

    _answers([({}, partial(times, WARM_UP))])
    heads = [{"rows": str([q for q, _ in lens]), "tokens": str([kv for _, kv in lens])} for lens in PROMPTS]
    result = _answers((head, partial(times, lens)) for head, lens in zip(heads, PROMPTS, strict=True))
    result["cases"][0]["expected us at most"] = at_most
    return result


def _answers(attempts: Iterable[Attempt]) -> Result:
    """Return a case for each attempt. The last one that was refused is the `error` of all."""
    rows, refused = list[Result](), Result()
    for head, measure in attempts:
        try:
            rows.append(head | measure())
        except Exception as error:  # Triton has errors of its own, which are no RuntimeError
            refused = {"error": describe(error)}
            rows.append(head | {"failed": refused["error"]["says"]})
    return {"cases": rows} | refused


def seconds_at_once(backend: Backend, run: Callable[[], object]) -> float:
    """Return seconds of one call, from its start on the host to its end on the device."""
    behind = torch.zeros(1, device=backend.device)
    backend.start_download(behind)()
    started = time.perf_counter()
    run()
    backend.start_download(behind)()
    return time.perf_counter() - started


def _attention(backend: Backend, extent: Extent, lens: Lens) -> Attention:
    dtype = backend.defaults.dtype
    paged = Paged(lens, *extent.heads[0], AttentionMask(causal=True), page=extent.page)
    return paged(Inputs(backend, dtype, dtype, past=0.0))


def _geometry(call: Attention) -> Geometry:
    geometry: Geometry = call.backend.geometry(call.q, call.kv, call.meta)  # type: ignore[attr-defined]
    return geometry
