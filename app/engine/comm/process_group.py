"""Processes of one host that find each other through a file, and their collectives by Gloo."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.comm.comm import Comm, Meeting


def start_process_group(meeting: Meeting, libraries: str) -> None:
    """Wait until all ranks have come, which divide the host's threads. `libraries` is a backend of torch.distributed,
    like "gloo".

    Raises RuntimeError if they do not come in time, or cannot be reached.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=meeting.timeout_seconds)
    store = dist.FileStore(str(meeting.store), meeting.size)
    store.set_timeout(timeout)
    try:
        dist.init_process_group(libraries, store=store, rank=meeting.rank, world_size=meeting.size, timeout=timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {meeting.rank} cannot join {meeting.size} ranks (--distributed-timeout-seconds "
            f"{meeting.timeout_seconds}, GLOO_SOCKET_IFNAME {os.environ.get('GLOO_SOCKET_IFNAME')}): {error}"
        ) from error
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // meeting.size))


class GlooComm(Comm):
    """Ranks that are processes of one host and share its cores. The end of one raises RuntimeError in the others."""

    def __init__(self, meeting: Meeting) -> None:
        """Wait until all ranks have come."""
        super().__init__(meeting.rank, meeting.size)
        start_process_group(meeting, "gloo")

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind()), x.contiguous())
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x
