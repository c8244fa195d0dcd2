"""Collectives between the devices of this host: how long a sum takes, eagerly and in a graph, and the order in which it
is added."""

from functools import partial

from app.check import collectives
from app.engine.device.factory import make_backend
from app.engine.errors import UnsupportedError
from tools.report.command import Options
from tools.report.part import Part, Result

SIZES = (2, 4, 8)
SECONDS = {"npu": 600.0, "cuda": 60.0}
"""Time for all sums of one number of ranks. Communicators of a first run on NPUs take a minute."""


def parts(options: Options, ends: float) -> list[Part]:
    """Return a part for 2, 4 and 8 ranks, as far as there are devices."""
    return [Part(f"{size} ranks", partial(summed, options, size)) for size in SIZES]


def summed(options: Options, size: int) -> Result:
    try:
        make_backend(options.device).check_ranks(size)
    except UnsupportedError as error:
        return {"found": f"not measured: {error}"}
    cases = collectives.measured(options.device, size, SECONDS[options.kind])
    first, last = cases[0], cases[-1]
    bits = "depend" if not all(case["same_bits_alone"] for case in cases) else "do not depend"
    passed = [case.pop("passed") for case in cases]
    return {
        "found": f"a sum of {first['rows']} row takes {first['eager_us']:.4g} us, of {last['rows']} rows "
        f"{last['eager_us']:.4g} us; the bits of a row {bits} on the rows beside it",
        "passed": all(passed),
        "cases": cases,
    }
