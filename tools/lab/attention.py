"""A CPU's attention of decode steps, in GB/s of K and V, by turns beside a plain read of them and PyTorch's attention.

Pages are shuffled, and there are as many layers as the caches do not hold.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch

from app.config.error import ConfigError
from app.engine.cpu import attention
from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv
from app.engine.device.torch import TorchBackend
from tools.bench.command import out_folder
from tools.bench.flags import add_out_flag, count, counts
from tools.bench.markdown import Row, Table
from tools.lab.beside_read import OWN, PYTORCH, READ, rate, ratios, timed
from tools.lab.publish import publish
from tools.parts import ToolParser

PAGE = 16
BYTES = 96 << 20
"""Bytes of K and V that a round reads, three times the caches of most processors with few cores."""
MEANING = (
    "Microseconds of a layer, and GB/s of its K and V, medians of rounds by turns. `read` sums the same bytes up. "
    "`PyTorch` gathers pages for its own attention. Ratios are medians of paired rounds. One thread is timed in "
    "seconds of its processor, so other processes take no time but caches and memory."
)


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    if not attention.is_own(torch.float32):
        raise ConfigError("the CPU's own attention cannot be made here", "install g++")
    rows = [
        measured(options, batch, context, queries, getattr(torch, dtype))
        for dtype in options.dtypes
        for queries in options.rows
        for batch in options.batches
        for context in options.contexts
    ]
    return publish("attention", arguments, [Table("attention", "Attention of a CPU", MEANING, rows)], folder)


@torch.inference_mode()
def measured(options: argparse.Namespace, batch: int, context: int, queries: int, dtype: torch.dtype) -> Row:
    """Return the rates of a batch whose sequences have `queries` rows each."""
    heads, kv_heads, dim = options.heads
    pages = -(-context // PAGE)
    page_shape = (batch * pages, PAGE, kv_heads, dim)
    layers = -(-BYTES // (2 * batch * pages * PAGE * kv_heads * dim * dtype.itemsize))
    drawn = torch.randn(layers, 2, 1, 1, 1, dim).to(dtype).repeat(1, 1, *page_shape[:3], 1)
    kv = [LayerKv(*layer) for layer in drawn]
    q = torch.randn(batch * queries, heads, dim).to(dtype)
    starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32)
    lengths, table = torch.full((batch,), context, dtype=torch.int32), torch.randperm(batch * pages).int()
    lists = [queries] * batch, [context] * batch
    meta, mask = AttentionMetadata(starts, lengths, table.view(batch, pages), *lists, PAGE), AttentionMask(causal=True)
    by_pytorch = CpuBackend(torch.device("cpu"))
    meta.plans[mask] = TorchBackend.plan_attention(by_pytorch, meta, mask, heads // kv_heads)
    ways: dict[str, Callable[[int], object]] = {
        READ: lambda i: (kv[i].k.view(torch.float32).sum(), kv[i].v.view(torch.float32).sum()),
        OWN: lambda i: attention.attention(q, kv[i], meta, mask, None),
        PYTORCH: lambda i: TorchBackend.attention(by_pytorch, q, kv[i], meta, mask),
    }
    times, num_bytes = timed(ways, layers, options.rounds), kv[0].k.nbytes + kv[0].v.nbytes
    return {
        "sequences": f"{batch} x {context}",
        "rows": queries,
        "dtype": str(dtype).removeprefix("torch."),
        **{f"{way} us": f"{1e6 * median(taken):.0f}" for way, taken in times.items()},
        **{f"{way} GB/s": rate(num_bytes, times[way]) for way in (READ, OWN)},
        **ratios(times),
    }


def parser() -> argparse.ArgumentParser:
    made = ToolParser(prog="python -m tools.lab attention", description=__doc__)
    made.add_argument("--rounds", type=count, default=9, metavar="N", help="[default: 9]")
    made.add_argument("--rows", type=counts, default=[1, 16], metavar="N,N", help="of a sequence [default: 1,16]")
    made.add_argument("--batches", type=counts, default=[1, 16], metavar="N,N", help="[default: 1,16]")
    made.add_argument("--contexts", type=counts, default=[256, 4096], metavar="N,N", help="[default: 256,4096]")
    about = "query heads, KV heads and their size [default: Qwen3-0.6B's]"
    made.add_argument("--heads", type=count, nargs=3, default=[16, 8, 128], metavar="N", help=about)
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    made.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    add_out_flag(made, "attention.json")
    return made
