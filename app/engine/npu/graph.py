"""Graph on an NPU. Attention takes its lengths from the host, so each replay updates them, call by call."""

from collections.abc import Callable
from dataclasses import dataclass

import torch_npu
from torch import Tensor

from app.engine.device.base import AttentionMask, AttentionMetadata, Graph
from app.engine.npu.rules import EVERY_TOKEN


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Arguments of the attention operator for an AttentionMetadata and a mask.

    Query lengths are cumulative, and KV lengths are of each sequence, both on the host (N1 to N3). Causal rows have the
    mask and sparse_mode 3. Bidirectional rows have no mask and sparse_mode 0. Rows with a window have the mask and
    sparse_mode 4, and see `pre_tokens` tokens before themselves and `next_tokens` after (N10).
    """

    q_ends: list[int]
    host_seq_lens: list[int]
    mask: Tensor | None
    sparse_mode: int
    pre_tokens: int = EVERY_TOKEN
    next_tokens: int = EVERY_TOKEN

    def lengths(self, *, sinks: bool) -> dict[str, list[int]]:
        """Return both lengths by the operator's argument names, which differ in the version with sinks (N38)."""
        names = ("actual_seq_qlen", "actual_seq_kvlen") if sinks else ("actual_seq_lengths", "actual_seq_lengths_kv")
        return dict(zip(names, (self.q_ends, self.host_seq_lens), strict=True))


Attended = tuple[AttentionMetadata, AttentionMask, bool]
"""Attention call of a graph: metadata, mask, and whether it has sinks. A replay takes the plan `meta.plans[mask]`."""


class NpuGraph(Graph):
    """Capture of `run`.

    During the capture the backend appends each attention call to `attended`, so a replay updates it from the plan of
    its mask, in any layer of any model (N22). The mask and its window are fixed by the capture.
    """

    def __init__(
        self, run: Callable[[], tuple[Tensor, ...]], attended: list[Attended], pool: tuple[int, int] | None
    ) -> None:
        self._graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(self._graph, pool=pool, auto_dispatch_capture=True):
            self.outputs = run()
        recorded = len(self._graph.graph_dispatch_mode.graph_dispatch_records)
        if recorded != len(attended):  # torch_npu would give a single entry to all calls
            raise RuntimeError(f"N22: {len(attended)} attention calls are updated, and {recorded} were recorded")
        self._attended = attended

    @property
    def pool(self) -> tuple[int, int]:
        """Memory of the graph. Graphs that are never replayed at once may share it."""
        pool: tuple[int, int] = self._graph.pool()
        return pool

    def replay(self) -> None:
        """Launch, then update the lengths of every attention call. The device begins before the first call (N27)."""
        self._graph.replay()
        self._graph.update([meta.plans[mask].lengths(sinks=sinks) for meta, mask, sinks in self._attended])
