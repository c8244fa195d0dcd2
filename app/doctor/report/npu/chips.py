"""What Ascend chips are said to reach, by the name that they give themselves.

ASSUMPTIONS from secondary sources, good to 15 % at best: no vendor's data sheet was at hand, and published figures
disagree. Cores and clocks of 910B2 and 910B3 are from a CANN platform file, 24 or 20 cores x 8192 x 1.8 GHz.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """Bytes a second of HBM, and multiply-adds counted as two a second in bfloat16."""

    bandwidth: float
    flops: float


CHIPS = {
    "Ascend910B2": Chip(1.6e12, 354e12),
    "Ascend910B3": Chip(1.6e12, 295e12),
    "Ascend910B4": Chip(0.8e12, 280e12),
    "Ascend910_93": Chip(1.6e12, 376e12),
}
"""Beginning of a name -> figures; for A3 of one of the two dies, each of which is a device."""


def figures(name: str) -> Chip | None:
    return next((chip for begin, chip in CHIPS.items() if name.startswith(begin)), None)
