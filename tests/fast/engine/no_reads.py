"""A guard against operators that wait for a device."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique"}
"""Operators that hand a value, or a size that depends on values, to the host: each would stall an accelerator."""


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise AssertionError(f"{func} reads the device inside launch")
        return func(*args, **(kwargs or {}))
