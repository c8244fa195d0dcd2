"""Backend on CPUs, with this package's operators, and PyTorch's in their cheapest forms.

A step of a small model is hundreds of operators of a few microseconds, so their number counts. A step of a large model
reads weights, so their layout in memory counts.
"""

import ctypes
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.engine import heartbeat
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.cpu import attention, decoder, library, linear
from app.engine.device.base import (
    AttentionMask,
    AttentionMetadata,
    Decode,
    LayerKv,
    ProjectedRows,
    Rotation,
)
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.quantised import ExpertWeight, PackedFp4, QuantisedWeight, Rows, Weight, plain

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_MOST_KEPT = (1 << 30, 32 << 20)
"""Blocks up to this many bytes are kept; some versions of glibc refuse more than 32 MiB."""
_BLOCK_ROWS = 512
"""Rows of a weight that a thread writes at once, few enough for the processor's caches."""
_SMALL_LAYER = 1 << 19
"""Numbers of gate and up in a layer. With 3,000 to 147,000 bfloat16 takes up to 1.7 times as long in some steps,
because norms convert numbers. With 786,000 it is faster in all."""
_SMALL_MODEL = 1 << 25
"""Parameters of target and draft. With fewer, PyTorch's threads gain nothing where another process answers requests."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes, because NumPy has no bfloat16."""


class CpuBackend(TorchBackend):
    reads_arrays = True
    interleaved_rope = True
    quantised_dtypes = ("I8",)
    separate_prefill = False
    max_gathered_tokens = 1 << 13
    """Bound for PyTorch's attention, so that what it gathers stays in the processor's caches (tools/lab/NOTES.md)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._timed: list[Tensor] = []  # until the end of load
        self._num_parameters = 0
        self._few_rows = linear.MOST_ROWS
        self._dtype = self.defaults.dtype

    def why_not(self, dtype: torch.dtype, layer_numbers: int | None = None) -> str:
        if dtype != torch.bfloat16:
            return super().why_not(dtype)
        if layer_numbers is not None and layer_numbers < _SMALL_LAYER:
            return "it would not be faster for layers this small"
        return linear.why_not_bfloat16()

    def check(self, decoder: DecoderConfig, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        """Warn of a dtype that processors have few instructions for, and plan attention for this dtype."""
        if dtype == torch.float16 != self._dtype:
            logger.warning("--dtype float16 is slow on a CPU; float32 is quicker, and takes twice the memory")
        self._dtype = dtype

    def make_operators(self, on_progress: Callable[[int, int], None]) -> None:
        """Say how a dtype's operators are made, when the plan first asks for them."""
        library.on_source.set(on_progress)
        linear.set_up(heartbeat=torch.from_numpy(heartbeat.count))

    def end_of_load(self, *, tune: bool) -> None:
        """Time products of few rows, and use PyTorch where it is faster. A small model does not, because PyTorch's
        threads wait for one another in busy loops."""
        keep_freed_memory()  # not earlier, or what quantisation frees would stay
        if tune and linear.operator_for(self._dtype):
            self.use_operators(linear.ALL_ROWS if self._num_parameters < _SMALL_MODEL else linear.tune(self._timed))
        self._timed.clear()

    def use_operators(self, rows: int) -> None:
        """Use our kernels for up to `rows` rows, where they exist for the dtype."""
        linear.set_up(most_rows=rows)
        if self._few_rows:
            self._few_rows = rows
            logger.debug("forwards by one operator: up to %d rows", rows)

    def pack_weight(self, *parts: Tensor) -> Tensor:
        """Return the weight row by row, as it is stored, if this package's products are compiled. A weight of one part
        stays in place, which is the mapped file if that has the engine's dtype."""
        if not linear.operator_for(parts[0].dtype):
            self._few_rows = 0
            return self.pack_columns(*parts)
        linear.set_up(threads=torch.get_num_threads())
        packed = parts[0].contiguous()
        if len(parts) > 1:
            packed = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
            self.fill(_copy, parts, packed.split([len(part) for part in parts]))
        if sum(weight.nbytes for weight in self._timed) < linear.TRIED_BYTES:
            self._timed.append(packed)
        self._num_parameters += packed.numel()
        return packed

    def multiplies(self, weight: QuantisedWeight | PackedFp4) -> bool:
        """Return True for int8 with a scale a row, if this package's products are compiled."""
        in_8_bits = weight.data.dtype == torch.int8 and weight.data.shape[-1] % linear.INT8_STEP == 0
        return in_8_bits and weight.scales.shape[-1] == 1 and bool(linear.operator_for(weight.dtype))

    def pack_quantised(self, weight: QuantisedWeight) -> QuantisedWeight:
        linear.set_up(threads=torch.get_num_threads())
        self._num_parameters += weight.data.numel()
        pack = library.operators(weight.dtype).pack_int8
        if weight.data.dim() == 2:
            return replace(weight, data=pack(weight.data.contiguous()))
        for expert in weight.data:  # one at a time takes little memory
            expert.copy_(pack(expert))
        return weight

    def pack_columns(self, *parts: Tensor) -> Tensor:
        """Return the weight column by column, which is up to twice as fast for PyTorch's products of few rows
        (tools/lab/NOTES.md)."""
        columns = parts[0].new_empty(parts[0].shape[1], sum(map(len, parts)))
        self.fill(_turn, parts, columns.t().split([len(part) for part in parts]))
        return columns.t()

    def fill(self, write: Callable[[Tensor, Tensor], None], parts: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Write each part to its target in threads, without PyTorch, which would start more threads from each."""
        blocks, to = ([rows for part in side for rows in part.split(_BLOCK_ROWS)] for side in (parts, targets))
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(write, blocks, to))

    def empty_experts(self, like: Tensor, num_experts: int, out_features: int, in_features: int) -> Tensor:
        if like.dtype != torch.int8:
            self._few_rows = 0  # their products are PyTorch's
        return super().empty_experts(like, num_experts, out_features, in_features)

    @contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """Limit PyTorch's operators to one thread in steps with our products of few rows, and in a small model. Its
        threads wait for one another in busy loops, which makes a step many times slower where another process is busy
        (tools/lab/NOTES.md)."""
        threads = torch.get_num_threads()
        if num_rows <= self._few_rows or (self._few_rows and self._num_parameters < _SMALL_MODEL):
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        """Return None if the operator computes the engine's dtype: it plans nothing."""
        return None if attention.supports(self._dtype) else super().plan_attention(meta, mask, group)

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        if attention.supports(q_thd.dtype):
            return attention.attention(q_thd, kv, meta, mask, sinks)
        return super().attention(q_thd, kv, meta, mask, sinks)

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x = plain(x)
        if isinstance(weight, QuantisedWeight):
            return library.operators(x.dtype).linear_int8(x.contiguous(), weight.data, weight.scales, bias)
        if weight.is_contiguous() and (multiply := linear.operator_for(weight.dtype)):
            return multiply(x, weight, bias)
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())

    def grouped(self, x: Tensor, weight: ExpertWeight, ends: Tensor) -> Tensor:
        """Return `moe.grouped`. An int8 expert multiplies its rows in place, like any other weight."""
        if not isinstance(weight, QuantisedWeight):
            return super().grouped(x, weight, ends)
        parts = [(e, rows) for e, rows in enumerate(x.tensor_split(ends[:-1].long())) if len(rows)]
        experts = (QuantisedWeight(weight.data[e], weight.scales[e], weight.dtype) for e, _ in parts)
        return torch.cat([self.linear(rows, expert) for (_, rows), expert in zip(parts, experts, strict=True)])

    def logits(self, hidden: Tensor, lm_head: Weight) -> Tensor:
        if isinstance(lm_head, Tensor) and hidden.dtype == torch.bfloat16:
            return linear.float32(hidden, lm_head)
        return self.linear(hidden, lm_head)

    def rotary_tables(self, angles: Tensor, dtype: torch.dtype, scales: Tensor | float = 1.0) -> Rotation:
        """Return one table of complex numbers, with which one multiplication rotates a pair."""
        return (torch.polar(torch.ones_like(angles) * scales, angles),)

    def rope(self, x_thd: Tensor, rotation: Rotation) -> Tensor:
        pairs = x_thd.float().contiguous().view(torch.complex64)
        return (pairs * rotation[0]).view(torch.float32).to(x_thd.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, size = x.float(), x.shape[-1]
        root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(_root(size * eps)).mul_(1 / math.sqrt(size))
        return wide.div(root).mul_(weight).to(x.dtype)

    def qkv_into_kv(self, rows: ProjectedRows) -> Tensor:
        """Return `Backend.qkv_into_kv`, rounded once after norm and RoPE with this package's operator."""
        return attention.rotate_into(rows) if attention.supports(rows.qkv.dtype) else super().qkv_into_kv(rows)

    def context_into_kv(self, rows: ProjectedRows) -> None:
        """Apply `Backend.context_into_kv`, rounded like `qkv_into_kv`."""
        if not attention.supports(rows.qkv.dtype):
            return super().context_into_kv(rows)
        attention.rotate_into(rows._replace(q_norm=None))

    def decoder(self, layers: list[Any], norm: Tensor, config: DecoderConfig, taps: tuple[int, ...]) -> Decode | None:
        if not decoder.can_run(layers):
            return None
        run, at_any_rows = decoder.Decoder(layers, norm, config, taps), decoder.is_quantised(layers)
        return lambda embedded, *rest: run(embedded, *rest) if at_any_rows or len(embedded) <= self._few_rows else None

    def write_context(self, features: Tensor, *weights: Any) -> bool:
        *projections, rotation, kv, slots = weights
        if not attention.supports(features.dtype) or len(features) > self._few_rows:
            return False
        turns = torch.view_as_real(rotation[0])
        library.operators(features.dtype).context(features, *projections, turns, slots, kv.k, kv.v)
        return True

    def choose(self, hidden: Tensor, lm_head: Weight) -> Tensor | None:
        rows = hidden.shape[0]
        if not attention.supports(hidden.dtype) or rows > self._few_rows or isinstance(lm_head, QuantisedWeight):
            return None
        if not lm_head.is_contiguous():
            return None
        choices = torch.empty(rows, dtype=torch.int64)
        library.operators(hidden.dtype).best_of(hidden.contiguous(), lm_head, choices)
        return choices

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
        slot_mapping = slot_mapping.long()
        kv.k.view(-1, *k_thd.shape[1:]).index_copy_(0, slot_mapping, k_thd)
        kv.v.view(-1, *v_thd.shape[1:]).index_copy_(0, slot_mapping, v_thd)

    def verify(
        self,
        choices: Tensor,
        drafts: Tensor | None,
        logits_start: Tensor,
        num_drafts: Tensor,
        draft_index: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `Backend.verify`, computed in NumPy, because its calls cost less (tools/lab/NOTES.md)."""
        rows, limits = logits_start.numpy(), num_drafts.numpy()[:, None]
        columns = 0 if drafts is None else drafts.shape[1]
        out = choices.new_zeros(len(rows), columns + 2) if out is None else out
        result = out.numpy()
        column = np.arange(columns + 1)
        result[:, :-1] = tokens = choices.numpy()[rows[:, None] + np.minimum(column, limits)]
        if drafts is not None:
            accepted = (tokens[:, :-1] == drafts.numpy()[draft_index.numpy()]) & (column[1:] <= limits)
            result[:, -1] = np.where(accepted.all(axis=1), columns, accepted.argmin(axis=1))
        return out


class InvariantCpuBackend(CpuBackend):
    """Backend that gives a row the same bits in every batch (`--batch-invariant`).

    This package's operators make each sum in one order that does not depend on other rows, so PyTorch's are not used.
    """

    batch_invariant = True

    def make_operators(self, on_progress: Callable[[int, int], None]) -> None:
        super().make_operators(on_progress)
        self.use_operators(linear.ALL_ROWS)

    def check(self, decoder: DecoderConfig, block_size: int, page_size: int, dtype: torch.dtype) -> None:
        super().check(decoder, block_size, page_size, dtype)
        if not linear.operator_for(dtype):
            raise UnsupportedError("--batch-invariant on a CPU needs g++, and --dtype float32 or bfloat16")

    def end_of_load(self, *, tune: bool) -> None:
        super().end_of_load(tune=False)


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks; other allocators do not change.

    By default it returns them to the system at once, and each step faults the pages in again, half the time of a
    wide step (tools/lab/NOTES.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and any(mallopt(_M_MMAP_THRESHOLD, most) for most in _MOST_KEPT):
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _turn(rows: Tensor, to: Tensor) -> None:
    """Write rows [R, in] to a tensor [R, in] that lies column by column."""
    _copy(rows.t().contiguous(), to.t())


def _copy(rows: Tensor, to: Tensor) -> None:
    bits = _BITS[rows.itemsize]
    np.copyto(to.view(bits).numpy(), rows.view(bits).numpy())


@cache
def _root(x: float) -> Tensor:
    return torch.tensor(math.sqrt(x))
