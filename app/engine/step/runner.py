"""The device side of a step: draft, target, context KV, verify. A few copies in, one copy out."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from app.engine.backend.base import Backend
from app.engine.backend.transfer import Packed
from app.engine.models.kv_pool import KvPool
from app.engine.sampling.filters import SHORTLIST, Filters
from app.engine.sampling.penalties import Penalties, TokenCounts
from app.engine.sampling.sampler import LogitBias, SamplingMetadata
from app.engine.schedule.batch import Batch, StepResult
from app.engine.step import inputs as step_inputs
from app.engine.step.forward import Forward
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import DraftInputs, SamplingRows, StepInputs, TargetInputs


class PendingStep:
    """A step that was launched. `packed` [S, w + 1] is what `engine.verify` returns, on its way to the host."""

    def __init__(self, packed: Tensor, backend: Backend) -> None:
        self._wait = backend.start_download(packed)

    def read(self) -> StepResult:
        """The one device-to-host copy of the step; waits for this step and for nothing launched after it."""
        rows = self._wait().tolist()
        return StepResult(tokens=[row[:-1] for row in rows], num_accepted=[row[-1] for row in rows])


class ModelRunner:
    """Runs batches over the target and, when there is one, the drafter.

    `pools` hold the KV of both. Once `graphs` are set every draft comes from a graph, and so does the target of a step
    in which nobody prefills.
    """

    def __init__(
        self,
        forward: Forward,
        backend: Backend,
        counts: TokenCounts,
        *,
        page_size: int,
        block_size: int,
        pools: Sequence[KvPool] = (),
    ) -> None:
        self.forward = forward
        self.pools = pools
        self._counts = counts
        self.graphs: StepGraphs | None = None
        self.backend = backend
        self._page_size = page_size
        self._block_size = block_size

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue the whole step on the device without reading anything back."""
        plain = not (self.graphs or batch.prefills or batch.num_drafting)
        self.forward.pending_context.begin_step([rows.seq for rows in batch.decodes] if plain else None)
        inputs = self._inputs(batch)
        drafts = self._draft(inputs.draft) if inputs.draft else None
        draws = self._draws(inputs.draws, drafts)
        if self.graphs and not batch.prefills:
            verified = self._replay(self.graphs, inputs.target, draws)
        else:
            verified = self._run(inputs.target, drafts, draws)
        return PendingStep(verified[: len(inputs.target.logits_start)], self.backend)

    def _inputs(self, batch: Batch) -> StepInputs:
        """With graphs blocks are as wide as one that was captured, and drafts lie where those put them."""
        rows, columns, apart = batch.block_rows, None, self.backend.separate_prefill
        if self.graphs:
            rows, columns = self.graphs.block_rows(rows), self._block_size - 1
        return step_inputs.build(batch, self._page_size, rows, draft_columns=columns, separate_prefill=apart)

    def rollback(self) -> None:
        """After a step that failed, wherever that was: it may be launched again, whole or in parts."""
        self.forward.pending_context.rollback()
        self._counts.forget()

    @torch.inference_mode()
    def scrub(self, slot_mapping: list[int]) -> None:
        """Zero slots of all models' KV, after pending context KV is written."""
        self.forward.pending_context.write()
        (places,) = Packed([np.array(slot_mapping, dtype=np.int32)], self.backend).tensors
        for pool in self.pools:
            pool.clear(places)

    def _draft(self, inputs: DraftInputs) -> Tensor:
        """Drafts, b - 1 columns wide with graphs, else as wide as the blocks."""
        if self.graphs and self.graphs.has_draft:
            return self.graphs.draft(inputs)
        tensors = self.forward.draft_tensors(inputs, Packed(inputs.arrays, self.backend))
        self.forward.plan(tensors.rows, inputs.group)
        drafts = self.forward.draft(tensors)
        return self.graphs.keep(drafts) if self.graphs else drafts

    def _run(self, inputs: TargetInputs, drafts: Tensor | None, draws: list[SamplingMetadata]) -> Tensor:
        """The target eagerly; what `verify` says [S, w + 1]."""
        tensors = self.forward.target_tensors(inputs, Packed(inputs.arrays, self.backend))
        for rows, group in zip(tensors.groups, inputs.groups, strict=True):
            self.forward.plan(rows, group)
        _, choices = self.forward.choose(tensors, drafts, draws)
        return self.forward.verify(tensors, choices, drafts)

    def _replay(self, graphs: StepGraphs, inputs: TargetInputs, draws: list[SamplingMetadata]) -> Tensor:
        """The target from a graph, which chooses greedily; rows that are drawn are chosen anew behind it."""
        out = graphs.target(inputs)
        if not draws:
            return out.verified
        self.forward.redraw(out.hidden, out.choices, draws)
        return self.forward.verify(out.inputs, out.choices, graphs.drafts)

    def _draws(self, inputs: list[SamplingRows], drafts: Tensor | None) -> list[SamplingMetadata]:
        """The rows that are drawn, on the device, for the drafts [D, columns] that they stand on."""
        if not inputs:
            return []
        tensors = iter(Packed([array for kind in inputs for array in kind.arrays], self.backend).tensors)
        return [self._drawn(kind, list(islice(tensors, len(kind.arrays))), drafts) for kind in inputs]

    def _drawn(self, inputs: SamplingRows, tensors: list[Tensor], drafts: Tensor | None) -> SamplingMetadata:
        rows, state, drawn, batch_slots, places, draft_rows, added_rows, added_tokens, *floats = tensors
        temperature, top_k, top_p, min_p, presence, frequency, repetition, added_values = (
            x.view(torch.float32) for x in floats
        )
        filters = additions = penalties = None
        if inputs.is_filtered:
            filters = Filters(top_k, top_p, min_p, short=bool(inputs.top_k.max() <= SHORTLIST))
        if len(inputs.added):
            host_rows = inputs.added[:, 0].tolist()
            additions = LogitBias(host_rows, added_rows.long(), added_tokens.long(), added_values)
        if inputs.penalised:
            before = None if drafts is None else drafts[draft_rows]
            counts = self._counts.of(inputs.penalised)
            penalties = Penalties(presence, frequency, repetition, batch_slots, places, before, *counts)
        return SamplingMetadata(
            inputs.rows.tolist(),
            rows,
            temperature,
            state,
            drawn=None if inputs.drawn.all() else drawn.bool(),
            filters=filters,
            additions=additions,
            penalties=penalties,
        )
