"""The heartbeat of an engine process: a count that grows with each layer, and with each work of the C++ operators.

The parent reads it, because a step of a slow host may take longer than a hang may: `Supervisor._watch`. A process has
one heartbeat.
"""

from pathlib import Path

import numpy as np

count = np.zeros(1, dtype=np.int64)
"""The beats of this process `[1]`."""


def share(path: Path) -> None:
    """Keep the count in a file of 8 bytes from now on, before any operator gets it. Raises OSError.

    The bytes are written first: on a full disk a write to a hole would kill the process.
    """
    global count
    path.write_bytes(bytes(count.nbytes))
    count = np.memmap(path, dtype=np.int64, mode="r+", shape=1)


def beat() -> None:
    count[0] += 1
