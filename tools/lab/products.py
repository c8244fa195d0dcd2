"""The floor of code on a CPU: its matrix products alone, recorded while it runs and then run one after the other."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.device.factory import make_backend

_LINEAR = ("aten::linear", "dflash_server::linear", "dflash_server::linear_float32")
"""Operators of F.linear in inference mode, and the CPU's own."""


class Products(TorchDispatchMode):
    """Products with weights inside the context, as (rows, weight [in, out]). Attention's products are not recorded.

    Compiled code hides its products, so an eager engine runs inside the context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append((args[0].shape[0], args[1]))
        elif func.name() in _LINEAR:
            self.seen.append((args[0].shape[0], args[1].t()))
        return func(*args, **(kwargs or {}))

    @torch.inference_mode()
    def seconds(self) -> float:
        """Run the products again and return their seconds."""
        multiply = make_backend("cpu").linear
        inputs = [torch.randn(rows, weight.shape[0], dtype=weight.dtype) for rows, weight in self.seen]
        started = time.perf_counter()
        for x, (_, weight) in zip(inputs, self.seen, strict=True):
            multiply(x, weight.t())
        return time.perf_counter() - started
