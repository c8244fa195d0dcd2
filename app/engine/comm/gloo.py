"""Collectives of processes on one host, by Gloo."""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.comm.comm import Comm
from app.engine.comm.process_group import Meeting, start_process_group


class GlooComm(Comm):
    """Ranks that are processes of one host and share its cores. The end of one raises RuntimeError in the others."""

    def __init__(self, meeting: Meeting) -> None:
        """Wait until all ranks have come."""
        super().__init__(meeting.rank, meeting.size)
        start_process_group(meeting, "gloo")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // meeting.size))

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind()), x.contiguous())
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x
