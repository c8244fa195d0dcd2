"""The sections of a report on each kind of device. Imports no torch, nor the modules that it names."""

from math import inf
from typing import NamedTuple


class Section(NamedTuple):
    """`maker` is the function that makes the parts, called in a separate process.

    `part` and `whole` limit the seconds of one part and of all of them.
    """

    maker: str
    part: float
    whole: float = inf


SECTIONS = {
    "npu": {
        # A first run on an NPU loads and compiles kernels, and nothing bounds how many: no limit of a whole section.
        "operators": Section("tools.report.operators.parts", 600.0),
        "open_points": Section("tools.report.npu_questions.parts", 600.0),
        "engine": Section("tools.report.engine.parts", 1200.0),
        "step": Section("tools.report.step.parts", 900.0),
        "roofline": Section("tools.report.roofline.parts", 900.0),
        "costs": Section("tools.report.npu_costs.parts", 900.0),
        "collectives": Section("tools.report.ranks.parts", 700.0),
    },
    "cuda": {
        "roofline": Section("tools.report.roofline.parts", 30.0, 60.0),
        "operators": Section("tools.report.operators.parts", 45.0, 120.0),
        "equality": Section("tools.lab.equality.parts", 90.0, 150.0),
        "speeds": Section("tools.lab.speeds.parts", 120.0, 240.0),
        "prefill": Section("tools.lab.cuda_attention.prompts_parts", 30.0, 60.0),
        "attention": Section("tools.lab.cuda_attention.launches_parts", 60.0, 90.0),
        "profile": Section("tools.lab.kernels.profile_parts", 60.0, 90.0),
        "gemm": Section("tools.lab.gemms.parts", 20.0, 60.0),
        "graphs": Section("tools.lab.kernels.graph_parts", 60.0, 60.0),
        "turns": Section("tools.lab.turns.parts", 90.0, 120.0),
        "engine": Section("tools.report.engine.parts", 60.0, 90.0),
        "step": Section("tools.report.step.parts", 30.0, 60.0),
        "collectives": Section("tools.report.ranks.parts", 70.0, 200.0),
    },
}
"""Sections by kind of device, in the order of what matters most."""
