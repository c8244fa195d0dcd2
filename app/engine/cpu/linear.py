"""Products with weights [out, in] in row order, by this package's operator (linear.cpp) where there are few rows."""

import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cpu.library import DTYPES, load_operators, operators, processor

logger = logging.getLogger(__name__)

MOST_ROWS = 32
"""Rows up to which the operator is used for products that were not timed, as in linear.cpp."""
INT8_STEP = 4
"""Numbers of a row that the operator multiplies at once, as in int8.cpp."""
ALL_ROWS = 1 << 30
"""More rows than any step has."""
_TRIED_ROWS = (8, 16, 32, 64, 128)
"""With fewer rows the operator is always used: they wait for the weight only, and are too short to compare."""
TRIED_BYTES = 128 << 20
"""Weights up to about so many bytes are timed: more than caches hold, and not all of a large model."""
_WIDENED_NUMBERS = 1 << 20
"""Numbers of a weight that are widened at once: 4 MiB, which most processors' caches hold."""
_ROUNDS = 3
"""The quickest of them counts, because a busy neighbour makes each slower by chance."""
_FASTER = 1.3
"""PyTorch's product has to be faster by this factor. Some difference is noise, and PyTorch rounds a row by the batch's
size, so that answers of several requests, and with a draft, would differ by start."""

SLOWER = "PyTorch's operators run, and answers take about 3 to 5 times as long"

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_settings: dict[str, Any] = {}
"""Arguments of the operators `set_*`, for every dtype that is loaded, or will be."""
_loaded: list[torch.dtype] = []


def operator_for(dtype: torch.dtype) -> Multiply | None:
    """Return the operator of (x [T, in], weight [out, in], bias [out] or None), or None without one for the dtype.
    A dtype is compiled when it is first asked for."""
    return compiled(dtype) if dtype in DTYPES else None


def why_not_bfloat16() -> str:
    """Return why bfloat16 would be slower here than float32, or "".

    PyTorch's products in bfloat16 take 1.1 to 4 times float32's time unless the processor multiplies such numbers, and
    this package's read half the bytes of float32's. ARM's instructions were not measured.
    """
    if not {b"avx2", b"avx512f"} & set(processor().split()):
        return "bfloat16 was not measured on processors without AVX2"
    return "" if operator_for(torch.bfloat16) else "without g++ PyTorch's products in bfloat16 would be slower"


def float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32 [T, out], summed in float32, for x [T, in] and weight [out, in] of one dtype.
    PyTorch's products would round the sums to bfloat16. Without the operator it widens some rows of the
    weight at a time, which stay in the processor's caches."""
    if x.dtype == torch.bfloat16 and compiled(x.dtype) and weight.is_contiguous():
        result: Tensor = operators(x.dtype).linear_float32(x.contiguous(), weight)
        return result
    wide = x.float()
    parts = weight.split(max(1, _WIDENED_NUMBERS // weight.shape[1]))
    return torch.cat([F.linear(wide, part.float()) for part in parts], dim=1)


def set_up(**settings: Any) -> None:
    """Set `threads`, which are not PyTorch's, `most_rows` of a product, and the tensor of the `heartbeat`."""
    _settings.update(settings)
    for dtype in _loaded:
        _apply(dtype, settings)


def _apply(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        getattr(operators(dtype), f"set_{name}")(value)


@cache
def why_not_compiled(dtype: torch.dtype) -> str:
    """Return why this package's operators of a dtype are not here, with what to do, or "". The first call compiles
    them."""
    try:
        load_operators(dtype)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{SLOWER}, because {error}"
    return ""


@cache
def compiled(dtype: torch.dtype) -> Multiply | None:
    """Return the operator of linear.cpp, or None where it cannot be compiled."""
    if reason := why_not_compiled(dtype):
        _warn(reason)
        return None
    _loaded.append(dtype)
    _apply(dtype, _settings)
    operator: Multiply = operators(dtype).linear.default
    return operator


@cache
def _warn(reason: str) -> None:
    """Say it once, not for each dtype."""
    logger.warning("%s", reason)


def tune(weights: Sequence[Tensor]) -> int:
    """Return the rows up to which the operator multiplies by the weights as fast as PyTorch, ALL_ROWS if it does for
    all that are tried, or without weights. Each is read after all others, so they come from memory, as in a step."""
    most = _TRIED_ROWS[0] - 1
    set_up(most_rows=ALL_ROWS)
    for rows in _TRIED_ROWS if weights else ():
        ours, theirs = [], []
        for _ in range(_ROUNDS):
            ours.append(_seconds(rows, weights, lambda x, weight: operators(weight.dtype).linear(x, weight, None)))
            theirs.append(_seconds(rows, weights, F.linear))
        if min(ours) > _FASTER * min(theirs):
            return most
        most = rows
    return ALL_ROWS


@torch.inference_mode()
def _seconds(rows: int, weights: Sequence[Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the time of a product of `rows` rows with each of the weights."""
    inputs = {(weight.shape[1], weight.dtype): weight.new_ones(rows, weight.shape[1]) for weight in weights}
    start = time.perf_counter()
    for weight in weights:
        multiply(inputs[weight.shape[1], weight.dtype], weight)
    return time.perf_counter() - start
