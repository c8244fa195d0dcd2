"""Every operator of the device's backend against the CPU, and how long it takes."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from app.doctor import operators
from app.doctor.operators import Case
from app.doctor.report.command import Options
from app.doctor.report.gemm import chip_name
from app.doctor.report.part import Part, Result, describe
from app.doctor.report.roofline import Chip, figures
from app.doctor.report.timing import Seconds, Timer, timer
from app.engine.backend.base import Backend
from app.engine.backend.factory import make_backend

EXTENTS = {"npu": operators.NPU, "cuda": operators.CUDA}


def parts(options: Options, ends: float) -> list[Part]:
    """Return a part for each operator; on a GPU, which outlives most errors, for each case."""
    extent = EXTENTS[options.kind]
    cases = operators.cases(extent)
    if options.kind == "cuda":
        from app.doctor.report import cuda_questions

        cases |= cuda_questions.cases(extent)
    each_case = options.kind == "cuda"
    return parts_of(cases, extent.past, partial(make_backend, options.device), each_case=each_case)


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
        backend = opened()
        return compared(backend, group, past, timed(backend), figures(chip_name(backend)))

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
    result: Result = {"cases": rows}
    for case in cases:
        row, call = operators.compare(backend, case, past)
        rows.append(row)
        if seconds is None:
            continue
        try:
            taken = seconds(call)
        except Exception as error:
            return result | {"passed": False, "error": describe(error)}
        row["us"] = 1e6 * taken
        row["share"] = case.moved / chip.bandwidth / taken if case.moved and chip else None
    return result | {"passed": all(row["passed"] for row in rows)}
