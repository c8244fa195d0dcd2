"""Graph on an NPU. Attention takes its lengths from the host, so each replay updates them, call by call."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch_npu
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from app.engine.device.base import AttentionMask, AttentionMetadata, Graph
from app.engine.errors import UnsupportedError
from app.engine.npu.attention import AttentionPlan, Lengths


class Attended(NamedTuple):
    """An attention call of a graph. A replay takes its lengths from the plan `meta.plans[mask]`."""

    meta: AttentionMetadata
    mask: AttentionMask
    sinks: bool

    def lengths(self) -> Lengths:
        plan: AttentionPlan = self.meta.plans[self.mask]
        return plan.lengths(sinks=self.sinks)


class NpuGraph(Graph):
    """Capture of `run`.

    During the capture the backend appends each attention call to `attended`, so a replay updates it from the plan of
    its mask, in any layer of any model (N22). The mask and its window are fixed by the capture.
    """

    def __init__(
        self, run: Callable[[], tuple[Tensor, ...]], attended: list[Attended], pool: tuple[int, int] | None
    ) -> None:
        self._graph = torch_npu.npu.NPUGraph()
        mode, refusal = self._graph.graph_dispatch_mode, None
        try:
            with (
                torch_npu.npu.stream(torch_npu.npu.current_stream()),
                torch_npu.npu.graph(self._graph, pool=pool, auto_dispatch_capture=True),
            ):
                try:
                    self.outputs = run()
                except Exception as error:
                    refusal = error
                    raise
        except Exception as error:
            # torch_npu ends the capture first. If that fails too, it stays in its mode and on its stream, and its error
            # hides the one of `run`.
            if (current := _get_current_dispatch_mode()) and current is mode:
                current.__exit__(None, None, None)
            refusal = refusal or error
        if refusal:
            raise refusal
        self._records, self._updates = mode.graph_dispatch_records, mode.update_stream
        if len(self._records) != len(attended):
            calls = f"{len(attended)} attention calls are updated, and {len(self._records)} were recorded"
            raise RuntimeError(f"N22: {calls}")
        # Layers of one mask share their lengths. A meta is known by its identity, because == would compare tensors.
        kinds = {(id(call.meta), call.mask, call.sinks): call for call in attended}
        self._kinds, numbers = list(kinds.values()), {key: i for i, key in enumerate(kinds)}
        self._kind_of_call = [numbers[id(call.meta), call.mask, call.sinks] for call in attended]
        self._last: Sequence[Lengths] = [kind.lengths() for kind in self._kinds]
        """Of the update before, at first of the capture."""

    @property
    def pool(self) -> tuple[int, int]:
        """Memory of the graph. Graphs that are never replayed at once may share it."""
        pool: tuple[int, int] = self._graph.pool()
        return pool

    def replay(self) -> None:
        """Launch, then update the lengths of every attention call. The device begins before the first call (N27)."""
        lengths = [kind.lengths() for kind in self._kinds]
        self._let_updates_wait()
        self._graph.replay()
        self._update(lengths)

    def try_replay(self) -> None:
        """Update before the launch, because a graph waits without end for a call whose update was refused (N27).

        After a refusal the graph runs with the last lengths, which takes the events that updates have recorded. Left
        there, they would let the next replay begin before its updates. Raises UnsupportedError if that is refused too.
        """
        lengths = [kind.lengths() for kind in self._kinds]
        self._let_updates_wait()
        try:
            self._update(lengths)
        except RuntimeError as refusal:
            try:
                self._update(self._last)
                self._graph.replay()
            except RuntimeError as error:
                why = "a graph refused a prompt's lengths, and then its own"
                raise UnsupportedError(f"{why}: give --prompts-in-graphs off ({error})") from refusal
            raise
        self._graph.replay()

    def _let_updates_wait(self) -> None:
        """Let updates wait for the work queued so far, which may be a replay that has not read its lengths.

        Never after this graph's launch: it waits for the updates.
        """
        if self._kinds:
            self._updates.wait_stream(torch_npu.npu.current_stream())

    def _update(self, lengths: Sequence[Lengths]) -> None:
        """Repeat each recorded call with the lengths of its kind, in one pass.

        The calls keep their other arguments, which are prepared at capture. `NPUGraph.update` does the same more
        slowly: it looks up a handler for each call, and copies each list of lengths.
        """
        updates, begin, end = self._updates, torch_npu.npu.graph_task_update_begin, torch_npu.npu.graph_task_update_end
        with torch_npu.npu.stream(updates):
            for record, kind in zip(self._records, self._kind_of_call, strict=True):
                record.kwargs.update(lengths[kind])
                begin(updates, record.handle)
                try:
                    record.op_cache_entry(*record.args, **record.kwargs)
                finally:
                    end(updates)
                record.event.record(updates)
        self._last = lengths
