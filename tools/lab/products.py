"""The CPU's own products beside what the machine reads and multiplies: `python -m tools.lab products`.

Weights of SmolLM2-135M's layers, which come from memory one after the other as in a step, are multiplied by this
package's operator and by PyTorch, interleaved.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from app.config.error import ConfigError
from app.engine.cpu import linear
from tools.bench.flags import count
from tools.bench.markdown import Row, Table
from tools.lab.publish import part_parser, publish

MEANING = (
    "Medians. `of reading` is the rate at which weights are read, of the rate at which PyTorch adds up 200 MB. `of "
    "multiplying` is the rate of multiplications and additions, of PyTorch's square product of 1,024 in float32."
)
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""[out, in] of the products of a layer."""
_LAYERS = 30
_ROWS = (1, 4, 16, 128, 512)
_SQUARE = 1024
_READ_BYTES = 200_000_000


def median_seconds(rounds: int, *ways: Callable[[], object]) -> list[float]:
    """Return the median time of each way, of interleaved rounds after one that does not count."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 1):
        for way, own in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            own.append(time.perf_counter() - start)
    return [sorted(own[1:])[rounds // 2] for own in times]


def multiply(operator: Callable[..., Tensor], rows: int, weights: Sequence[Tensor]) -> None:
    inputs = {size: weights[0].new_ones(rows, size) for _, size in SHAPES}
    for weight in weights:
        operator(inputs[weight.shape[1]], weight, None)


def limits(rounds: int) -> tuple[float, float]:
    """Return the bytes and the multiplications and additions of a second."""
    square = torch.ones(_SQUARE, _SQUARE)
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    reading, multiplying = median_seconds(rounds, numbers.sum, lambda: torch.mm(square, square))
    return numbers.nbytes / reading, 2 * _SQUARE**3 / multiplying


def row(
    weights: Sequence[Tensor], rows: int, seconds: Sequence[float], bytes_read: float, multiplications: float
) -> Row:
    """Return a row of the table from the seconds of the operator and of PyTorch, and the machine's rates."""
    ours, theirs = seconds
    read, done = (sum(weight.nbytes for weight in weights) / ours, 2 * rows * sum(map(Tensor.numel, weights)) / ours)
    return {
        "dtype": str(weights[0].dtype).removeprefix("torch."),
        "rows": rows,
        "ms": f"{ours * 1e3:.2f}",
        "GB/s": f"{read / 1e9:.1f}",
        "of reading": f"{read / bytes_read:.2f}",
        "GFLOP/s": f"{done / 1e9:.0f}",
        "of multiplying": f"{done / multiplications:.2f}",
        "PyTorch's time": f"{theirs / ours:.2f}",
    }


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[Row]:
    found = []
    for dtype in linear.DTYPES:
        operator = linear.operator_for(dtype)
        if not operator:
            raise ConfigError("this package's operators are not compiled", linear.why_not_compiled(dtype))
        linear.set_up(threads=options.threads, most_rows=linear.ALL_ROWS)
        weights = [torch.ones(shape, dtype=dtype) for _ in range(_LAYERS) for shape in SHAPES]
        for rows in _ROWS:
            rates = limits(options.rounds)
            ways = [partial(multiply, own, rows, weights) for own in (operator, F.linear)]
            found.append(row(weights, rows, median_seconds(options.rounds, *ways), *rates))
    return found


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    torch.set_num_threads(options.threads)
    return publish("products", arguments, [Table("products", "Products", MEANING, measure(options))], options.out)


def parser() -> argparse.ArgumentParser:
    made = part_parser("products", __doc__)
    made.add_argument("--rounds", type=count, default=7, metavar="N", help="[default: 7]")
    made.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    return made
