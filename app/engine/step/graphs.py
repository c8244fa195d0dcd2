"""A decode step from graphs: its draft and its target, each captured in a few sizes and padded to the nearest."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import AttentionMetadata, Backend
from app.engine.device.graph import Graph
from app.engine.device.transfer import Packed
from app.engine.errors import UnsupportedError, last_words
from app.engine.sampling.metadata import SamplingMetadata
from app.engine.step import padding
from app.engine.step.forward import AttentionInputs, Forward, TargetTensors
from app.engine.step.graph_sizes import GraphSizes, Size
from app.engine.step.inputs import DraftInputs, TargetInputs

logger = logging.getLogger(__name__)


class _Captured(NamedTuple):
    """A graph with the inputs that it reads."""

    graph: Graph
    packed: Packed
    rows: AttentionInputs


class StepGraphs:
    """All graphs of a runner, captured at construction. `on_graph` is called with (captured, to capture).

    `drafts` [max_num_seqs, b - 1] carries drafts from one graph to the other, or is None without a draft. Narrower
    blocks fill the first columns. `verified` [max_num_seqs + 1, b + 1] is the last verification, where the next step
    begins without `lengths_on_host`. `pages` is the width of page tables. All ranks of `comm` capture the same graphs
    in the same order. `sizes` are those that all of them could capture.
    """

    def __init__(
        self,
        forward: Forward,
        backend: Backend,
        sizes: GraphSizes,
        *,
        block_size: int,
        pages: int,
        scratch_pages: int,
        on_graph: Callable[[int, int], None],
        comm: Comm = ALONE,
    ) -> None:
        self._forward = forward
        self._comm = comm
        self._backend = backend
        self.sizes = sizes
        self._pages = pages
        self._scratch_pages = scratch_pages
        self._hidden = forward.target.embedding.new_empty(sizes.max_rows, forward.target.config.hidden_size)
        self.draft_columns = block_size - 1
        self.drafts = None
        if block_size > 1:
            self.drafts = torch.zeros(sizes.seqs[-1], block_size - 1, dtype=torch.int32, device=backend.device)
        self.verified = torch.zeros(sizes.seqs[-1] + 1, block_size + 1, dtype=torch.int64, device=backend.device)
        self._draft_graphs: dict[Size, _Captured] = {}
        self._target_graphs: dict[Size, tuple[_Captured, TargetTensors]] = {}
        self._row_shift = 0 if forward.drafter is None else forward.drafter.model.config.first_draft_row - 1
        done, total = 0, len(sizes.drafts) + len(sizes.targets)
        # The largest first: the memory that it leaves serves all others.
        for seqs, rows in reversed(sizes.targets):
            self._capture_target(seqs, rows)
            on_graph(done := done + 1, total)
        for blocks, width in reversed(sizes.drafts):
            self._capture_draft(blocks, width)
            on_graph(done := done + 1, total)
        self.sizes = sizes.captured(self._target_graphs, self._draft_graphs)

    @property
    def has_draft(self) -> bool:
        return bool(self._draft_graphs)

    def target_graph(self, seqs: int, rows: int) -> Graph:
        return self._target_graphs[seqs, rows][0].graph

    def draft_graph(self, blocks: int, width: int) -> Graph:
        return self._draft_graphs[blocks, width].graph

    def keep(self, drafts: Tensor) -> Tensor:
        """Store drafts [D, columns] for the target to verify, and return them as [D, b - 1]."""
        assert self.drafts is not None
        kept = self.drafts[: len(drafts)]
        kept[:, : drafts.shape[1]] = drafts
        return kept

    def draft(self, inputs: DraftInputs) -> Tensor:
        """Return drafts [D, b - 1], which stay until the next ones."""
        blocks, width = self.sizes.draft(len(inputs.anchors), inputs.group.query_lens[0] - self._row_shift)
        captured = self._draft_graphs[blocks, width]
        self._send(captured, self._pad_draft(inputs, blocks, width + self._row_shift))
        captured.graph.replay()
        assert self.drafts is not None
        return self.drafts[: len(inputs.anchors)]

    def target(self, inputs: TargetInputs, draws: Sequence[SamplingMetadata] = ()) -> Tensor:
        """Return `engine.verify` of the drafts that were made or kept last, with padding, until the next replay.

        The graph chooses greedily. Rows of `draws` are chosen again from the hidden states, which all graphs write to
        the same place.
        """
        (group,) = inputs.groups
        size = self.sizes.target(len(group.query_lens), len(inputs.token_ids))
        captured, tensors = self._target_graphs[size]
        self._send(captured, self._pad_target(inputs, *size))
        captured.graph.replay()
        choices, verified = captured.graph.outputs
        if not draws:
            return verified
        forward = self._forward
        for kind in draws:
            rows = forward.row_numbers[: len(kind.host_rows)]
            own = replace(kind, host_rows=list(range(len(rows))), rows=rows)
            choices[kind.rows] = forward.sampler.choose(self._hidden[kind.rows], forward.target.lm_head, [own])
        return forward.verify(tensors, choices, self.drafts)

    def _capture(self, run: Callable[[], tuple[Tensor, ...]], meta: AttentionMetadata, what: str) -> Graph | None:
        """Return the graph of `run` after its first replay, or None if a rank cannot capture it.

        A rank that cannot must not go on alone, because the others would wait for its collectives. So the outcome is
        exchanged before the replay. An error of `run` itself ends all ranks: it has left others in their collectives.
        """
        has_run, graph = False, None

        def noting() -> tuple[Tensor, ...]:
            nonlocal has_run
            outputs = run()
            has_run = True
            return outputs

        try:
            graph = self._backend.capture(noting, [meta])
        except Exception as error:
            if self._comm.size == 1 or not has_run:
                raise
            self._backend.annotate(error)
            logger.error("%s: the graph cannot be captured on rank %d: %s", what, self._comm.rank, last_words(error))
        if not self._comm.minimum(graph is not None):
            return None
        assert graph is not None
        graph.replay()
        return graph

    def _leave_out(self, what: str, captured: Collection[Size]) -> None:
        """Let a larger one of the `captured` graphs serve such steps. Raises UnsupportedError if there is none."""
        if not captured:
            raise UnsupportedError(
                f"{what}: this graph, which all ranks need, cannot be captured on all of them; the log of each says "
                "why: give a smaller --max-num-seqs, --kv-cache-memory or --memory-utilization, or --enforce-eager"
            )
        logger.warning("%s: without a graph of its own, such a step is padded to a larger one", what)

    def _capture_draft(self, blocks: int, width: int) -> None:
        rows = width + self._row_shift
        inputs = self._pad_draft(padding.empty_draft(), blocks, rows)
        packed = Packed(self._forward.arrays(inputs), self._backend)
        tensors = self._forward.draft_tensors(inputs, packed)

        def run() -> tuple[Tensor, ...]:
            if not self._backend.lengths_on_host:
                self._advance(tensors.prev_rows, tensors.anchors, self._forward.row_numbers[:blocks], tensors.rows)
            self.keep(self._forward.draft(tensors))
            return ()

        self._forward.plan(tensors.rows, inputs.group)
        what = f"draft of {blocks} blocks of {rows} rows"
        if graph := self._capture(run, tensors.rows.meta, what):
            self._draft_graphs[blocks, width] = _Captured(graph, packed, tensors.rows)
        else:
            self._leave_out(what, self._draft_graphs)

    def _capture_target(self, seqs: int, rows: int) -> None:
        hybrid = self._forward.target.config.gated_delta is not None
        inputs = self._pad_target(padding.empty_target(hybrid=hybrid), seqs, rows)
        packed = Packed(self._forward.arrays(inputs), self._backend)
        tensors = self._forward.target_tensors(inputs, packed)
        (group,) = tensors.groups

        def run() -> tuple[Tensor, ...]:
            if not self._backend.lengths_on_host:
                self._advance(tensors.prev_rows, tensors.token_ids, group.meta.query_start_loc[:seqs], group)
            hidden, choices = self._forward.choose(tensors, self.drafts, ())
            self._hidden[:rows] = hidden
            verified = self._forward.verify(tensors, choices, self.drafts)
            if not self._backend.lengths_on_host:
                self.verified[: seqs + 1] = verified
            return choices, verified

        self._forward.plan(group, inputs.groups[0])
        what = f"target of {seqs} sequences and {rows} rows"
        if graph := self._capture(run, group.meta, what):
            self._target_graphs[seqs, rows] = _Captured(graph, packed, group), tensors
        else:
            self._leave_out(what, self._target_graphs)

    def _advance(self, prev_rows: Tensor, token_ids: Tensor, anchor_rows: Tensor, rows: AttentionInputs) -> None:
        """Move rows to where the step in flight leaves their sequences; see `Backend.advance_by_accepted`."""
        offsets, seq_lens = rows.position_offsets[: len(prev_rows)], rows.meta.seq_lens[: len(prev_rows)]
        self._backend.advance_by_accepted(self.verified, prev_rows, token_ids, anchor_rows, offsets, seq_lens)

    def _send(self, captured: _Captured, inputs: DraftInputs | TargetInputs) -> None:
        captured.packed.send(self._forward.arrays(inputs))
        group = inputs.group if isinstance(inputs, DraftInputs) else inputs.groups[0]
        self._forward.plan(captured.rows, group)

    def _pad_draft(self, inputs: DraftInputs, blocks: int, rows: int) -> DraftInputs:
        return padding.pad_draft(inputs, blocks, rows, self._pages, self._scratch_pages)

    def _pad_target(self, inputs: TargetInputs, seqs: int, rows: int) -> TargetInputs:
        return padding.pad_target(
            inputs,
            seqs,
            rows,
            self._pages,
            self._scratch_pages,
            block_size=self.draft_columns + 1,
            each=self.sizes.padding_rows(seqs, rows),
        )
