"""Bandwidth and matrix products of a device beside what its chip is said to reach, alone and in decode steps."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from app.config.checkpoint import DEMO
from app.doctor.report.command import Options
from app.doctor.report.part import Part, Result
from app.doctor.report.roofline import Chip, figures
from app.doctor.report.step import Steps
from app.doctor.report.timing import seconds_each
from app.engine.backend.base import Backend
from app.engine.backend.factory import make_backend


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes: `copied` bytes; `rows` of `hidden` columns times matrices of one layer of Qwen3-8B, `layers` times.

    A product alone has `weights` different matrices in turn, so that no cache holds them.
    """

    copied: int = 1 << 30
    hidden: int = 4096
    intermediate: int = 12288
    qkv: int = 6144
    weights: int = 4
    rows: tuple[int, ...] = (1, 16, 256, 4096)
    layers: int = 36
    repeats: int = 10


def parts(options: Options, ends: float) -> list[Part]:
    opened = cache(partial(make_backend, options.device))
    extent, chip = Extent(), cache(lambda: figures(chip_name(opened())))
    return [
        Part("figures", lambda: assumed(opened())),
        Part("copy", lambda: copy(opened(), chip(), extent)),
        Part("matmul", lambda: matmul(opened(), chip(), extent)),
        Part("layers of Qwen3-8B", lambda: layers(opened(), chip(), extent)),
        Part("demo pair", lambda: demo(Steps(options, max_num_seqs=1), chip())),
    ]


def chip_name(backend: Backend) -> str:
    """Return the name that the chip gives itself; "" on a CPU."""
    device_module = getattr(torch, backend.device.type)
    named: Callable[[int], str] | None = getattr(device_module, "get_device_name", None)
    return str(named(backend.device.index or 0)) if named else ""


def assumed(backend: Backend) -> Result:
    name = chip_name(backend)
    chip = figures(name)
    if chip is None:
        return {"chip": name, "source": "nothing is known of this chip, so there are no shares"}
    return {"chip": name, "GB_s": chip.bandwidth / 1e9, "TFLOP_s": chip.flops / 1e12, "source": chip.source}


@torch.inference_mode()
def copy(backend: Backend, chip: Chip | None, extent: Extent) -> Result:
    """Count bytes read and written by a copy within the device's memory."""
    source = torch.zeros(extent.copied // 2, dtype=torch.bfloat16, device=backend.device)
    target = torch.empty_like(source)
    seconds = seconds_each(backend, lambda: target.copy_(source), 4, extent.repeats)
    rate = 2 * extent.copied / seconds
    share = rate / chip.bandwidth if chip else None
    return {"GB_s": rate / 1e9, "share": share, "bytes": extent.copied, "found": f"{rate / 1e9:.4g} GB/s"}


@torch.inference_mode()
def matmul(backend: Backend, chip: Chip | None, extent: Extent) -> Result:
    """Multiply [M, hidden] by several [2 x intermediate, hidden] in turn; M = 1 is a matrix-vector product."""
    shape = (2 * extent.intermediate, extent.hidden)
    weights = [_random(backend, *shape) for _ in range(extent.weights)]
    cases = []
    for rows in extent.rows:
        x = _random(backend, rows, extent.hidden)

        def products(x: Tensor = x) -> None:
            for weight in weights:
                backend.linear(x, weight)

        seconds = seconds_each(backend, products, 4, extent.repeats) / len(weights)
        flops, read = 2 * rows * shape[0] * shape[1] / seconds, 2 * shape[0] * shape[1] / seconds
        cases.append(
            {
                "rows": rows,
                "ms": 1e3 * seconds,
                "TFLOP_s": flops / 1e12,
                "weights_GB_s": read / 1e9,
                "share_of_TFLOP_s": flops / chip.flops if chip else None,
                "share_of_GB_s": read / chip.bandwidth if chip else None,
            }
        )
    best = max(case["TFLOP_s"] or 0.0 for case in cases)
    found = f"matrix-vector {cases[0]['weights_GB_s']:.4g} GB/s, {best:.4g} TFLOP/s"
    return {"columns": extent.hidden, "outputs": shape[0], "cases": cases, "found": found}


@torch.inference_mode()
def layers(backend: Backend, chip: Chip | None, extent: Extent) -> Result:
    """Run the four matmuls of a layer over and over. One layer's weights are more than caches hold (386 MB)."""
    hidden, inner = extent.hidden, extent.intermediate
    shapes = ((extent.qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    weights = [_random(backend, *shape) for shape in shapes]
    elements = extent.layers * sum(weight.numel() for weight in weights)
    cases = []
    for rows in extent.rows[:-1]:
        xs = [_random(backend, rows, shape[1]) for shape in shapes]

        def step(xs: list[Tensor] = xs) -> None:
            for _ in range(extent.layers):
                for x, weight in zip(xs, weights, strict=True):
                    backend.linear(x, weight)

        seconds = seconds_each(backend, step, 1, extent.repeats)
        cases.append({"rows": rows, "ms": 1e3 * seconds} | _floor(chip, 2 * elements, 2 * rows * elements, seconds))
    return {"layers": extent.layers, "weight_bytes": 2 * elements, "cases": cases, "found": _headline(cases[0])}


def demo(steps: Steps, chip: Chip | None, repeats: int = 60) -> Result:
    """Time a step of one sequence of the demo pair: all weights are read once, for rows too few to count."""
    weight_bytes = sum(path.stat().st_size for path in DEMO.glob("*/model.safetensors"))
    cases = []
    for way in ("eager", "graphs"):
        ms = steps.measured(way, 1, repeats)["step"]["median_ms"]
        cases.append({"way": way, "ms": ms} | _floor(chip, weight_bytes, 0, ms / 1e3))
    return {"weight_bytes": weight_bytes, "cases": cases, "found": _headline(cases[-1])}


def _random(backend: Backend, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=backend.device).normal_(std=shape[-1] ** -0.5)


def _floor(chip: Chip | None, read: int, operations: int, seconds: float) -> Result:
    if chip is None:
        return {"floor_ms": None, "share": None}
    floor = chip.seconds(read, operations)
    return {"floor_ms": 1e3 * floor, "share": floor / seconds}


def _headline(case: Result) -> str:
    share = f", {case['share']:.4g} of the roofline" if case["share"] else ""
    return f"{case['ms']:.4g} ms{share}"
