"""Collectives of processes on one host, by Gloo."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.comm.comm import Comm


class GlooComm(Comm):
    """Ranks that are processes of one host and share its cores. The end of one raises RuntimeError in the others."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        """Wait until all ranks have come. `store` is a new file, in a folder of theirs alone."""
        super().__init__(rank, size)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // size))

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind()), x.contiguous())
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x
