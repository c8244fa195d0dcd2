"""Products with weights [out, in] in row order, by this package's operator (linear.cpp) where there are few rows."""

import logging
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cpu.library import load_operators, processor

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS = 32
"""Rows up to which the operator is used for products that were not timed, as in linear.cpp."""
ALL_ROWS = 1 << 30
"""More rows than any step has."""
_TRIED_ROWS = (8, 16, 32, 64, 128)
"""With fewer rows the operator is always used: they wait for the weight only, and are too short to compare."""
_TRIED_NUMBERS = 1 << 20
"""Numbers of a weight that are timed, the first rows of a larger one, because products of 128 rows are slow."""
_WIDENED_NUMBERS = 1 << 20
"""Numbers of a weight that are widened at once: 4 MiB, which most processors' caches hold."""
_ROUNDS = 5
"""The quickest of them counts, because a busy neighbour makes each slower by chance."""
_FASTER = 1.1
"""PyTorch's product has to be faster by this factor, because a difference below it is noise."""

SLOWER = "PyTorch's operators run, and answers take about 3 to 5 times as long"

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def operator_for(dtype: torch.dtype) -> Multiply | None:
    """Return the operator of (x [T, in], weight [out, in], bias [out] or None), or None without one for the dtype."""
    return compiled() if dtype in DTYPES else None


def why_not_bfloat16() -> str:
    """Return why bfloat16 would be slower here than float32, or "".

    Products of prompts are PyTorch's. In bfloat16 they take a fifth of float32's time where the processor multiplies
    such numbers, and elsewhere 1.1 to 4 times it. ARM's instructions were not measured.
    """
    if b"avx512_bf16" not in processor():
        return "this processor has no avx512_bf16, so prompts would be slower"
    return "" if operator_for(torch.bfloat16) else "without g++ products of few rows would be slower"


def float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32 [T, out], summed in float32, for x [T, in] and weight [out, in] of one dtype.
    PyTorch's products would round the sums to bfloat16. Without the operator it widens some rows of the
    weight at a time, which stay in the processor's caches."""
    if x.dtype == torch.bfloat16 and compiled() and weight.is_contiguous():
        result: Tensor = torch.ops.dflash_server.linear_float32(x.contiguous(), weight)
        return result
    wide = x.float()
    parts = weight.split(max(1, _WIDENED_NUMBERS // weight.shape[1]))
    return torch.cat([F.linear(wide, part.float()) for part in parts], dim=1)


def set_threads(threads: int) -> None:
    """Set the operators' number of threads, which is separate from PyTorch's."""
    if compiled():
        torch.ops.dflash_server.set_threads(threads)


@cache
def why_not_compiled() -> str:
    """Return why this package's operators are not here, with what to do, or "". They are compiled at the first call."""
    try:
        load_operators(*map(Path(__file__).with_name, ("linear.cpp", "attention.cpp", "rotate.cpp", "decoder.cpp")))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{SLOWER}, because {error}"
    return ""


@cache
def compiled() -> Multiply | None:
    """Return the operator of linear.cpp, or None where it cannot be compiled."""
    if reason := why_not_compiled():
        logger.warning("%s", reason)
        return None
    operator: Multiply = torch.ops.dflash_server.linear.default
    return operator


def tune(weights: Iterable[tuple[torch.Size, torch.dtype]]) -> int:
    """Return the rows up to which the operator multiplies by all of the weights as fast as PyTorch, ALL_ROWS if it
    does for all that are tried."""
    most, limit = _TRIED_ROWS[0] - 1, torch.ops.dflash_server.set_most_rows
    limit(ALL_ROWS)
    for rows in _TRIED_ROWS:
        times = [
            _times(*shape, dtype, rows, torch.get_num_threads()) for shape, dtype in weights if operator_for(dtype)
        ]
        if sum(ours for ours, _ in times) > _FASTER * sum(theirs for _, theirs in times):
            return most
        most = rows
    return ALL_ROWS


@cache
@torch.inference_mode()
def _times(out: int, size: int, dtype: torch.dtype, rows: int, threads: int) -> tuple[float, float]:
    """Return the seconds of a product of `rows` rows by the operator, and by PyTorch."""
    multiply, out = operator_for(dtype), max(1, min(out, _TRIED_NUMBERS // size))
    assert multiply
    weight, x = torch.ones(out, size, dtype=dtype), torch.ones(rows, size, dtype=dtype)
    ours: list[float] = []
    theirs: list[float] = []
    while len(ours) < _ROUNDS:
        start = time.perf_counter()
        multiply(x, weight, None)
        middle = time.perf_counter()
        F.linear(x, weight)
        theirs.append(time.perf_counter() - middle)
        ours.append(middle - start)
    return min(ours), min(theirs)
