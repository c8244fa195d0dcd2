"""Products of few rows on a CPU, in GB/s of their weights, by turns beside a plain read of the same memory.

Weights have the shapes of Qwen3-0.6B. There are as many of each as the caches do not hold.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.config.error import ConfigError
from app.engine.cpu import linear
from tools.bench.command import out_folder
from tools.bench.flags import add_out_flag, count
from tools.bench.markdown import Row, Table
from tools.lab.beside_read import OWN, PYTORCH, READ, rate, ratios, timed
from tools.lab.publish import publish
from tools.parts import ToolParser

WEIGHTS = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "lm_head": (151936, 1024),
}
"""[out, in] by name."""
BYTES = 96 << 20
"""Bytes of weights that a round reads. They are three times the caches of most processors with few cores."""
MEANING = (
    "GB/s of weights, medians of rounds by turns. `read` sums the same bytes up. `own` is app/engine/cpu's operator, "
    "and `PyTorch` its product of the same memory. Ratios are medians of paired rounds. lm_head ends with an argmax. "
    "One thread is timed in seconds of its processor, so other processes take no time but caches and memory."
)


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    multiply = linear.own(torch.float32)
    if multiply is None:
        raise ConfigError("the CPU's own products cannot be made here", "install g++")
    rows = [
        measured(multiply, name, weights, num_rows, options.rounds)
        for dtype in options.dtypes
        for name in options.weights
        for weights in [drawn(*WEIGHTS[name], getattr(torch, dtype))]
        for num_rows in options.rows
    ]
    return publish("linear", arguments, [Table("linear", "Products of few rows", MEANING, rows)], folder)


def drawn(out: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return BYTES of weights of one shape."""
    count = -(-BYTES // (out * size * dtype.itemsize))
    return [torch.randn(1, size).to(dtype).repeat(out, 1) for _ in range(count)]


@torch.inference_mode()
def measured(multiply: linear.Multiply, name: str, weights: list[Tensor], rows: int, rounds: int) -> Row:
    """Return the rates of one weight and number of rows."""
    (out, size), dtype, num_bytes = weights[0].shape, weights[0].dtype, weights[0].nbytes
    x, read = torch.randn(rows, size).to(dtype), [weight.view(torch.float32) for weight in weights]
    torch.ops.dflash_server.set_most_rows(out, size, dtype == torch.float32, rows)

    def ended(logits: Tensor) -> None:
        if name == "lm_head":
            logits.max(dim=-1)

    ways: dict[str, Callable[[int], object]] = {
        READ: lambda i: read[i].sum(),
        OWN: lambda i: ended(multiply(x, weights[i], None)),
        PYTORCH: lambda i: ended(torch.mm(x, weights[i].t())),
    }
    times = timed(ways, len(weights), rounds)
    return {
        "weight": f"{name} {out} x {size}",
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        **{way: rate(num_bytes, taken) for way, taken in times.items()},
        **ratios(times),
    }


def parser() -> argparse.ArgumentParser:
    made = ToolParser(prog="python -m tools.lab linear", description=__doc__)
    made.add_argument("--rounds", type=count, default=9, metavar="N", help="[default: 9]")
    made.add_argument("--rows", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    made.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=list(WEIGHTS))
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    made.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    add_out_flag(made, "linear.json")
    return made
