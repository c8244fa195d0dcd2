"""A rank of `app.check.collectives` on the null device: `python -m tests.devices.npu.hccl_collectives DEVICE ...`."""

import os
import sys

from app.check import collectives
from tests.devices.npu.numerics import Numerics

if __name__ == "__main__":
    collectives.ROWS, collectives.CALLS = (1, 16), 2
    with Numerics():
        code = collectives.main(sys.argv[1:])
    os._exit(code)
