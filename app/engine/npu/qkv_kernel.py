"""Choice between one kernel in Triton and torch_npu's operators, for the work between QKV projection and attention.

Tried with a double of the kernel; not run on an Ascend device.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.device.base import LayerKv
from app.engine.npu.rules import PAGE_SIZE

logger = logging.getLogger(__name__)

QkvIntoKv = Callable[..., Tensor]
"""`Backend.qkv_into_kv`."""
EPS = 1e-6
ROWS = 64
"""Rows of a trial, more than a device has vector cores, so cores take a second row."""
TOLERANCE = 2**-5
"""Difference, absolute and relative, of the operators' three roundings in bfloat16 from the kernel's one."""


class Sizes(NamedTuple):
    """Sizes of a call. `norm_dtype` is that of the q/k norms' weights, or None for a model without them."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    norm_dtype: torch.dtype | None

    def __str__(self) -> str:
        return f"{self.heads} + 2 x {self.kv_heads} heads of {self.dim}"


class QkvKernel:
    """Kernel of `npu/rows.py`, used for sizes of heads with which it gives what the operators give.

    Sizes are tried at their first call. That is in no capture, because a step runs once before its capture.
    """

    def __init__(self, device: torch.device, operators: QkvIntoKv, is_fatal: Callable[[BaseException], bool]) -> None:
        self._device, self._operators, self._is_fatal = device, operators, is_fatal
        self._kernel = _load(device)
        self._chosen: dict[Sizes, QkvIntoKv] = {}

    def way(self, sizes: Sizes) -> QkvIntoKv:
        """Return the kernel or the operators for these sizes."""
        if self._kernel is None:
            return self._operators
        if sizes not in self._chosen:
            self._chosen[sizes] = self._kernel if self._is_right(self._kernel, sizes) else self._operators
        return self._chosen[sizes]

    def _is_right(self, kernel: QkvIntoKv, sizes: Sizes) -> bool:
        """Return True if the kernel gives what the operators give. Raises errors that leave the device unknown."""
        try:
            wanted, found = self._results((self._operators, kernel), sizes)
        except Exception as error:
            if self._is_fatal(error):
                error.add_note("triton-ascend's kernel was tried; --no-npu-triton starts without it")
                raise
            logger.warning("triton-ascend's kernel fails for %s, so the operators stay: %s", sizes, _last_line(error))
            return False
        is_right = all(map(partial(torch.allclose, atol=TOLERANCE, rtol=TOLERANCE), found, wanted))
        if is_right:
            logger.info("norms, RoPE and K/V write of a layer with %s: one kernel of triton-ascend", sizes)
        else:
            logger.warning("triton-ascend's kernel is wrong for %s, so the operators stay", sizes)
        return is_right

    def _results(self, ways: tuple[QkvIntoKv, ...], sizes: Sizes) -> list[list[Tensor]]:
        """Return q, K and V in fp32 on the host, by each of `ways`, from the same random rows."""
        heads, kv_heads, dim, dtype, norm_dtype = sizes
        noise = torch.Generator().manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=noise).to(self._device, dtype)

        qkv = normal(ROWS, heads + 2 * kv_heads, dim)
        norms = [None if norm_dtype is None else normal(dim, dtype=norm_dtype) for _ in range(2)]
        angles = torch.randn(ROWS, 1, dim // 2, generator=noise).repeat(1, 1, 2)
        rotation = tuple(x.to(self._device, dtype) for x in (angles.cos(), angles.sin()))
        slots = torch.randperm(2 * PAGE_SIZE, generator=noise)[:ROWS].to(self._device, torch.int32)
        results = []
        for way in ways:
            pages = (torch.zeros(2, PAGE_SIZE, kv_heads, dim, dtype=dtype, device=self._device) for _ in range(2))
            kv = LayerKv(*pages)
            q = way(qkv.clone(), *norms, EPS, rotation, kv, slots)
            results.append([x.cpu().float() for x in (q, kv.k, kv.v)])
        return results


def _load(device: torch.device) -> QkvIntoKv | None:
    """Return the kernel for the device's cores, or None without triton-ascend."""
    try:
        from app.engine.npu import rows

        return partial(rows.qkv_into_kv, cores=rows.vector_cores(device))
    except ModuleNotFoundError as error:
        logger.info("norms, RoPE and K/V write of a layer are five operators, because %s is not installed", error.name)
        return None
    except Exception as error:  # a Triton for another device has no driver here, and one beside it may be half gone
        logger.warning("Triton cannot be used on %s, so the operators stay: %s", device, _last_line(error))
        return None


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
