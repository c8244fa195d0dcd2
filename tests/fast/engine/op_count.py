"""Count of the operators that a stretch of code launches on a device, which cost the host its part of a step's time.

    with Launches("npu") as counted:
        core.step()
    counted.total, counted.operators.most_common(5)

Every operator call on tensors of that kind of device counts by its name, where it reaches the dispatcher. An operator
without a kernel on the device counts as its parts. Views, memory that is handed out unfilled, and questions about a
tensor do not count. Copies between host and device are counted apart.

One operator is mostly one kernel. A device launches more to make an input contiguous or to cast it. For example
torch_npu 2.13.0 launches two for an index by an int64 and an int32 tensor. The replay of a graph is no operator. An
attention call that is given new lengths for a replay is one, `npu_fused_infer_attention_score.out`. It costs the host
about as much as a launch.
"""

from collections import Counter
from typing import Any

from torch import DispatchKey, Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_WORK = {
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "_unsafe_view",
        "new_empty",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "set_",
    )
} | {
    "npu::_npu_fused_infer_attention_score_infer_output",
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_local_scalar_dense"}


class Launches(TorchDispatchMode):
    """Counts of `operators` and of `copies` by name, in the thread that enters it.

    Every call is slower, so a step is counted in one run and timed in another.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._device = device
        self._key = DispatchKey.PrivateUse1 if device == "npu" else getattr(DispatchKey, device.upper())

    @property
    def total(self) -> int:
        """Number of operators without copies."""
        return self.operators.total()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        kinds = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        name = func._schema.name
        if self._device not in kinds or name in _NO_WORK or _is_view(func, args, out):
            return out
        shown = str(func).removesuffix(".default")
        if name == "aten::_local_scalar_dense" or (name in _COPIES and self._device != "cpu" and "cpu" in kinds):
            self.copies[shown] += 1
        else:
            self.operators[shown] += 1
        return out

    def _is_made_of_others(self, func: OpOverload) -> bool:
        composite = func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        return composite and not func.has_kernel_for_dispatch_key(self._key)


def _is_view(func: OpOverload, args: Any, out: Any) -> bool:
    """Return True if the result lies in the memory of the first argument. Declared views like `contiguous` may copy."""
    if not func.is_view or not isinstance(out, Tensor) or not isinstance(args[0], Tensor):
        return func.is_view
    return out.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
