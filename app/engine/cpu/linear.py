"""Products with weights [out, in] in row order, by an operator of our own where there are few rows (linear.cpp)."""

import logging
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.cpu.library import load_operators, processor

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS, ALL_ROWS = 32, 1 << 30
"""Rows up to which a product runs here that was not timed, as in linear.cpp, and more than any step has."""
_TRIED_ROWS = (4, 16, 32, 64, 128)
"""Fewer rows are the operator's: they wait only for the weight, and their times are too short to compare."""
_TRIED_NUMBERS = 1 << 20
"""Numbers of a weight that is timed. Of a larger one the first rows are, because 128 rows are slow to compute."""
_WIDENED_NUMBERS = 1 << 20
"""Numbers of a weight that are widened at once: 4 MiB, which most processors' caches hold."""
_ROUNDS = 5
"""The quickest of them counts, because a busy neighbour makes each slower by chance."""
_FASTER = 1.1
"""PyTorch's product has to be faster by this factor, because a difference below it is noise."""

_RESULTS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    "linear_float32": lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
    "attention": lambda q_thd, *_: q_thd.new_empty(q_thd.shape),
    "rotate_into": lambda qkv, q_norm, k_norm, eps, turns, k, *_: qkv.new_empty(qkv[:, 2 * k.shape[-2] :].shape),
}
"""Results of the operators by shape and dtype, for code that is traced."""

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def own(dtype: torch.dtype) -> Multiply | None:
    """Return the operator (x [T, in], weight [out, in], bias [out] or None), or None if a dtype has none here."""
    return _operator() if dtype in DTYPES else None


def why_not_bfloat16() -> str:
    """Return why bfloat16 would be slower here than float32, or "".

    Products of prompts are PyTorch's. In bfloat16 they take a fifth of float32's time where the processor multiplies
    such numbers, and elsewhere 1.1 to 4 times it. ARM's instructions were not measured.
    """
    if b"avx512_bf16" not in processor():
        return "this processor has no avx512_bf16, so prompts would be slower"
    return "" if own(torch.bfloat16) else "without g++ products of few rows would be slower"


def float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32 [T, out], summed in float32, for x [T, in] and weight [out, in] of one dtype.

    PyTorch's products would round the sums to bfloat16. Without the operator it multiplies copies of some rows of the
    weight at a time, which stay in the processor's caches.
    """
    if x.dtype == torch.bfloat16 and _operator() and weight.is_contiguous():
        result: Tensor = torch.ops.dflash_server.linear_float32(x.contiguous(), weight)
        return result
    wide = x.float()
    parts = weight.split(max(1, _WIDENED_NUMBERS // weight.shape[1]))
    return torch.cat([F.linear(wide, part.float()) for part in parts], dim=1)


def set_threads(threads: int) -> None:
    """Set the operators' number of threads, whatever PyTorch has."""
    if _operator():
        torch.ops.dflash_server.set_threads(threads)


@cache
def _operator() -> Multiply | None:
    try:
        load_operators(*map(Path(__file__).with_name, ("linear.cpp", "attention.cpp", "rotate.cpp")))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("products of few rows: PyTorch's own, because %s", error)
        return None
    for name, result in _RESULTS.items():
        torch.library.register_fake(f"dflash_server::{name}", result)
    operator: Multiply = torch.ops.dflash_server.linear.default
    return operator


def tune(weights: Iterable[tuple[torch.Size, torch.dtype]]) -> dict[str, int]:
    """Leave products to PyTorch from those rows on where it is faster. Return the most rows of the operator by weight.

    The largest come first, because a part of one may have the shape of a smaller weight, whose limit must stay.
    """
    found = {}
    for (out, size), dtype in sorted(weights, key=lambda weight: weight[0], reverse=True):
        if multiply := own(dtype):
            name = f"linear {out} x {size}, {str(dtype).removeprefix('torch.')}"
            found[name] = _most_rows(multiply, out, size, dtype, torch.get_num_threads())
    return found


@cache
@torch.inference_mode()
def _most_rows(multiply: Multiply, out: int, size: int, dtype: torch.dtype, threads: int) -> int:
    """Return, and set, the rows up to which the operator is as fast as PyTorch's, ALL_ROWS if at all _TRIED_ROWS."""
    tried = max(1, min(out, _TRIED_NUMBERS // size))
    limit = partial(torch.ops.dflash_server.set_most_rows, is_float32=dtype == torch.float32)
    limit(tried, size, rows=_TRIED_ROWS[-1])
    weight, most = torch.ones(tried, size, dtype=dtype), _TRIED_ROWS[0] - 1
    for rows in _TRIED_ROWS:
        x = torch.ones(rows, size, dtype=dtype)
        ours: list[float] = []
        theirs: list[float] = []
        while len(ours) < _ROUNDS and not (ours and ours[0] < 0.5 * theirs[0]):
            start = time.perf_counter()
            multiply(x, weight, None)
            middle = time.perf_counter()
            F.linear(x, weight)
            theirs.append(time.perf_counter() - middle)
            ours.append(middle - start)
        if min(ours) > _FASTER * min(theirs):
            break
        most = rows
    if most == _TRIED_ROWS[-1]:
        most = ALL_ROWS
    limit(out, size, rows=most)
    return most
