"""Double of a device on which a step is launched before the last one is read, for any laptop.

It is PyTorch on the CPU. But attention of decode steps reads lengths and page tables from its tensors when it runs,
like kernels on a GPU, and ignores the host's. Its graphs share one memory: what a graph leaves when it is captured
takes memory that was free until then, so a replay destroys the outputs of all graphs that were captured later.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.device.base import AttentionMask, AttentionMetadata, Graph, LayerKv
from app.engine.device.torch import RerunGraph, TorchBackend
from app.engine.load import engine as build

TILE_ROWS = 16
"""More rows than these a sequence, on average, are a prompt's: those go by the host's lengths, which are exact."""
JUNK = -12345


class DeviceLengthsBackend(TorchBackend):
    defaults = replace(TorchBackend.defaults, is_slow=False)
    lengths_on_host = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._graphs: list[Graph] = []

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> object:
        of_prompts = sum(meta.query_lens) > TILE_ROWS * len(meta.query_lens)
        return super().plan_attention(meta, mask, group) if of_prompts else None

    def attention(
        self, q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        if meta.plans[mask] is not None:
            return super().attention(q_thd, kv, meta, mask, sinks)
        rows = torch.arange(len(q_thd), dtype=torch.int32)
        seq_ids = torch.searchsorted(meta.query_start_loc, rows, right=True) - 1
        seq_lens = meta.seq_lens[seq_ids]
        own = (seq_lens - (meta.query_start_loc[seq_ids + 1] - rows))[:, None]
        token = torch.arange(meta.page_table.shape[1] * meta.page_size)
        visible = token <= own if mask.causal else token < seq_lens[:, None]
        if mask.window is not None:
            visible &= (token - own).abs() < mask.window
        group = q_thd.shape[1] // kv.k.shape[2]
        # Slots past a sequence's tokens may hold anything, and are not even loaded.
        inside = (token < meta.seq_lens[:, None])[..., None, None]
        k, v = (torch.where(inside, pool[meta.page_table].flatten(1, 2), 0.0) for pool in (kv.k, kv.v))
        k, v = (x[seq_ids].transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
        o = F.scaled_dot_product_attention(q_thd[:, :, None], k, v, attn_mask=visible[:, None, None])
        return o[:, :, 0]

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        graph = SharedMemoryGraph(run, self._graphs)
        self._graphs.append(graph)
        return graph


class SharedMemoryGraph(RerunGraph):
    def __init__(self, run: Callable[[], tuple[Tensor, ...]], others: list[Graph]) -> None:
        super().__init__(run)
        self._others = others

    def replay(self) -> None:
        for graph in self._others[self._others.index(self) + 1 :]:
            for output in graph.outputs:
                output.fill_(JUNK)
        super().replay()


@contextmanager
def device_lengths() -> Iterator[None]:
    """Put engines that are built in this context on such a device."""
    with patch.object(build, "make_backend", lambda *_, **__: DeviceLengthsBackend()):
        yield
