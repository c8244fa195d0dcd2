"""Matrix products of a target's layers by rows, over weights that no cache holds, beside what the model predicts."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.device.base import Backend
from app.engine.device.factory import make_backend
from tools.lab.random_weights import pair_of
from tools.lab.stages import traced
from tools.report.command import Options
from tools.report.part import Part, Result
from tools.report.roofline import H200, NUMBER_BYTES
from tools.report.timing import Timer, timer

ROWS = (1, 16, 32, 64, 128, 192, 256, 384, 512)
ROTATED = 300e6
"""Bytes of weights that take turns: six times the 50 MB of an H200's cache."""
EXPECTED_SHARES = ((40e6, 0.60), (60e6, 0.67), (120e6, 0.77), (300e6, 0.85), (float("inf"), 0.92))
"""Bytes of a weight, up to which cuBLAS is expected to reach this share of the memory's bandwidth at few rows."""
EXPECTED_FLOPS = 570e12
"""Operations a second that are expected at 512 rows, because 128 x 128 tiles do not fill 132 multiprocessors."""

Multiply = Callable[[Tensor, Tensor], object]


def parts(options: Options, ends: float) -> list[Part]:
    opened = cache(partial(make_backend, options.device))
    target, draft = pair_of(options.model)
    config = target_config(target)
    return parts_of(config, draft_config(draft, config), opened, ROWS, ROTATED, timer)


def parts_of(
    target: DecoderConfig,
    draft: DFlashConfig,
    opened: Callable[[], Backend],
    rows: tuple[int, ...],
    rotated: float,
    timed: Timer,
) -> list[Part]:
    """Return a part for each product. The last one names kernels, because a profiler may slow what comes behind it."""
    found = shapes(target, draft)
    products = [Part(name, partial(measured, opened, shape, rows, rotated, timed)) for name, shape in found.items()]
    return [*products, Part("kernels", partial(named, opened, found, rows))]


def shapes(target: DecoderConfig, draft: DFlashConfig) -> dict[str, tuple[int, int]]:
    """Return [out, in] of each product of a step. The last two make the context KV."""
    hidden, heads, drafts = target.hidden_size, target.num_heads * target.head_dim, draft.decoder
    return {
        "o": (hidden, heads),
        "qkv": (heads + 2 * target.num_kv_heads * target.head_dim, hidden),
        "down": (hidden, target.intermediate_size),
        "gate_up": (2 * target.intermediate_size, hidden),
        "lm_head": (target.vocab_size, hidden),
        "fc": (drafts.hidden_size, len(draft.target_layer_ids) * hidden),
        "kv": (2 * drafts.num_layers * drafts.num_kv_heads * drafts.head_dim, drafts.hidden_size),
    }


@torch.inference_mode()
def named(opened: Callable[[], Backend], shapes: dict[str, tuple[int, int]], rows: tuple[int, ...]) -> Result:
    """Name the kernels that PyTorch's product of each weight launches from a graph, for each number of rows."""
    backend, cases = opened(), list[Result]()
    dtype, apart = backend.defaults.dtype, getattr(backend, "capture_apart", None)
    for name, shape in shapes.items():
        weight = torch.zeros(shape, dtype=dtype, device=backend.device)
        for num_rows in rows:
            x = torch.zeros(num_rows, shape[1], dtype=dtype, device=backend.device)

            def product(x: Tensor = x, weight: Tensor = weight) -> tuple[Tensor, ...]:
                return (backend.linear(x, weight),)

            run = apart(product).replay if apart else product
            with traced(on_gpu=backend.device.type == "cuda") as launches:
                run()
            cases.append({"weight": name, "rows": num_rows, "kernels": " + ".join(each.name for each in launches)})
    return {"cases": cases, "found": f"{len({case['kernels'] for case in cases})} kernels of PyTorch's products"}


@torch.inference_mode()
def measured(
    opened: Callable[[], Backend], shape: tuple[int, int], rows: tuple[int, ...], rotated: float, timed: Timer
) -> Result:
    """Time one product at each number of rows. `expected us` is the model's of cuBLAS.

    By what `us` and `us again` differ is noise.
    """
    backend, size = opened(), NUMBER_BYTES * shape[0] * shape[1]
    dtype = backend.defaults.dtype
    count = max(1, round(rotated / size))
    weights = [torch.empty(shape, dtype=dtype, device=backend.device).normal_(std=0.02) for _ in range(count)]
    cases: list[Result] = []
    for num_rows in rows:
        x = torch.empty(num_rows, shape[1], dtype=dtype, device=backend.device).normal_()

        def seconds(multiply: Multiply, x: Tensor = x) -> float:
            return timed(backend)(partial(_all, multiply, x, weights)) / count

        taken, operations = seconds(backend.linear), 2 * num_rows * shape[0] * shape[1]
        case: Result = {
            "rows": num_rows,
            "us": 1e6 * taken,
            "expected us": 1e6 * expected_seconds(size, operations),
            "TB/s": size / taken / 1e12,
            "TFLOP/s": operations / taken / 1e12,
        }
        cases.append(case | {"us again": 1e6 * seconds(backend.linear)})
    few = cases[min(1, len(cases) - 1)]
    found = f"{few['TB/s']:.3g} TB/s at {few['rows']} rows, {cases[-1]['TFLOP/s']:.3g} TFLOP/s at {cases[-1]['rows']}"
    return {"weight": list(shape), "copies": count, "cases": cases, "found": found}


def expected_seconds(size: float, operations: float) -> float:
    share = next(share for most, share in EXPECTED_SHARES if size <= most)
    return max(size / H200.bandwidth / share, operations / EXPECTED_FLOPS)


def _all(multiply: Multiply, x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        multiply(x, weight)
