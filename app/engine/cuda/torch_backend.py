"""Backend on CUDA GPUs without Triton, with PyTorch's operators and no graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from app.engine.comm.comm import Comm, Meeting
from app.engine.comm.device import DeviceComm
from app.engine.device import accelerator
from app.engine.device.base import Defaults
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError

DEVICE_ERRORS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS")
"""Parts of messages after which no other call of the process can use the device."""


class TorchCudaBackend(TorchBackend):
    """Backend with PyTorch's operators, pinned copies and the GPU's own memory. On a CPU it is for tests."""

    memory_is_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(device)
            # On Hopper cuDNN's attention makes a plan for each new length, which takes 25 to 70 ms (docs/cuda.md).
            torch.backends.cuda.enable_cudnn_sdp(False)
            self.defaults = Defaults(dtype=torch.bfloat16, page_size=16, max_num_seqs=256)

    def check_ranks(self, size: int) -> None:
        if self.on_gpu:
            accelerator.check_ranks(self.device, size, torch.cuda, "CUDA_VISIBLE_DEVICES")

    def join(self, meeting: Meeting) -> Comm:
        return DeviceComm(meeting, "cpu:gloo,cuda:nccl")

    def check_gated_delta(self, num_v_heads: int, k_head_dim: int, v_head_dim: int) -> None:
        raise UnsupportedError(
            f"--device {self.device}: a target with recurrent layers needs Triton here; pip install triton"
        )

    def empty_experts(self, like: Tensor, num_experts: int, out_features: int, in_features: int) -> Tensor:
        """Return `Backend.empty_experts`. Raises UnsupportedError for a dtype that PyTorch's product does not take."""
        if self.on_gpu and not self.captures and like.dtype != torch.bfloat16:
            dtype = str(like.dtype).removeprefix("torch.")
            raise UnsupportedError(f"--dtype {dtype}: experts on a GPU without Triton are computed in bfloat16")
        return super().empty_experts(like, num_experts, out_features, in_features)

    def upload(self, host: Tensor, to: Tensor) -> None:
        if self.on_gpu:
            accelerator.upload(host, to)
        else:
            super().upload(host, to)

    def start_download(self, x: Tensor) -> Callable[[], Tensor]:
        return accelerator.start_download(x, torch.cuda) if self.on_gpu else super().start_download(x)

    def is_fatal(self, error: BaseException) -> bool:
        """Return `Backend.is_fatal`. Triton and cuBLAS raise RuntimeError where PyTorch raises AcceleratorError."""
        of_device = isinstance(error, RuntimeError) and any(name in str(error) for name in DEVICE_ERRORS)
        return of_device or super().is_fatal(error)

    def memory(self) -> tuple[int, int]:
        return accelerator.memory(self.device, torch.cuda) if self.on_gpu else super().memory()

    def peak_memory(self, run: Callable[[], object]) -> int:
        return accelerator.peak_memory(run, torch.cuda) if self.on_gpu else super().peak_memory(run)
