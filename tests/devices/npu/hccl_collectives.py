"""A rank of `app.doctor.collectives` on the null device: `python -m tests.devices.npu.hccl_collectives DEVICE ...`."""

import os
import sys

from app.doctor import collectives
from tests.devices.npu.numerics import Numerics

if __name__ == "__main__":
    collectives.ROWS, collectives.CALLS = (1, 16), 2
    with Numerics():
        code = collectives.main(sys.argv[1:])
    os._exit(code)
