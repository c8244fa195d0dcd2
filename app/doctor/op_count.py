"""How many operators a stretch of code asks a device to run: the part of a step's time that the host is to blame for.

    with Launches("npu") as counted:
        core.step()
    counted.total, counted.operators.most_common(5)

Counted is every operator call on tensors of that kind of device, by its name, where it reaches the dispatcher: an
operator that a device has no kernel for counts as the operators that it is made of. Not counted are views, memory that
is handed out without being filled, and questions about a tensor. Copies between host and device are counted apart.

One operator is mostly one kernel. It is more where a device first makes an input contiguous, or casts it, by itself:
torch_npu 2.13.0 launches two for an index by an int64 and an int32 tensor. The replay of a graph is no operator. An
attention call that is given its lengths anew for a replay is one, as `npu_fused_infer_attention_score.out`: it costs
the host about what a launch does.
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
    """`operators` and `copies` count by name. Belongs to the thread that enters it; it slows every call down, so a step
    is counted in one run and timed in another."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._device = device
        self._key = DispatchKey.PrivateUse1 if device == "npu" else getattr(DispatchKey, device.upper())

    @property
    def total(self) -> int:
        """Operators, copies not among them."""
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
    """Whether the result lies in the memory of the first argument: `contiguous` and others are declared views, and may
    copy."""
    if not func.is_view or not isinstance(out, Tensor) or not isinstance(args[0], Tensor):
        return func.is_view
    return out.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
