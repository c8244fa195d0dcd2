"""A backend's operators, each run once on small tensors and compared with the torch backend on the CPU in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from app.doctor.probes import Finding, failed, ok
from app.engine.backend.base import Backend, LayerKv
from app.engine.backend.torch import TorchBackend
from app.engine.build.self_test import TOLERANCE, check_attention
from app.engine.errors import UnsupportedError
from app.engine.models.config import DecoderConfig

_ROWS, _HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 20, 256, 512, 8, 2, 128, 16
_HINT = "do not serve on it; with versions that belong together, report this output"


class Inputs:
    """The same values for every backend: rounded to `rounded`, then held in `dtype` on the backend's device."""

    def __init__(self, backend: Backend, rounded: torch.dtype, dtype: torch.dtype) -> None:
        self.device, self.dtype = backend.device, dtype
        self._rounded = rounded
        self._noise = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.put(torch.randn(*shape, generator=self._noise) * scale)

    def put(self, values: Tensor) -> Tensor:
        return values.to(self._rounded).to(self.device, self.dtype)

    def scattered(self, count: int, below: int) -> Tensor:
        """Distinct int32 numbers [count]."""
        return torch.randperm(below, generator=self._noise)[:count].to(self.device, torch.int32)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Int32 numbers from `low` to below `high`."""
        return torch.randint(low, high, shape, generator=self._noise).to(self.device, torch.int32)


def _write_kv(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    """All of the pages: what no row was written to stays as it was. The rows are views of a wider tensor."""
    page_size, num_pages = 128, 3
    pages = [inputs.normal(num_pages, page_size, _KV_HEADS, _HEAD_DIM) for _ in range(2)]
    k, v = inputs.normal(_ROWS, 2 * _KV_HEADS, _HEAD_DIM).chunk(2, dim=1)
    backend.write_kv(k, v, LayerKv(*pages), inputs.scattered(_ROWS, num_pages * page_size))
    return tuple(pages)


def _rms_norm(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    return (backend.rms_norm(inputs.normal(_ROWS, _HIDDEN), inputs.normal(_HIDDEN), 1e-6),)


def _add_rms_norm(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    x, residual = inputs.normal(_ROWS, _HIDDEN), inputs.normal(_ROWS, _HIDDEN)
    return backend.add_rms_norm(x, residual, inputs.normal(_HIDDEN), 1e-6)


def _rope(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    angles = torch.arange(_ROWS * _HEAD_DIM // 2).view(_ROWS, -1) / _HEAD_DIM
    rotation = tuple(table.unsqueeze(1) for table in backend.rotary_tables(angles, inputs.dtype))
    halves = inputs.normal(_ROWS, _HEADS, 2, _HEAD_DIM // 2)
    x = halves.transpose(2, 3) if backend.interleaved_rope else halves
    turned = backend.rope(x.flatten(2), rotation).view(x.shape)
    return (turned.transpose(2, 3) if backend.interleaved_rope else turned,)


def _gated_mlp(backend: Backend, inputs: Inputs) -> tuple[Tensor, ...]:
    gate_up, down = inputs.normal(2 * _INTERMEDIATE, _HIDDEN), inputs.normal(_HIDDEN, _INTERMEDIATE)
    return (backend.gated_mlp(inputs.normal(_ROWS, _HIDDEN), gate_up, down),)


Operator = Callable[[Backend, Inputs], tuple[Tensor, ...]]

COMPARED: dict[str, Operator] = {
    "write_kv": _write_kv,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "gated_mlp": _gated_mlp,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest there is from the CPU in float32, and the same as a share of the largest value. Not a number where
    that is what was found."""

    absolute: float
    relative: float


@torch.inference_mode()
def difference(backend: Backend, operator: Operator) -> Difference:
    reference, dtype = TorchBackend(torch.device("cpu")), backend.defaults.dtype
    found = operator(backend, Inputs(backend, dtype, dtype))
    wanted = operator(reference, Inputs(reference, dtype, torch.float32))
    absolute, relative = [], []
    for got, want in zip(found, wanted, strict=True):
        largest = float(want.double().abs().max())
        absolute.append(float((got.cpu().double() - want.double()).abs().max()))
        relative.append(absolute[-1] / largest if largest else absolute[-1])
    if any(isnan(error) for error in absolute):
        return Difference(float("nan"), float("nan"))
    return Difference(max(absolute), max(relative))


def compare(backend: Backend, name: str) -> Finding:
    """`name` is one of COMPARED. From TOLERANCE of the largest value on, a difference is more than rounding."""
    error = difference(backend, COMPARED[name]).relative
    if isnan(error):
        return failed("what it gives is not all numbers", _HINT)
    if error >= TOLERANCE:
        return failed(f"differs from the CPU by up to {error:.1%} of the largest value", _HINT)
    return ok(f"as on the CPU, to {error:.1%} of the largest value" if error else "exactly as on the CPU")


@torch.inference_mode()
def attention(backend: Backend) -> Finding:
    """Causal and bidirectional, over pages of the backend's own size."""
    decoder = DecoderConfig(
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_layers=1,
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        vocab_size=_HIDDEN,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    try:
        check_attention(backend, decoder, backend.defaults.page_size, _BLOCK, backend.defaults.dtype)
    except UnsupportedError as error:
        return failed(str(error), _HINT)
    return ok(f"causal and bidirectional over blocks of {_BLOCK} rows, as computed densely")
