"""The sections of a report on each kind of device, in the order of what matters most."""

from importlib import import_module
from math import inf
from typing import NamedTuple

from tools.report.part import Options, Part


class Section(NamedTuple):
    """The module whose `parts` make a section's, and the most seconds of one part and of all of them."""

    module: str
    part_seconds: float
    all_seconds: float = inf
    takes_ends: bool = False

    def make(self, options: Options, ends: float) -> list[Part]:
        """Return the parts, without touching the device. All should be over at a time of `time.monotonic`.

        Only the section's process imports the module, which may need torch_npu or Triton.
        """
        module = import_module(f"tools.report.{self.module}")
        parts: list[Part] = module.parts(options, ends) if self.takes_ends else module.parts(options)
        return parts


SECTIONS = {
    "npu": {
        # In the order of the first hour on a card: what the server relies on comes first, times come behind. All but
        # the last two are over in 75 minutes, and only the last takes hours. A first run loads and compiles kernels.
        "open_points": Section("npu_questions", 300.0, 600.0),
        "engine": Section("engine", 300.0, 480.0),
        "pair": Section("pair", 600.0, 1080.0),
        "server": Section("server", 420.0, 720.0, takes_ends=True),
        "step": Section("step", 180.0, 300.0),
        "costs": Section("npu_costs", 300.0, 600.0),
        "roofline": Section("roofline", 300.0, 420.0),
        "collectives": Section("ranks", 700.0, 1500.0),
        "operators": Section("operators", 600.0, 7200.0),
    },
    "cuda": {
        "operators": Section("operators", 45.0, 130.0),
        "equality": Section("equality", 60.0, 110.0),
        "speeds": Section("speeds", 60.0, 260.0, takes_ends=True),
        "roofline": Section("roofline", 30.0, 60.0),
        "engine": Section("engine", 60.0, 90.0),
        "step": Section("step", 30.0, 60.0),
        "collectives": Section("ranks", 70.0, 200.0),
    },
}
