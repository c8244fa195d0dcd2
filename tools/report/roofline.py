"""Bandwidth and matrix products of a device, next to the published peaks of its chip."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from app.engine.device.base import Backend
from app.engine.device.factory import make_backend
from tools.report.part import Options, Part, Result
from tools.report.timing import Timer, timer

NUMBER_BYTES = 2
"""Bytes of a weight, and of a number in KV, in bfloat16."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Bytes a second of HBM, and operations a second in bfloat16; a multiply-add is two."""

    bandwidth: float
    flops: float
    source: str = "assumed from secondary sources, good to 15 % at best"

    def seconds(self, read: float, operations: float) -> float:
        return max(read / self.bandwidth, operations / self.flops)


CHIPS = {
    "NVIDIA H200": Chip(4.3e12, 790e12, "measured on an H200: a large copy, and large matrix products"),
    "NVIDIA H100": Chip(3.0e12, 798e12, "measured on an H100: a large copy, and large matrix products"),
    "Ascend910B2": Chip(1.6e12, 354e12),
    "Ascend910B3": Chip(1.6e12, 295e12),
    "Ascend910B4": Chip(0.8e12, 280e12),
    "Ascend910_93": Chip(1.6e12, 376e12),
}
"""Beginning of the name that a chip gives itself -> figures; for A3 of one of the two dies, each of which is a device.

No vendor's data sheet was at hand for Ascend, and published figures disagree. Cores and clocks of 910B2 and 910B3 are
from a CANN platform file: 24 or 20 cores x 8192 x 1.8 GHz."""


def figures(name: str) -> Chip | None:
    return next((chip for begin, chip in CHIPS.items() if name.startswith(begin)), None)


def chip_name(backend: Backend) -> str:
    """Return the name that the chip gives itself; "" on a CPU."""
    device_module = getattr(torch, backend.device.type)
    named: Callable[[int], str] | None = getattr(device_module, "get_device_name", None)
    return str(named(backend.device.index or 0)) if named else ""


def chip_of(backend: Backend) -> Chip | None:
    return figures(chip_name(backend))


@dataclass(frozen=True, slots=True)
class RooflineSizes:
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


def parts(options: Options) -> list[Part]:
    opened = cache(partial(make_backend, options.device))
    return [
        Part("figures", lambda: assumed(opened())),
        Part("copy", lambda: copy(opened(), chip_of(opened()), RooflineSizes())),
        Part("matmul", lambda: matmul(opened(), chip_of(opened()), RooflineSizes())),
    ]


def assumed(backend: Backend) -> Result:
    name, chip = chip_name(backend), chip_of(backend)
    if chip is None:
        return {"chip": name, "source": "nothing is known of this chip, so there are no shares"}
    return {"chip": name, "GB_s": chip.bandwidth / 1e9, "TFLOP_s": chip.flops / 1e12, "source": chip.source}


@torch.inference_mode()
def copy(backend: Backend, chip: Chip | None, sizes: RooflineSizes, timed: Timer = timer) -> Result:
    """Count bytes read and written by a copy within the device's memory, and those that a sum reads.

    Weights are only read, which may be quicker than a copy.
    """
    source = torch.zeros(sizes.copied // 2, dtype=torch.bfloat16, device=backend.device)
    target = torch.empty_like(source)
    rate = 2 * sizes.copied / timed(backend)(lambda: target.copy_(source))
    share = rate / chip.bandwidth if chip else None
    read = sizes.copied / timed(backend)(lambda: source.sum(dtype=torch.float32))
    found = f"{rate / 1e9:.4g} GB/s, and {read / 1e9:.4g} GB/s of reading alone"
    return {"GB_s": rate / 1e9, "read_GB_s": read / 1e9, "share": share, "bytes": sizes.copied, "found": found}


@torch.inference_mode()
def matmul(backend: Backend, chip: Chip | None, sizes: RooflineSizes, timed: Timer = timer) -> Result:
    """Time the four products of a layer, for each number of rows. All layers count as `sizes.layers` times the sum."""
    hidden, inner, seconds = sizes.hidden, sizes.intermediate, timed(backend)
    shapes = {
        "qkv": (sizes.qkv, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    weights = {name: [_random(backend, *shape) for _ in range(sizes.weights)] for name, shape in shapes.items()}
    cases: list[Result] = []

    def add(matrix: str, rows: int, elements: int, taken: float) -> None:
        read, operations = NUMBER_BYTES * elements, 2 * rows * elements
        floor = chip.seconds(read, operations) if chip else None
        case = {"matrix": matrix, "rows": rows, "ms": 1e3 * taken, "TFLOP_s": operations / taken / 1e12}
        case |= {"weights_GB_s": read / taken / 1e9, "floor_ms": floor and 1e3 * floor}
        cases.append(case | {"share": floor and floor / taken})

    for rows in sizes.rows:
        elements, taken = 0, 0.0
        for name, shape in shapes.items():
            x = _random(backend, rows, shape[1])
            each = seconds(partial(_products, backend, x, weights[name])) / sizes.weights
            add(name, rows, shape[0] * shape[1], each)
            elements, taken = elements + shape[0] * shape[1], taken + each
        add(f"{sizes.layers} layers", rows, sizes.layers * elements, sizes.layers * taken)
    vector, best = cases[len(shapes)], max(case["TFLOP_s"] for case in cases)
    share = f", {vector['share']:.4g} of the roofline" if vector["share"] else ""
    found = f"one row of all layers {vector['ms']:.4g} ms{share}; at best {best:.4g} TFLOP/s"
    return {"weight_bytes": NUMBER_BYTES * sizes.layers * elements, "cases": cases, "found": found}


def _products(backend: Backend, x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        backend.linear(x, weight)


def _random(backend: Backend, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=backend.device).normal_(std=shape[-1] ** -0.5)
