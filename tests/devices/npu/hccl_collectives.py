"""A rank of `tools.report.ranks` on the null device: `python -m tests.devices.npu.hccl_collectives WHAT DEVICE ...`."""

import os
import sys

from app.check import collectives
from tests.devices.npu.numerics import Numerics
from tools.report import ranks, timing

if __name__ == "__main__":
    collectives.ROWS, timing.CALLS = (1, 16), 2
    with Numerics():
        code = ranks.main(*sys.argv[1:])
    os._exit(code)
