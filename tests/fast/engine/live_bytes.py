"""Bytes of tensors that are alive at once, counted while PyTorch's operators run."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts every tensor that an operator returns, or that `note` is told of, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[int, int]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes of distinct memory."""
        return sum(dict(self._alive.values()).values())

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._alive[id(tensor)] = (storage.data_ptr(), storage.nbytes())
        weakref.finalize(tensor, self._alive.pop, id(tensor), None)
        self.peak = max(self.peak, self.now)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor)
        return out
