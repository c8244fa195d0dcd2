"""Every operator of the device's backend against the CPU, and how long it takes."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from app.check import operators
from app.check.operators import Case
from app.check.timing import Seconds, Timer, timer
from app.engine.device.base import Backend
from app.engine.device.factory import make_backend
from tools.report.command import Options
from tools.report.part import Part, Result, describe
from tools.report.roofline import Chip, chip_of

EXTENTS = {"npu": operators.NPU, "cuda": operators.CUDA}


def parts(options: Options, ends: float) -> list[Part]:
    """Return a part for each operator; on a GPU, which outlives most errors, for each case."""
    extent, opened = EXTENTS[options.kind], partial(make_backend, options.device)
    return parts_of(operators.cases(extent), extent.past, opened, each_case=options.kind == "cuda")


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
        row, call = operators.compare(backend, case, past)
        rows.append(row)
        if seconds is None:
            continue
        try:
            taken = seconds(call)
        except Exception as error:
            return {"cases": rows, "passed": False, "error": describe(error)}
        row |= {"us": 1e6 * taken, "share": case.moved / chip.bandwidth / taken if case.moved and chip else None}
    return {"cases": rows, "passed": all(row["passed"] for row in rows)}
