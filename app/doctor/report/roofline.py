"""Speed of a device's memory and multipliers, by the name of its chip."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.engine.backend.base import Backend

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


H200 = Chip(4.3e12, 790e12, "measured on an H200: a large copy, and large matrix products")
CHIPS = {
    "NVIDIA H200": H200,
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
