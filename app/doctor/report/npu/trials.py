"""Calls that the backend does not make, for `dflash-server npu-report` to see what an Ascend device does with them.

Checked against torch_npu's schemas, meta kernels and host checks on CPU; not run on an Ascend device.
"""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch_npu
from torch import Tensor

from app.doctor import npu_host as host_check
from app.engine.backend.base import AttentionMetadata, LayerKv
from app.engine.npu.graph import AttentionPlan


def chip(device: int) -> str:
    """What it calls itself."""
    return str(torch_npu.npu.get_device_name(device))


def combination(device: int) -> dict[str, str]:
    """The versions that work together here, or do not."""
    toolkit, driver = host_check.cann_version(os.environ), host_check.driver_version(Path("/"))
    return {
        "chip": chip(device),
        "torch": importlib.metadata.version("torch"),
        "torch_npu": importlib.metadata.version("torch_npu"),
        "CANN": toolkit or "unknown",
        "driver": driver or "unknown",
        "Python": platform.python_version(),
        "machine": platform.machine(),
    }


def write_pages(k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
    """The operator that writes K and V into pages, whatever the backend chose to write with."""
    torch_npu.npu_scatter_pa_kv_cache(k_thd, v_thd, kv.k, kv.v, slot_mapping, cache_mode="Norm")


def attention_of_heads(q_thd: Tensor, kv: LayerKv, meta: AttentionMetadata) -> Tensor:
    """The backend's attention with K and V as [pages, kv_heads, page_size, D], which is said to be the faster order."""
    plan: AttentionPlan = meta.plan
    o, _ = torch_npu.npu_fused_infer_attention_score(
        q_thd,
        kv.k,
        kv.v,
        atten_mask=plan.mask,
        actual_seq_lengths=plan.q_ends,
        actual_seq_lengths_kv=plan.host_seq_lens,
        block_table=meta.page_table,
        num_heads=q_thd.shape[1],
        num_key_value_heads=kv.k.shape[1],
        scale=q_thd.shape[2] ** -0.5,
        input_layout="TND",
        sparse_mode=plan.sparse_mode,
        block_size=meta.page_size,
    )
    return o


@dataclass(frozen=True, slots=True)
class Replay:
    """Seconds of the host to launch a graph and to give its attention calls their lengths, and until all is done."""

    launch: float
    update: float
    done: float


class Captured:
    """`calls` attention calls in one graph, with nothing else in it."""

    def __init__(self, attend: Callable[[], Tensor], plan: AttentionPlan, calls: int) -> None:
        attend()
        self._graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(self._graph, auto_dispatch_capture=True):
            for _ in range(calls):
                attend()
        self._entries = [
            {"actual_seq_lengths": plan.q_ends, "actual_seq_lengths_kv": plan.host_seq_lens} for _ in range(calls)
        ]

    def replay(self) -> Replay:
        started = time.perf_counter()
        self._graph.replay()
        launched = time.perf_counter()
        self._graph.update(self._entries)
        updated = time.perf_counter()
        torch_npu.npu.synchronize()
        return Replay(launched - started, updated - launched, time.perf_counter() - started)
