"""The floor of what runs on a CPU: its matrix products alone, seen while it runs and run again one after the other."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.dflash.drafter import DFlashDrafter
from app.engine.step.forward import Forward


class Products(TorchDispatchMode):
    """The products with weights of what is run meanwhile: (rows, weight [in, out]) of each. Attention's own products
    are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append((args[0].shape[0], args[1]))
        elif func is torch.ops.aten.linear.default:  # as F.linear is told where nothing is differentiated
            self.seen.append((args[0].shape[0], args[1].t()))
        return func(*args, **(kwargs or {}))

    @torch.inference_mode()
    def seconds(self) -> float:
        """What they take by themselves."""
        inputs = [torch.randn(rows, weight.shape[0], dtype=weight.dtype) for rows, weight in self.seen]
        started = time.perf_counter()
        for x, (_, weight) in zip(inputs, self.seen, strict=True):
            torch.mm(x, weight)
        return time.perf_counter() - started


@contextmanager
def by_operators(forward: Forward) -> Iterator[None]:
    """Without what `--compile` has compiled, in which no product can be seen."""
    holders: list[tuple[object, str]] = [(forward, "fused_forward"), (forward, "fused_propose")]
    if isinstance(forward.drafter, DFlashDrafter):
        holders.append((forward.drafter, "fused_write"))
    compiled = [getattr(holder, name) for holder, name in holders]
    for holder, name in holders:
        setattr(holder, name, None)
    try:
        yield
    finally:
        for (holder, name), function in zip(holders, compiled, strict=True):
            setattr(holder, name, function)
