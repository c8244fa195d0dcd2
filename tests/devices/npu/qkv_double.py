"""Double of `app.engine.npu.rows`: one launch in the trace, and numbers of the CPU. No stub can run Triton-Ascend."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch_npu
from torch import Tensor

from app.engine.device.base import LayerKv, Rotation
from app.engine.device.torch import TorchBackend
from tests.devices.npu import null_device

MODULE = "app.engine.npu.rows"
KERNEL = "norm_rope_and_write"
SCHEMA = (
    "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v,"
    " Tensor slots) -> Tensor"
)


@cache
def _operator() -> Any:
    library = torch.library.Library("double", "DEF")
    library.define(f"qkv_into_kv{SCHEMA}")
    library.impl("qkv_into_kv", _launch, "PrivateUse1")
    library.impl("qkv_into_kv", _compute, "CPU")
    _operator.library = library  # type: ignore[attr-defined]
    return torch.ops.double.qkv_into_kv


def _launch(qkv: Tensor, q_norm: Any, k_norm: Any, eps: float, cos: Any, sin: Any, k: Tensor, *_: Any) -> Tensor:
    stream = torch_npu._C._npu_getCurrentRawStream(torch.npu.current_device())
    null_device.note("capture" if null_device.stream_state(stream).graph else "launch", KERNEL)
    return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * k.shape[2], qkv.shape[2])


def _compute(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> Tensor:
    """Compute in fp32, and round once."""
    written = LayerKv(*(torch.zeros(1, len(qkv), *k.shape[2:]) for _ in range(2)))
    norms = (None if norm is None else norm.float() for norm in (q_norm, k_norm))
    cpu = TorchBackend(torch.device("cpu"))
    q = cpu.qkv_into_kv(qkv.float(), *norms, eps, (cos.float(), sin.float()), written, torch.arange(len(qkv)))
    for pages, found in ((k, written.k), (v, written.v)):
        pages.flatten(0, 1)[slots.long()] = found[0].to(pages.dtype)
    return q.to(qkv.dtype)


def qkv_into_kv(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rotation: Rotation,
    kv: LayerKv,
    slot_mapping: Tensor,
    *,
    cores: int,
) -> Tensor:
    q: Tensor = _operator()(qkv, q_norm, k_norm, eps, *rotation, kv.k, kv.v, slot_mapping)
    return q


def module(**changes: Any) -> Any:
    """Return the double, with `changes` in place of its functions."""
    return SimpleNamespace(**{"vector_cores": lambda device: 40, "qkv_into_kv": qkv_into_kv} | changes)
