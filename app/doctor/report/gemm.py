"""Bandwidth and matrix products of a device beside what its chip is said to reach."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from app.doctor.report.command import Options
from app.doctor.report.part import Part, Result
from app.doctor.report.roofline import NUMBER_BYTES, Chip, chip_name, chip_of
from app.doctor.report.timing import Timer, timer
from app.engine.backend.base import Backend
from app.engine.backend.factory import make_backend


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes: `copied` bytes, and `rows` times the matrices of one layer of Qwen3-8B.

    A product has `weights` different matrices in turn, so that no cache holds them (o has 34 MB).
    """

    copied: int = 1 << 30
    hidden: int = 4096
    intermediate: int = 12288
    qkv: int = 6144
    weights: int = 4
    rows: tuple[int, ...] = (1, 16, 32, 256, 512, 4096)
    layers: int = 36


def parts(options: Options, ends: float) -> list[Part]:
    opened = cache(partial(make_backend, options.device))
    return [
        Part("figures", lambda: assumed(opened())),
        Part("copy", lambda: copy(opened(), chip_of(opened()), Extent())),
        Part("matmul", lambda: matmul(opened(), chip_of(opened()), Extent())),
    ]


def assumed(backend: Backend) -> Result:
    name, chip = chip_name(backend), chip_of(backend)
    if chip is None:
        return {"chip": name, "source": "nothing is known of this chip, so there are no shares"}
    return {"chip": name, "GB_s": chip.bandwidth / 1e9, "TFLOP_s": chip.flops / 1e12, "source": chip.source}


@torch.inference_mode()
def copy(backend: Backend, chip: Chip | None, extent: Extent, timed: Timer = timer) -> Result:
    """Count bytes read and written by a copy within the device's memory."""
    source = torch.zeros(extent.copied // 2, dtype=torch.bfloat16, device=backend.device)
    target = torch.empty_like(source)
    rate = 2 * extent.copied / timed(backend)(lambda: target.copy_(source))
    share = rate / chip.bandwidth if chip else None
    return {"GB_s": rate / 1e9, "share": share, "bytes": extent.copied, "found": f"{rate / 1e9:.4g} GB/s"}


@torch.inference_mode()
def matmul(backend: Backend, chip: Chip | None, extent: Extent, timed: Timer = timer) -> Result:
    """Time the four products of a layer alone. All layers take their sum, for each number of rows."""
    hidden, inner, seconds = extent.hidden, extent.intermediate, timed(backend)
    shapes = {
        "qkv": (extent.qkv, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    weights = {name: [_random(backend, *shape) for _ in range(extent.weights)] for name, shape in shapes.items()}
    cases: list[Result] = []

    def add(matrix: str, rows: int, elements: int, taken: float) -> None:
        read, operations = NUMBER_BYTES * elements, 2 * rows * elements
        floor = chip.seconds(read, operations) if chip else None
        case = {"matrix": matrix, "rows": rows, "ms": 1e3 * taken, "TFLOP_s": operations / taken / 1e12}
        case |= {"weights_GB_s": read / taken / 1e9, "floor_ms": floor and 1e3 * floor}
        cases.append(case | {"share": floor and floor / taken})

    for rows in extent.rows:
        elements, taken = 0, 0.0
        for name, shape in shapes.items():
            x = _random(backend, rows, shape[1])
            each = seconds(partial(_products, backend, x, weights[name])) / extent.weights
            add(name, rows, shape[0] * shape[1], each)
            elements, taken = elements + shape[0] * shape[1], taken + each
        add(f"{extent.layers} layers", rows, extent.layers * elements, extent.layers * taken)
    vector, best = cases[len(shapes)], max(case["TFLOP_s"] for case in cases)
    share = f", {vector['share']:.4g} of the roofline" if vector["share"] else ""
    found = f"one row of all layers {vector['ms']:.4g} ms{share}; at best {best:.4g} TFLOP/s"
    return {"weight_bytes": NUMBER_BYTES * extent.layers * elements, "cases": cases, "found": found}


def _products(backend: Backend, x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        backend.linear(x, weight)


def _random(backend: Backend, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=backend.device).normal_(std=shape[-1] ** -0.5)
