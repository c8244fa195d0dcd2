"""Every operator of the device's backend against the CPU, and how long it takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import isnan
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from app.check import operators
from app.check.operators import Case, Extent
from app.engine.device.base import Backend
from app.engine.device.comparison import Inputs, Lens, Prepared
from app.engine.device.factory import make_backend
from app.engine.sampling.sampler import Sampler
from tools.report.part import Options, Part, Result, describe
from tools.report.roofline import Chip, chip_of
from tools.report.timing import Seconds, Timer, timer

BF16 = 2.0**-7
"""Two roundings to eight bits, as a share of the largest value."""
GUMBEL_TOLERANCE = 1e-4
VOCAB = 151936


def about_pages(
    rows: Sequence[int], edges: Sequence[int], long: Sequence[int], chunk: int, alone: Lens = ()
) -> dict[str, Any]:
    """Return the loads of an Extent: lengths about the edges of pages, long ones, single requests, and chunks of
    prompts."""
    both_ways = {
        "about page edges": [(q, max(q, kv)) for kv in edges for q in rows],
        "long": [(q, kv) for kv in long for q in (1, rows[-1])],
    }
    both_ways |= {f"alone, {q} rows of {kv} tokens": [(q, kv)] for q, kv in alone}
    prefill = [(chunk, chunk), (chunk - 1, chunk + 129), (1, 1)]
    return {"causal": both_ways | {"prefill": prefill}, "both_ways": both_ways}


PROMPTS: dict[str, Lens] = {"a prompt": [(300, 300)], "prompts behind others": [(129, 1500), (1, 700), (257, 257)]}


def of_graphs(
    batches: Sequence[int], block: int, context: int, prompts: Mapping[str, Lens] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the loads of an Extent: `prompts`, and batches as graphs replay them, with padding after the sequences."""
    causal = dict(prompts)
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


NPU = Extent(
    heads=((8, 8, 64), (8, 2, 64), (4, 2, 128), (8, 8, 128), (32, 8, 128), (64, 4, 128)),
    # Few rows of a single long request have another kernel, which shares its tokens among the cores.
    **about_pages(
        range(1, 17),
        (16, 127, 128, 129, 255, 256, 257),
        (4095, 4096, 8193),
        512,
        alone=((1, 1500), (9, 4100), (16, 8193)),
    ),
    tolerance=BF16,
)
CUDA = Extent(
    heads=((32, 8, 128),),
    **of_graphs((1, 32), 16, 1024),
    formats=("int8", "e4m3"),
    page=16,
    past=float("nan"),
    num_rows=(1, 16, 64, 512),
    batches=(1, 32),
)
"""One layer of Qwen3-8B and of its draft, at the widths that graphs serve."""
FAMILIES = tuple(
    replace(CUDA, heads=heads, **of_graphs((8,), 16, 1024, PROMPTS), num_rows=(16,), **traits)
    for heads, traits in (
        (((24, 4, 256), (16, 2, 256)), {"turning": 0.25}),
        (((64, 8, 64),), {"sinks": True}),
    )
)
"""Heads of the hybrids, of which RoPE turns a quarter, and of gpt-oss."""
EXTENTS = {"npu": (NPU,), "cuda": (CUDA, *FAMILIES)}


def _noise_bits(at: Inputs, rows: int, vocab: int) -> Prepared:
    sampler, states = Sampler(vocab, at.backend), at.integers(-(1 << 31), 1 << 31, rows)
    return lambda: sampler.noise_bits(states)


def _gumbel(at: Inputs, rows: int, vocab: int) -> Prepared:
    sampler, states = Sampler(vocab, at.backend), at.integers(-(1 << 31), 1 << 31, rows)
    return lambda: sampler.gumbel(states)


def _argmax(at: Inputs, rows: int, vocab: int) -> Prepared:
    """Draw from a few distinct values, so that the largest occurs many times; the lowest id must win."""
    logits = at.put(at.integers(0, 8, rows, vocab).float())
    return lambda: logits.argmax(dim=-1)


def _first_wrong(at: Inputs) -> Prepared:
    agree, column = at.integers(0, 8, 16, 15) > 0, torch.arange(15, device=at.backend.device)
    return lambda: torch.where(agree, 15, column).amin(dim=1, keepdim=True)


def _take(at: Inputs) -> Prepared:
    table, rows, columns = at.integers(0, 999, 16, 8), at.integers(0, 16, 64), at.integers(0, 8, 64)
    return lambda: (table[rows], table[rows, columns])


def _put(at: Inputs) -> Prepared:
    table, place, values = at.integers(0, 999, 64), at.scattered(16, 64), at.integers(0, 999, 16)
    return lambda: table.index_put_((place,), values)


def _embedding(at: Inputs) -> Prepared:
    ids, table = at.integers(0, 999, 16), at.normal(999, 64)
    return lambda: F.embedding(ids, table)


INTEGERS = {
    "the first that is wrong": _first_wrong,
    "take by int32 index": _take,
    "put by int32 index": _put,
    "embedding": _embedding,
}


def of_torch(vocab: int) -> dict[str, list[Case]]:
    """Return cases of what the engine asks of PyTorch itself, which a device may get wrong as well."""
    return {
        "argmax": [Case(str([rows, vocab]), partial(_argmax, rows=rows, vocab=vocab)) for rows in (1, 16, 257)],
        "noise_bits": [Case(str([16, vocab]), partial(_noise_bits, rows=16, vocab=vocab))],
        "gumbel": [Case(str([16, vocab]), partial(_gumbel, rows=16, vocab=vocab), GUMBEL_TOLERANCE)],
        "integers": [Case(name, operator) for name, operator in INTEGERS.items()],
    }


def parts(options: Options) -> list[Part]:
    """Return a part for each operator; on a GPU, which outlives most errors, for each case."""
    (extent, *families), opened = EXTENTS[options.kind], partial(make_backend, options.device)
    cases = operators.cases(extent) | of_torch(VOCAB)
    for family in families:
        for name, of_family in operators.of_heads(family).items():
            cases[name] += of_family
    on_gpu = options.kind == "cuda"
    checked = parts_of(cases, extent.past, opened, each_case=on_gpu)
    if not on_gpu:
        return checked
    from tools.report import hazards, products  # they need Triton

    return hazards.parts(options, hazards.HazardSizes()) + checked + products.parts(options, products.ProductSizes())


def parts_of(
    cases: dict[str, list[Case]],
    past: float | None,
    open_backend: Callable[[], Backend],
    *,
    each_case: bool,
    timed: Timer = timer,
) -> list[Part]:
    opened = cache(open_backend)
    groups = {f"{name}, {case.shape}": [case] for name, group in cases.items() for case in group}

    def part(group: Sequence[Case]) -> Result:
        return compared(opened(), group, past, timed(opened()), chip_of(opened()))

    return [Part(name, partial(part, group)) for name, group in (groups if each_case else cases).items()]


@torch.inference_mode()
def compared(
    backend: Backend,
    cases: Sequence[Case],
    past: float | None = None,
    seconds: Seconds | None = None,
    chip: Chip | None = None,
) -> Result:
    """Return the differences of all cases and, with `seconds`, their times. A case that cannot be timed is the last."""
    rows: list[Result] = []
    for case in cases:
        absolute, relative, call = operators.difference(backend, case.operator, past=past)
        numbers = (None, None) if isnan(relative) else (absolute, relative)
        row = {"shape": case.shape, "absolute": numbers[0], "relative": numbers[1], "tolerance": case.tolerance}
        rows.append(row := row | {"passed": relative <= case.tolerance})
        if seconds is None:
            continue
        try:
            taken = seconds(call)
        except Exception as error:
            return {"cases": rows, "passed": False, "error": describe(error)}
        row |= {"us": 1e6 * taken, "share": case.moved / chip.bandwidth / taken if case.moved and chip else None}
    return {"cases": rows, "passed": all(row["passed"] for row in rows)}
