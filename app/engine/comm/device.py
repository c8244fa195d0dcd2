"""Collectives of processes that have a device each, by the library of these devices. Not run on two devices."""

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.comm.comm import Comm, Meeting
from app.engine.comm.process_group import start_process_group

KEPT_NUMBERS = 1 << 20
"""Numbers of a result that all_gather keeps memory for. A pair for each of 65,536 rows of 8 ranks has as many."""

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather into one tensor. Its name changes in torch 2.13."""


class DeviceComm(Comm):
    """Ranks that have a device each. Collectives are queued on it without a wait of the host, and graphs hold them.

    What a graph captures reads and writes the same memory at each replay: a sum overwrites its input, and small
    results of `all_gather` have memory that lasts (a capture of others' memory lost its values, vllm-ascend#10311).
    Numbers on the host go through Gloo.
    """

    def __init__(self, meeting: Meeting, libraries: str) -> None:
        """Wait until all ranks have come. `libraries` are Gloo for the host and one for the device."""
        super().__init__(meeting.rank, meeting.size)
        start_process_group(meeting, libraries)
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def all_gather(self, x: Tensor) -> Tensor:
        """Return `Comm.all_gather`, in memory that the next call may overwrite."""
        gathered = self._memory_for(x)
        _gather(gathered, x.contiguous().flatten())
        return gathered.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, in place. The library chooses the order of more than two."""
        total = x.contiguous()
        dist.all_reduce(total)
        return total

    def _memory_for(self, x: Tensor) -> Tensor:
        count = self.size * x.numel()
        if count > KEPT_NUMBERS:
            return x.new_empty(count)
        kind = x.device, x.dtype
        if kind not in self._kept:
            self._kept[kind] = x.new_empty(KEPT_NUMBERS)
        return self._kept[kind][:count]
