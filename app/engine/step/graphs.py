"""A step from graphs: its draft and its target, each padded to one of a few captured sizes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.engine.arrays import Ints, arrays
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Graph
from app.engine.device.transfer import Packed
from app.engine.errors import GraphsRefusedError, UnsupportedError, last_words
from app.engine.sampling.metadata import GRAPH_KINDS, Kind, SamplingMetadata
from app.engine.sampling.penalties import TokenCounts
from app.engine.sampling.sampler import Draws, draws_on_device
from app.engine.schedule.batch import Batch
from app.engine.schedule.graph_sizes import GraphSizes, Size
from app.engine.step.forward import DraftTensors, Forward, OnDevice, TargetTensors
from app.engine.step.inputs import DraftInputs, Layout, TargetInputs
from app.engine.step.sampling_rows import graph_rows

logger = logging.getLogger(__name__)


class StepGraphs:
    """All graphs of a runner, of the sizes and draws of `layout`, captured at construction.

    `on_graph` is called with (captured, to capture). `pages` is the width of page tables. All ranks of `comm` capture
    the same graphs in the same order, and `captured_sizes` are those that all of them could capture.

    `drafts` [max_num_seqs, b - 1] carries drafts from one graph to the other, or is None without a draft. Narrower
    blocks fill the first columns. `verified` [max_num_seqs + 1, b + 1] is the last verification, where the next step
    begins without `lengths_on_host`.
    """

    def __init__(
        self,
        forward: Forward,
        layout: Layout,
        counts: TokenCounts | None,
        *,
        pages: int,
        on_graph: Callable[[int, int], None],
        comm: Comm = ALONE,
    ) -> None:
        assert layout.graphs
        sizes = layout.graphs
        self._forward = forward
        self._layout = layout
        self._comm = comm
        self._counts = counts if layout.draws_in_graphs else None
        max_seqs, max_rows = sizes.targets[-1]
        block_size, device = sizes.block_size, forward.backend.device
        self._hidden = forward.target.embedding.new_empty(max_rows, forward.target.config.hidden_size)
        drafts = torch.zeros(max_seqs, block_size - 1, dtype=torch.int32, device=device)
        self.drafts: Any = drafts if block_size > 1 else None
        self.verified = torch.zeros(max_seqs + 1, block_size + 1, dtype=torch.int64, device=device)
        self.draft_graphs: dict[Size, tuple[Graph, DraftTensors]] = {}
        self.target_graphs: dict[Size, tuple[Graph, TargetTensors]] = {}
        self.draw_graphs: dict[tuple[Size, Kind], tuple[Graph, Packed]] = {}
        self._logits: Tensor | None = None
        done, total = 0, len(sizes.drafts) + len(sizes.targets)
        # The largest first: the memory that it leaves serves all others.
        for seqs, rows in reversed(sizes.targets):
            target = layout.target(Batch(), (seqs, rows), 0, pages)
            what = f"target of {seqs} sequences and {rows} rows"
            self._capture(self.target_graphs, (seqs, rows), target, self._run_target, what)
            if self._counts:
                self._capture_draws((seqs, rows), self._counts)
            on_graph(done := done + 1, total)
        for blocks, width in reversed(sizes.drafts):
            draft = layout.draft(Batch(), blocks, width, pages)
            what = f"draft of {blocks} blocks of {draft.groups[0].query_lens[0]} rows"
            self._capture(self.draft_graphs, (blocks, width), draft, self._run_draft, what)
            on_graph(done := done + 1, total)
        captured = [*self.target_graphs][::-1], [*self.draft_graphs][::-1]
        self.captured_sizes = GraphSizes(*captured, block_size, sizes.spare, sizes.chunks)
        self._logits = None

    @property
    def vocab_size(self) -> int:
        return self._forward.target.config.vocab_size

    def draft(self, inputs: DraftInputs[Ints]) -> Tensor:
        """Return drafts [D, b - 1], valid until the next ones. Blocks are padded if drafts have graphs."""
        if not self.draft_graphs:
            return self._keep(self._forward.draft(self._forward.on_device(inputs)))
        blocks, rows = len(inputs.anchors), inputs.groups[0].query_lens[0]
        self._replay(*self.draft_graphs[blocks, rows + 1 - self._layout.first_draft_row], inputs)
        return self.drafts[:blocks]

    def target(self, inputs: TargetInputs[Ints], sampling: Sequence[Any] = (), draws: Draws = ()) -> Tensor:
        """Return `engine.verify` of the last drafts, with padding. It is valid until the next replay.

        The graph chooses greedily. Graphs of the kinds in `sampling`, or code for `draws`, choose rows again.
        """
        size, forward = (len(inputs.prev_rows), len(inputs.token_ids)), self._forward
        graph, tensors = self.target_graphs[size]
        self._replay(graph, tensors, inputs)
        for rows in sampling:
            if rows.in_graph and self._counts:
                self._counts.begin(rows.penalties.counted if rows.penalties else ())
                drawn, packed = self.draw_graphs[size, rows.kind]
                packed.send(arrays([rows]))
                drawn.replay()
        for draw in draws:
            forward.sampler.redraw(graph.outputs[0], self._hidden, forward.target.lm_head, None, draw)
        if draws:
            forward.verify(tensors.inputs, graph.outputs[0], self.drafts, self.verified[: size[0] + 1])
        return self.verified[: size[0] + 1]

    def error_of(self, inputs: TargetInputs[Ints]) -> float:
        """Return the largest error of hidden states from a graph, whose lengths were not tried, as a share of the
        largest value that the same code computes without it: NaN if one is. Raises RuntimeError if they are refused.

        All ranks make the same collectives, whatever is refused on one of them.
        """
        graph, tensors = self.target_graphs[len(inputs.prev_rows), len(inputs.token_ids)]
        self._send(tensors, inputs)
        self._run_target(tensors)
        self._logits = None
        hidden = self._hidden[: len(inputs.token_ids)]
        wanted = hidden.float()
        graph.try_replay()
        return float((hidden.float() - wanted).abs().max() / wanted.abs().max())

    def _replay(self, graph: Graph, tensors: OnDevice[Any], inputs: Any) -> None:
        self._send(tensors, inputs)
        graph.replay()

    def _send(self, tensors: OnDevice[Any], inputs: Any) -> None:
        assert tensors.packed
        tensors.packed.send(arrays(inputs))
        self._forward.plan(tensors, inputs)

    def _keep(self, drafts: Tensor) -> Tensor:
        """Store drafts [D, columns] for the target to verify, and return them as [D, b - 1]."""
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
        hidden = forward.deciding(tensors, self.drafts)
        self._hidden[: len(hidden)] = hidden
        most = forward.sampler.max_greedy_rows if self._counts else 0
        choices, self._logits = forward.sampler.choose_greedily(hidden, forward.target.lm_head, most)
        forward.verify(inputs, choices, self.drafts, self.verified[: seqs + 1])
        return (choices,)

    def _capture_draws(self, size: Size, counts: TokenCounts) -> None:
        """Capture every kind of draw. `_logits` still holds what the target's graph of this size returned, so these
        graphs do not reuse its memory."""
        forward, (graph, target) = self._forward, self.target_graphs[size]

        def run(draw: SamplingMetadata[Tensor]) -> tuple[Tensor, ...]:
            """Choose rows again and verify. A row draws the token after its position."""
            inputs, (choices,) = target.inputs, graph.outputs
            positions, _ = forward.positions_and_slots(inputs.groups[0])
            state = forward.sampler.mix(draw.state ^ (positions.index_select(0, draw.rows) + 1))
            draws = replace(draw, state=state)
            forward.sampler.redraw(choices, self._hidden, forward.target.lm_head, self._logits, draws)
            counts.move([draw], forward.verify(inputs, choices, self.drafts, self.verified[: size[0] + 1]))
            return ()

        for kind in GRAPH_KINDS:
            (draw,), packed = draws_on_device(
                [graph_rows(kind, size[1], size[0] + 1)], self.drafts, counts, forward.backend
            )
            drawn = forward.backend.capture(partial(run, draw), [])
            drawn.replay()
            self.draw_graphs[size, kind] = drawn, packed

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
        """Add the graph of `run` to `graphs` after its first replay. If its capture fails, larger ones serve instead.

        A rank that cannot capture it must not go on, because the others would wait for its collectives. So the outcome
        is exchanged before the replay. An error of `run` itself ends all ranks, because others may wait in a collective
        already. Raises UnsupportedError if there is no larger graph, and GraphsRefusedError if all ranks refuse it.
        """
        tensors = self._forward.on_device(inputs, captured=True)
        has_run = refused = False
        graph = None

        def run_and_note() -> tuple[Tensor, ...]:
            nonlocal has_run
            outputs = run(tensors)
            has_run = True
            return outputs

        try:
            graph = self._forward.backend.capture(run_and_note, [tensors.metas[0]])
        except Exception as error:
            refused = isinstance(error, GraphsRefusedError)
            if not has_run or (self._comm.size == 1 and not refused):
                raise
            self._forward.backend.annotate(error)
            logger.error("%s: the graph cannot be captured on rank %d: %s", what, self._comm.rank, last_words(error))
        if self._comm.minimum(graph is not None):
            assert graph is not None
            graph.replay()
            graphs[size] = graph, tensors
        elif graphs:
            logger.warning("%s: without its own graph, such a step is padded to a larger one", what)
        elif self._comm.minimum(refused):
            raise GraphsRefusedError(f"{what}: the device refuses this model's operators in graphs, as its log says")
        else:
            raise UnsupportedError(
                f"{what}: this graph, which all ranks need, cannot be captured on all of them; the log of each says "
                "why: give a smaller --max-num-seqs, --kv-cache-memory or --memory-utilization, or --enforce-eager"
            )
