"""Backend on CPUs that gives a row the same bits in every batch (`--batch-invariant`).

The package's own operators make each sum in one order, whatever the other rows. So nothing is left to PyTorch's.
"""

from collections.abc import Callable

import torch

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.cpu import linear
from app.engine.cpu.backend import CpuBackend
from app.engine.errors import UnsupportedError


class InvariantCpuBackend(CpuBackend):
    batch_invariant = True

    def make_operators(self, on_progress: Callable[[int, int], None]) -> None:
        super().make_operators(on_progress)
        if linear.own(torch.float32):
            self.use_own(linear.ALL_ROWS)

    def check(self, decoder: DecoderConfig, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        """Raise UnsupportedError if products would be PyTorch's."""
        super().check(decoder, block_size, page_size, dtype)
        if not linear.own(dtype):
            raise UnsupportedError("--batch-invariant on a CPU needs g++, and --dtype float32 or bfloat16")

    def end_of_load(self, *, tune: bool) -> None:
        """Leave nothing to PyTorch."""
        super().end_of_load(tune=False)
