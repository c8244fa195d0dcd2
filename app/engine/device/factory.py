"""Backend of a device, by the device's name. No other module imports a device plug-in."""

import importlib
import importlib.util

import torch

from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError


def found_device(device: str) -> str:
    """Return the device, where "auto" is CUDA if torch sees a GPU, else an NPU that torch_npu can use, else the CPU."""
    if device == "auto":
        npu = importlib.import_module("app.engine.npu.torch_build")
        return "cuda" if torch.cuda.is_available() else "npu" if npu.is_usable() else "cpu"
    return device


def make_backend(device: str, *, rank: int = 0, batch_invariant: bool = False) -> Backend:
    """Return the backend of "auto", "cpu", "cuda[:N]" or "npu[:N]", where each `rank` has the next device.

    If `batch_invariant` a row has the same bits in every batch. Raises UnsupportedError if there is none here.
    """
    device = found_device(device)
    kind, _, number = device.partition(":")
    index = int(number or 0) + rank
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise UnsupportedError(
            f"--device {device}: this torch ({torch.__version__}) sees {torch.cuda.device_count()} CUDA devices"
        )
    if kind == "npu":
        return _npu_backend(device, index)
    if kind == "cuda" and not importlib.util.find_spec("triton"):
        raise UnsupportedError(f"--device {device}: Triton is not installed; pip install triton")
    module, name = f"app.engine.{kind}.backend", f"{kind.capitalize()}Backend"
    if batch_invariant:
        module, name = f"app.engine.{kind}.invariant", f"Invariant{name}"
    where = torch.device("cpu") if kind == "cpu" else torch.device(kind, index)
    backend: Backend = getattr(importlib.import_module(module), name)(where)
    return backend


def _npu_backend(device: str, index: int) -> Backend:
    try:
        module = importlib.import_module("app.engine.npu.backend")
    except (ImportError, RuntimeError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise UnsupportedError(
            f"--device {device}: torch_npu cannot be loaded: {reason}. Is CANN's set_env.sh sourced?"
        ) from None
    backend: Backend = module.NpuBackend(torch.device("npu", index))
    return backend
