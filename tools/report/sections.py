"""The sections of a report on each kind of device, in the order of what matters most.

A section's module is imported when its process makes its parts, because it may need torch_npu or Triton.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from tools.report.part import Options, Part

Make = Callable[[Options, float], list[Part]]
"""Returns the parts, without touching the device. All should be over at a time of `time.monotonic`."""


def collectives(options: Options, ends: float) -> list[Part]:
    from tools.report import ranks

    return ranks.parts(options)


def costs(options: Options, ends: float) -> list[Part]:
    from tools.report import npu_costs

    return npu_costs.parts(options)


def engine(options: Options, ends: float) -> list[Part]:
    from tools.report import engine

    return engine.parts(options)


def equality(options: Options, ends: float) -> list[Part]:
    from tools.report import equality

    return equality.parts(options)


def open_points(options: Options, ends: float) -> list[Part]:
    from tools.report import npu_questions

    return npu_questions.parts(options)


def operators(options: Options, ends: float) -> list[Part]:
    from tools.report import operators

    return operators.parts(options)


def pair(options: Options, ends: float) -> list[Part]:
    from tools.report import pair

    return pair.parts(options)


def server(options: Options, ends: float) -> list[Part]:
    from tools.report import server

    return server.parts(options, ends)


def roofline(options: Options, ends: float) -> list[Part]:
    from tools.report import roofline

    return roofline.parts(options)


def speeds(options: Options, ends: float) -> list[Part]:
    from tools.report import speeds

    return speeds.parts(options, ends)


def step(options: Options, ends: float) -> list[Part]:
    from tools.report import step

    return step.parts(options)


class Section(NamedTuple):
    """How a section's parts are made, and the most seconds of one part and of all of them."""

    make: Make
    part_seconds: float
    all_seconds: float = inf


SECTIONS = {
    "npu": {
        # In the order of the first hour on a card: what the server relies on comes first, times come behind. All but
        # the last two are over in 75 minutes, and only the last takes hours. A first run loads and compiles kernels.
        "open_points": Section(open_points, 300.0, 600.0),
        "engine": Section(engine, 300.0, 480.0),
        "pair": Section(pair, 600.0, 1080.0),
        "server": Section(server, 420.0, 720.0),
        "step": Section(step, 180.0, 300.0),
        "costs": Section(costs, 300.0, 600.0),
        "roofline": Section(roofline, 300.0, 420.0),
        "collectives": Section(collectives, 700.0, 1500.0),
        "operators": Section(operators, 600.0, 7200.0),
    },
    "cuda": {
        "operators": Section(operators, 45.0, 130.0),
        "equality": Section(equality, 60.0, 110.0),
        "speeds": Section(speeds, 60.0, 260.0),
        "roofline": Section(roofline, 30.0, 60.0),
        "engine": Section(engine, 60.0, 90.0),
        "step": Section(step, 30.0, 60.0),
        "collectives": Section(collectives, 70.0, 200.0),
    },
}
