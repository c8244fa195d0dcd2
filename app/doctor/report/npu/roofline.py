"""How near this device comes to what its chip is said to reach, alone and in decode steps.

A floor is the time that a chip of those figures would need to read all weights once, or to multiply them, whichever is
longer. Shares are of the assumed figures in `chips`; a chip that they do not know has none.
"""

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from app.config.checkpoint import DEMO
from app.doctor.report.npu import trials
from app.doctor.report.npu.chips import Chip, figures
from app.doctor.report.npu.part import Part, Prompts, Result, milliseconds, rounded
from app.doctor.report.npu.step import Steps
from app.doctor.report.npu.timing import seconds_each
from app.engine.backend.base import Backend
from app.engine.backend.factory import make_backend

ASSUMED = "assumed from secondary sources, good to 15 % at best"


@dataclass(frozen=True, slots=True)
class Extent:
    """`copied` bytes; matrices of `hidden` and `intermediate` columns, `weights` different ones in turn, so that no
    cache holds them; `rows` multiplied; `layers` times the matmuls of one layer of Qwen3-8B."""

    copied: int = 1 << 30
    hidden: int = 4096
    intermediate: int = 12288
    qkv: int = 6144
    weights: int = 4
    rows: tuple[int, ...] = (1, 16, 256, 4096)
    layers: int = 36
    repeats: int = 10


def parts(device: str, prompts: Prompts) -> list[Part]:
    opened = cache(partial(make_backend, device))
    extent, chip = Extent(), cache(lambda: chip_of(opened()))
    return [
        Part("figures", lambda: assumed(opened())),
        Part("copy", lambda: copy(opened(), chip(), extent)),
        Part("matmul", lambda: matmul(opened(), chip(), extent)),
        Part("layers of Qwen3-8B", lambda: layers(opened(), chip(), extent)),
        Part("demo pair", lambda: demo(Steps(device, prompts, max_num_seqs=1), chip())),
    ]


def chip_of(backend: Backend) -> Chip | None:
    return figures(trials.chip(backend.device.index or 0))


def assumed(backend: Backend) -> Result:
    chip = chip_of(backend)
    name = trials.chip(backend.device.index or 0)
    if chip is None:
        return {"chip": name, "source": "nothing is known of this chip: no shares are told"}
    return {"chip": name, "GB_s": chip.bandwidth / 1e9, "TFLOP_s": chip.flops / 1e12, "source": ASSUMED}


@torch.inference_mode()
def copy(backend: Backend, chip: Chip | None, extent: Extent) -> Result:
    """Bytes read and written by a copy within the device's memory."""
    source = torch.zeros(extent.copied // 2, dtype=torch.bfloat16, device=backend.device)
    target = torch.empty_like(source)
    seconds = seconds_each(backend, lambda: target.copy_(source), 4, extent.repeats)
    rate = 2 * extent.copied / seconds
    return {"GB_s": rounded(rate / 1e9), "share": _share(rate, _bandwidth(chip)), "bytes": extent.copied}


@torch.inference_mode()
def matmul(backend: Backend, chip: Chip | None, extent: Extent) -> Result:
    """[M, hidden] times several [2 x intermediate, hidden] in turn; M = 1 is a matrix-vector product."""
    shape = (2 * extent.intermediate, extent.hidden)
    weights = [_random(backend, *shape) for _ in range(extent.weights)]
    found = []
    for rows in extent.rows:
        x = _random(backend, rows, extent.hidden)
        seconds = seconds_each(backend, partial(_each, backend, x, weights), 4, extent.repeats) / len(weights)
        flops, read = 2 * rows * shape[0] * shape[1] / seconds, 2 * shape[0] * shape[1] / seconds
        found.append(
            {
                "rows": rows,
                "ms": milliseconds(seconds),
                "TFLOP_s": rounded(flops / 1e12),
                "weights_GB_s": rounded(read / 1e9),
                "share_of_TFLOP_s": _share(flops, _flops(chip)),
                "share_of_GB_s": _share(read, _bandwidth(chip)),
            }
        )
    return {"columns": extent.hidden, "outputs": shape[0], "cases": found}


@torch.inference_mode()
def layers(backend: Backend, chip: Chip | None, extent: Extent) -> Result:
    """The four matmuls of a layer, over and over, with nothing between them. One layer's weights are more than caches
    hold (386 MB at full size)."""
    hidden, inner = extent.hidden, extent.intermediate
    shapes = ((extent.qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    weights = [_random(backend, *shape) for shape in shapes]
    elements = extent.layers * sum(weight.numel() for weight in weights)
    found = []
    for rows in extent.rows[:-1]:
        xs = [_random(backend, rows, shape[1]) for shape in shapes]

        def step(xs: list[Tensor] = xs) -> None:
            for _ in range(extent.layers):
                for x, weight in zip(xs, weights, strict=True):
                    backend.linear(x, weight)

        seconds = seconds_each(backend, step, 1, extent.repeats)
        floor = _floor(chip, 2 * elements, 2 * rows * elements)
        found.append({"rows": rows, "ms": milliseconds(seconds)} | _against(floor, seconds))
    return {"layers": extent.layers, "weight_bytes": 2 * elements, "cases": found}


def demo(steps: Steps, chip: Chip | None, repeats: int = 60) -> Result:
    """A step of one sequence of the demo pair: all weights are read once, for rows too few to count."""
    weight_bytes = sum(path.stat().st_size for path in DEMO.glob("*/model.safetensors"))
    found = []
    for way in ("eager", "graphs"):
        ms = steps.measured(way, 1, repeats)["step"]["median_ms"]
        found.append({"way": way, "ms": ms} | _against(_floor(chip, weight_bytes, 0), ms / 1e3))
    return {"weight_bytes": weight_bytes, "cases": found}


def _random(backend: Backend, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=backend.device).normal_(std=shape[-1] ** -0.5)


def _each(backend: Backend, x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        backend.linear(x, weight)


def _bandwidth(chip: Chip | None) -> float | None:
    return chip.bandwidth if chip else None


def _flops(chip: Chip | None) -> float | None:
    return chip.flops if chip else None


def _share(rate: float, figure: float | None) -> float | None:
    return rounded(rate / figure) if figure else None


def _floor(chip: Chip | None, read: int, flops: int) -> float | None:
    return max(read / chip.bandwidth, flops / chip.flops) if chip else None


def _against(floor: float | None, seconds: float) -> Result:
    if floor is None:
        return {"floor_ms": None, "share": None}
    return {"floor_ms": milliseconds(floor), "share": rounded(floor / seconds)}
