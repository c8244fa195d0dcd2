"""Probes of a host with GPUs, for `dflash-server check --device cuda`. Importing this module loads no torch."""

import importlib.util
import os
import shutil
import sysconfig
from functools import partial
from pathlib import Path

from app.engine.device.probe import Finding, Probe, failed, ok


def probes(device: str) -> list[Probe]:
    """Return the probes. A probe "torch" comes before these."""
    return [
        Probe("devices", partial(devices, device), ("torch",), "there is no such device"),
        Probe("compiler", compiler, ("torch",), "Triton cannot compile a launcher"),
    ]


def devices(device: str) -> Finding:
    import torch

    count, index = torch.cuda.device_count(), int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{count} visible" + ("" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}")
    if index >= count:
        return failed(
            f"{device} is not among them: {found}",
            f"visible devices are counted from 0: cuda:0 to cuda:{count - 1}"
            if count
            else "`nvidia-smi` must list a GPU, and its driver must be recent enough for this torch",
        )
    return ok(f"{found}; {device} is {torch.cuda.get_device_name(index)}")


def compiler() -> Finding:
    """Find what Triton compiles a launcher with when a kernel is first launched: a C compiler, and Python.h."""
    if not importlib.util.find_spec("triton"):
        return failed("Triton is not installed", "pip install triton")
    found = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    if found is None or not shutil.which(found):
        return failed(
            "there is no C compiler" if found is None else f"CC={found} is not there",
            "install gcc (Debian and Ubuntu: apt-get install gcc libc6-dev), or name another compiler in CC",
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return failed(f"{found}, but no {header}", "install Python's headers (Debian and Ubuntu: python3-dev)")
    return ok(f"{found}, {header}")
