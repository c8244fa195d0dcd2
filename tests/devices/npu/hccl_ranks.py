"""Ranks that are processes with an NPU each: torch_npu's own process group of HCCL, on the null device.

The group has Gloo for tensors of the host. So the numerics compute each collective by Gloo, when its turn comes on the
device, in a graph at each replay. A rank that makes another call, or none, ends the run. `python -m
tests.devices.npu.hccl_ranks` is started by `run_on_ranks`. Each rank notes its collectives.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from app.engine.npu.backend import NpuBackend
from tests.devices.npu import demo, numerics
from tests.exhaustive.rank_processes import start

PROGRAM = "tests.devices.npu.hccl_ranks"


def note_collectives(folder: Path, rank: int) -> None:
    """Add a line to a file of `folder` for each collective of this process, when it is computed."""
    run = numerics.Call.run

    def noted(call: numerics.Call) -> Any:
        if call.func.namespace == "c10d":
            shapes = [
                (list(leaf.shape), str(leaf.dtype)) for leaf in tree_leaves(call.args) if isinstance(leaf, Tensor)
            ]
            with (folder / f"collectives-{rank}").open("a") as file:
                print("graph" if call.captured else "eager", call.func.name(), *shapes, file=file)
        return run(call)

    numerics.Call.run = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    NpuBackend.dtypes = (torch.float32,)
    follows = sys.argv[1].isdecimal()
    path = Path(sys.argv[2].removeprefix("ipc://")).parents[1] if follows else Path(sys.argv[1]).parent
    note_collectives(path, int(sys.argv[1]) if follows else 0)
    with torch.inference_mode(), numerics.Numerics(lift=["N7"]):
        start(PROGRAM, lambda engine, requests: demo.run(engine.core, requests))
