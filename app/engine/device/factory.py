"""Backend of a device, by the device's name. No other module imports a backend."""

from collections.abc import Callable

import torch

from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.npu.torch_build import is_usable

_LIBRARIES = {
    "cuda": ("Triton", "Is it installed (pip install triton)?"),
    "npu": ("torch_npu", "Is CANN's set_env.sh sourced?"),
}
"""The library that a plug-in needs, and a hint where it cannot be loaded."""


def found_device(device: str) -> str:
    """Return the device, where "auto" is CUDA if torch sees a GPU, else an NPU that torch_npu can use, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "npu" if is_usable() else "cpu"
    return device


def make_backend(device: str, *, rank: int = 0, batch_invariant: bool = False) -> Backend:
    """Return the backend of "auto", "cpu", "cuda[:N]" or "npu[:N]", where each `rank` has the next device.

    With `batch_invariant` a row has the same bits in every batch. Raises UnsupportedError if there is no such device.
    """
    device = found_device(device)
    kind, _, number = device.partition(":")
    index = int(number or 0) + rank
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise UnsupportedError(
            f"--device {device}: this torch ({torch.__version__}) sees {torch.cuda.device_count()} CUDA devices"
        )
    try:
        backend = backend_class(kind, batch_invariant)
    except (ImportError, RuntimeError, OSError) as error:
        if kind not in _LIBRARIES:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        library, hint = _LIBRARIES[kind]
        raise UnsupportedError(f"--device {device}: {library} cannot be loaded: {reason}. {hint}") from None
    return backend(torch.device(kind) if kind == "cpu" else torch.device(kind, index))


def backend_class(kind: str, batch_invariant: bool) -> Callable[[torch.device], Backend]:
    """Return the class of a plug-in, imported here because it needs libraries that other hosts may lack. Raises
    UnsupportedError for `batch_invariant` on an NPU."""
    if kind == "npu":
        if batch_invariant:
            why = "an NPU's operators choose how they sum; it is for --device cpu and cuda"
            raise UnsupportedError(f"--batch-invariant: {why}")
        from app.engine.npu.backend import NpuBackend

        return NpuBackend
    if kind == "cuda":
        from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend

        return InvariantCudaBackend if batch_invariant else CudaBackend
    from app.engine.cpu.backend import CpuBackend, InvariantCpuBackend

    return InvariantCpuBackend if batch_invariant else CpuBackend
