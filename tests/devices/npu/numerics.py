"""Right numbers on the null device: each operator on "npu:0" is also computed, on CPU views of the same memory.

    with Numerics():
        x = torch.ones(2, 3, device="npu:0")      # any engine code

An operator first takes torch_npu's own way (argument checks, output shapes, fallbacks that raise, launches that are
traced), which computes nothing; then the same operator runs on CPU tensors that alias the arguments, `npu::` ones by
kernels.py, and fills the outputs. Under a graph capture it is recorded instead, and computed at every replay, with the
arguments that its task group was last updated to. Memory that nothing wrote holds NaN (-1 for integers).
"""

import ctypes
import itertools
import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.devices.npu import kernels, null_device
from tools.npu_contract import check

CPU = torch.device("cpu")
HOST_ONLY = {"aten::_local_scalar_dense", "aten::record_stream", "aten::resize_", "aten::set_", "aten::_pin_memory"}
HOST_ONLY |= {"npu::get_npu_format"}
"""Operators whose own way through torch_npu is all there is to them."""
FRESH = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided")
ALLOCATES = {f"aten::{name}" for name in FRESH} | {
    "npu::_npu_fused_infer_attention_score_infer_output",
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::_npu_fused_infer_attention_score_v2_infer_output",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
}
"""Operators that give memory and no numbers."""


class NumericsError(RuntimeError):
    """A call that the harness cannot follow, or that would go wrong on a card."""


@dataclass(slots=True)
class Call:
    """One operator call on CPU aliases of its tensors. It owns no device memory, as a graph on a card owns none."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    lift: frozenset[str]
    captured: bool

    def run(self) -> Any:
        """Compute into `outputs`; returns what the CPU operator returned."""
        check.check_values(self.func, self.args, self.kwargs, self.lift)
        with torch.no_grad():
            computed = self.func(*self.args, **self.kwargs)
            if self.func.namespace == "c10d":  # Gloo's, of the same process group
                tree_leaves(computed)[-1].wait()
            wanted, found = tree_leaves(self.outputs), tree_leaves(computed)
            if len(wanted) != len(found):
                raise NumericsError(f"{self.func}: torch_npu returns {len(wanted)} values, the CPU {len(found)}")
            for target, result in zip(wanted, found, strict=True):
                if isinstance(target, Tensor):
                    _fill(self.func, target, result)
        return computed


class Numerics(TorchDispatchMode):
    """See the module. `lift` names rules of docs/npu-contract.md that are not held, such as {"N7"} for float32.

    Belongs to the thread that enters it. null_device.traced() has the waits of the host. Operators whose result's size
    depends on values are among them.
    """

    def __init__(self, lift: Iterable[str] = ()) -> None:
        super().__init__()
        self.lift = frozenset(lift)
        self._written = _AsWritten()

    def __enter__(self) -> "Numerics":
        if os.environ.get("TASK_QUEUE_ENABLE") != "0":
            raise NumericsError("set TASK_QUEUE_ENABLE=0: torch_npu would issue its work from a second thread")
        kernels.register()
        null_device.on_replay(_on_replay, _on_destroyed)
        null_device.let_device_copy(False)
        torch.Tensor.__repr__ = _repr  # type: ignore
        self._written.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._written.__exit__(*error)
        null_device.let_device_copy(True)
        null_device.let_go()
        torch.Tensor.__repr__ = _plain_repr  # type: ignore

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(_on_device(leaf) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = func.name().partition(".")[0]
        if name in HOST_ONLY or _is_view(func):
            return func(*args, **kwargs)
        stream = torch_npu._C._npu_getCurrentRawStream(torch.npu.current_device())
        state = null_device.stream_state(stream)
        if state.stands:
            raise NumericsError(f"{func} behind a replay that waits for its update: call NPUGraph.update first")
        check.check_call(func, args, kwargs, self.lift)
        if name in ALLOCATES:
            out = func(*args, **kwargs)
            if name.startswith("aten::") and not state.graph:
                _poison(out)
            return out
        if _size_depends_on_values(func, args):
            return self._computed_first(func, args, kwargs, state)
        copies = null_device.captured_host_copies()
        out = func(*args, **kwargs)
        if null_device.captured_host_copies() > copies and not _has_host_tensor((args, out)):
            raise NumericsError(f"{func} uploads a scalar by itself; replays would read it from memory that is gone")
        if _is_plain_read(out, args):
            return out
        if _has_host_tensor(out):
            if state.graph:
                raise NumericsError(f"{func} in a graph reads a strided tensor or casts it on the way to the host")
            null_device.deliver()  # The memory that torch_npu has read holds no numbers yet. They follow.
        call = Call(func, *tree_map(alias, (args, kwargs, out)), self.lift, captured=bool(state.graph))
        if state.updating:
            _update(call, state)
        elif state.graph:
            _record(call, stream, state)
        else:
            computed = call.run()
            if not isinstance(computed, Tensor | tuple | list | type(None)):
                return computed
        return out

    def _computed_first(self, func: OpOverload, args: Any, kwargs: Any, state: null_device.StreamState) -> Any:
        """For results whose size a card tells only when it has counted: computed here, then put on the device."""
        if state.graph:
            raise NumericsError(f"{func} in a graph: its result's size depends on values, so the host would wait")
        null_device.note("sync", str(func))
        with torch.no_grad():
            computed = func(*tree_map(alias, args), **tree_map(alias, kwargs))
        return tree_map(_to_device, computed)


class _AsWritten(TorchFunctionMode):
    """Sees a call's arguments before the dispatcher turns them into what the schema asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs and ("actual_seq_lengths" in kwargs or "actual_seq_qlen" in kwargs):
            check.check_lengths(getattr(func, "__name__", "").partition(".")[0], kwargs)
        return func(*args, **(kwargs or {}))


def alias(leaf: Any) -> Any:
    """A CPU tensor over an npu tensor's memory, of the same size, strides and offset; "cpu" for an npu device."""
    if isinstance(leaf, torch.device):
        return CPU if leaf.type == "npu" else leaf
    if not isinstance(leaf, Tensor) or leaf.device.type != "npu":
        return leaf
    storage = leaf.untyped_storage()
    with torch.no_grad():
        if storage.nbytes() == 0 or leaf.numel() == 0:
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
        memory = _host_storage(storage.data_ptr(), storage.nbytes())
        return torch.empty(0, dtype=leaf.dtype).set_(memory, leaf.storage_offset(), leaf.size(), leaf.stride())


@lru_cache(maxsize=4096)
def _host_storage(address: int, size: int) -> torch.UntypedStorage:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8).untyped_storage()


# ---- graphs -----------------------------------------------------------------------------------------------------

_numbers = itertools.count(1)
_calls: dict[int, Call] = {}
_graph_calls: dict[int, list[int]] = {}
_group_calls: dict[int, list[int]] = {}
_update_place: dict[int, tuple[int, int]] = {}


def _record(call: Call, stream: int, state: null_device.StreamState) -> None:
    number = next(_numbers)
    _calls[number] = call
    _graph_calls.setdefault(state.graph, []).append(number)
    if state.group:
        _group_calls.setdefault(state.group, []).append(number)
    null_device.record(stream, number)


def _update(call: Call, state: null_device.StreamState) -> None:
    """The i-th call in a task group's update takes the place of the i-th that was recorded in the group."""
    turn, place = _update_place.get(state.updating, (0, 0))
    place = place if turn == state.update_turn else 0
    _update_place[state.updating] = state.update_turn, place + 1
    numbers = _group_calls.get(state.updating, [])
    if place >= len(numbers) or _calls[numbers[place]].func is not call.func:
        raise NumericsError(f"update gives {call.func} at place {place} of a task group that recorded none there")
    old = _calls[numbers[place]]
    old.args, old.kwargs = call.args, call.kwargs


def _on_replay(graph: int, number: int) -> int:
    try:
        _calls[number].run()
    except Exception as error:
        null_device.set_error(f"replay of graph {graph}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _on_destroyed(graph: int) -> None:
    gone = set(_graph_calls.pop(graph, []))
    for number in gone:
        del _calls[number]
    for group in [group for group, numbers in _group_calls.items() if gone.issuperset(numbers)]:
        del _group_calls[group]
        _update_place.pop(group, None)


_plain_repr = torch.Tensor.__repr__


def _repr(tensor: Tensor, *, tensor_contents: str | None = None) -> str:
    """torch takes numbers to print them with all modes off; this shows an npu tensor's by its alias."""
    if tensor.device.type != "npu":
        return _plain_repr(tensor, tensor_contents=tensor_contents)
    return f"{_plain_repr(alias(tensor))[:-1]}, device='{tensor.device}')"


# ---- one call ---------------------------------------------------------------------------------------------------


def _on_device(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.device.type == "npu"
    return isinstance(leaf, torch.device) and leaf.type == "npu"


@cache
def _is_view(func: OpOverload) -> bool:
    """A view by itself. Composite operators such as `reshape` and `to` are declared as views and may copy."""
    return func.is_view and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _fill(func: OpOverload, target: Tensor, result: Tensor) -> None:
    if target.shape != result.shape or target.dtype != result.dtype:
        raise NumericsError(
            f"{func}: torch_npu gives {target.dtype} {list(target.shape)}, the CPU {result.dtype} {list(result.shape)}"
        )
    if target.numel() and target.data_ptr() != result.data_ptr():
        target.copy_(result)


def _has_host_tensor(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves(values))


def _is_plain_read(out: Any, args: tuple[Any, ...]) -> bool:
    """Return True for a copy of unchanged bytes to the host, which the null device does itself."""
    source = next((leaf for leaf in reversed(args) if isinstance(leaf, Tensor)), None)
    return (
        isinstance(out, Tensor)
        and isinstance(source, Tensor)
        and (out.device.type, source.device.type) == ("cpu", "npu")
        and out.dtype == source.dtype
        and out.is_contiguous()
        and source.is_contiguous()
    )


def _size_depends_on_values(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Also an index by a mask, which becomes a list of places first, and composites of operators tagged so."""
    name = func.name().partition(".")[0]
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "aten::repeat_interleave":
        return len(args) == 1 or isinstance(args[1], Tensor)
    if name == "aten::where":
        return len(args) == 1
    return torch.Tag.dynamic_output_shape in func.tags or name in ("aten::argwhere", "aten::nonzero_numpy")


def _to_device(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    out = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="npu")
    alias(out).copy_(leaf)
    return out


def _poison(out: Tensor) -> None:
    if out.device.type == "npu" and out.numel():
        alias(out).untyped_storage().fill_(1 if out.dtype == torch.bool else 0xFF)
