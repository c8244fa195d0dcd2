"""A decode step from graphs: its draft and its target, each captured in a few sizes and padded to the nearest."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.engine.arrays import Ints, arrays
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Graph
from app.engine.errors import UnsupportedError, last_words
from app.engine.sampling.sampler import Draws
from app.engine.schedule.batch import Batch
from app.engine.step.forward import DraftTensors, Forward, OnDevice, TargetTensors
from app.engine.step.graph_sizes import GraphSizes, Size
from app.engine.step.inputs import DraftInputs, Layout, TargetInputs

logger = logging.getLogger(__name__)


class StepGraphs:
    """All graphs of a runner, captured at construction. `on_graph` is called with (captured, to capture).

    `drafts` [max_num_seqs, b - 1] carries drafts from one graph to the other, or is None without a draft. Narrower
    blocks fill the first columns. `verified` [max_num_seqs + 1, b + 1] is the last verification, where the next step
    begins without `lengths_on_host`. `pages` is the width of page tables. All ranks of `comm` capture the same graphs
    in the same order. `layout` pads steps to those of `sizes` that all ranks could capture.
    """

    def __init__(
        self,
        forward: Forward,
        layout: Layout,
        sizes: GraphSizes,
        *,
        pages: int,
        on_graph: Callable[[int, int], None],
        comm: Comm = ALONE,
    ) -> None:
        self._forward = forward
        self._comm = comm
        (max_seqs, max_rows), block_size, device = sizes.targets[-1], sizes.block_size, forward.backend.device
        self._hidden = forward.target.embedding.new_empty(max_rows, forward.target.config.hidden_size)
        self.drafts = None
        if block_size > 1:
            self.drafts = torch.zeros(max_seqs, block_size - 1, dtype=torch.int32, device=device)
        self.verified = torch.zeros(max_seqs + 1, block_size + 1, dtype=torch.int64, device=device)
        self.draft_graphs: dict[Size, tuple[Graph, DraftTensors]] = {}
        self.target_graphs: dict[Size, tuple[Graph, TargetTensors]] = {}
        self.layout = replace(layout, graphs=sizes)
        done, total = 0, len(sizes.drafts) + len(sizes.targets)
        # The largest first: the memory that it leaves serves all others.
        for seqs, rows in reversed(sizes.targets):
            target = self.layout.target(Batch(), (seqs, rows), 0, pages)
            what = f"target of {seqs} sequences and {rows} rows"
            self._capture(self.target_graphs, (seqs, rows), target, self._run_target, what)
            on_graph(done := done + 1, total)
        for blocks, width in reversed(sizes.drafts):
            draft = self.layout.draft(Batch(), blocks, width, pages)
            what = f"draft of {blocks} blocks of {draft.groups[0].query_lens[0]} rows"
            self._capture(self.draft_graphs, (blocks, width), draft, self._run_draft, what)
            on_graph(done := done + 1, total)
        captured = [*self.target_graphs][::-1], [*self.draft_graphs][::-1]
        self.layout = replace(layout, graphs=GraphSizes(*captured, block_size, sizes.spare))

    def draft(self, inputs: DraftInputs[Ints]) -> Tensor:
        """Return drafts [D, b - 1], which stay until the next ones. Blocks are padded if drafts have graphs."""
        if not self.draft_graphs:
            return self._keep(self._forward.draft(self._forward.on_device(inputs)))
        blocks, rows = len(inputs.anchors), inputs.groups[0].query_lens[0]
        self._replay(*self.draft_graphs[blocks, rows + 1 - self.layout.first_draft_row], inputs)
        assert self.drafts is not None
        return self.drafts[:blocks]

    def target(self, inputs: TargetInputs[Ints], draws: Draws = ()) -> Tensor:
        """Return `engine.verify` of the drafts that were made last, with padding, until the next replay.

        The graph chooses greedily. Rows of `draws` are chosen again from the hidden states, which all graphs write to
        the same place.
        """
        seqs, forward = len(inputs.prev_rows), self._forward
        graph, tensors = self.target_graphs[seqs, len(inputs.token_ids)]
        self._replay(graph, tensors, inputs)
        verified = self.verified[: seqs + 1]
        if draws:
            (choices,) = graph.outputs
            for kind in draws:
                rows = forward.row_numbers[: len(kind.host_rows)]
                own = replace(kind, host_rows=list(range(len(rows))), rows=rows)
                choices[kind.rows] = forward.sampler.choose(self._hidden[kind.rows], forward.target.lm_head, [own])
            forward.verify(tensors.inputs, choices, self.drafts, verified)
        return verified

    def _replay(self, graph: Graph, tensors: OnDevice[Any], inputs: Any) -> None:
        tensors.packed.send(arrays(inputs))
        self._forward.plan(tensors, inputs)
        graph.replay()

    def _keep(self, drafts: Tensor) -> Tensor:
        """Store drafts [D, columns] for the target to verify, and return them as [D, b - 1]."""
        assert self.drafts is not None
        kept = self.drafts[: len(drafts)]
        kept[:, : drafts.shape[1]] = drafts
        return kept

    def _run_draft(self, tensors: DraftTensors) -> tuple[Tensor, ...]:
        anchors = tensors.inputs.anchors
        self._advance(tensors, anchors, self._forward.row_numbers[: len(anchors)])
        self._keep(self._forward.draft(tensors))
        return ()

    def _run_target(self, tensors: TargetTensors) -> tuple[Tensor, ...]:
        forward, inputs, seqs = self._forward, tensors.inputs, len(tensors.inputs.prev_rows)
        self._advance(tensors, inputs.token_ids, inputs.groups[0].query_start_loc[:seqs])
        hidden, choices = forward.choose(tensors, self.drafts, ())
        self._hidden[: len(hidden)] = hidden
        forward.verify(inputs, choices, self.drafts, self.verified[: seqs + 1])
        return (choices,)

    def _advance(self, tensors: DraftTensors | TargetTensors, token_ids: Tensor, anchor_rows: Tensor) -> None:
        """Move rows to where the step in flight leaves their sequences; see `Backend.advance_by_accepted`."""
        if self._forward.backend.lengths_on_host:
            return
        prev_rows, (group,) = tensors.inputs.prev_rows, tensors.inputs.groups
        offsets, seq_lens = group.position_offsets[: len(prev_rows)], group.seq_lens[: len(prev_rows)]
        self._forward.backend.advance_by_accepted(self.verified, prev_rows, token_ids, anchor_rows, offsets, seq_lens)

    def _capture(
        self,
        graphs: dict[Size, tuple[Graph, Any]],
        size: Size,
        inputs: Any,
        run: Callable[[Any], tuple[Tensor, ...]],
        what: str,
    ) -> None:
        """Add the graph of `run` to `graphs` after its first replay. Without it, larger ones of `graphs` have to serve.

        A rank that cannot capture it must not go on, because the others would wait for its collectives. So the outcome
        is exchanged before the replay. An error of `run` itself ends all ranks: it has left others in their
        collectives. Raises UnsupportedError if there is no larger graph.
        """
        tensors = self._forward.on_device(inputs)
        has_run, graph = False, None

        def noting() -> tuple[Tensor, ...]:
            nonlocal has_run
            outputs = run(tensors)
            has_run = True
            return outputs

        try:
            graph = self._forward.backend.capture(noting, [tensors.metas[0]])
        except Exception as error:
            if self._comm.size == 1 or not has_run:
                raise
            self._forward.backend.annotate(error)
            logger.error("%s: the graph cannot be captured on rank %d: %s", what, self._comm.rank, last_words(error))
        if self._comm.minimum(graph is not None):
            assert graph is not None
            graph.replay()
            graphs[size] = graph, tensors
        elif graphs:
            logger.warning("%s: without its own graph, such a step is padded to a larger one", what)
        else:
            raise UnsupportedError(
                f"{what}: this graph, which all ranks need, cannot be captured on all of them; the log of each says "
                "why: give a smaller --max-num-seqs, --kv-cache-memory or --memory-utilization, or --enforce-eager"
            )
