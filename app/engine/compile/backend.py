"""The backend that torch.export traces. There KV has no pages."""

from collections.abc import Callable, Sequence

from torch import Tensor

from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import Backend
from app.engine.device.torch import TorchBackend


class TracedBackend(CpuBackend):
    """The CPU's own operators, and plain ones, which inductor fuses, over weights and KV that lie like the CPU's.

    Its weights are shapes: what is packed is not written.
    """

    rms_norm = TorchBackend.rms_norm
    positions_and_slots = Backend.positions_and_slots

    def fill(self, write: Callable[[Tensor, Tensor], None], parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        return
