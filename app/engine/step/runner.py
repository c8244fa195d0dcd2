"""The device side of a step: draft, target, context KV, verify. A few copies in, one copy out."""

from collections.abc import Iterator, Sequence
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
from app.engine.schedule.batch import StepResult
from app.engine.step.forward import Forward
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import DraftInputs, Layout, StepInputs, TargetInputs
from app.engine.step.sampling_rows import SamplingRows


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

    @property
    def layout(self) -> Layout:
        """Return the arrangement of arrays that `launch` takes."""
        if not self.graphs:
            return Layout(self._page_size, self.backend.separate_prefill)
        return Layout(self._page_size, self.backend.separate_prefill, self._block_size - 1, self.graphs.block_widths)

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> PendingStep:
        """Queue the whole step on the device without reading anything back."""
        is_plain = not (self.graphs or inputs.has_prefill or inputs.draft)
        self.forward.pending_context.begin_step(inputs.sequence_keys if is_plain else None)
        drafts = self._draft(inputs.draft) if inputs.draft else None
        sampling = self._sampling(inputs.sampling, drafts)
        if self.graphs and not inputs.has_prefill:
            verified = self._replay(self.graphs, inputs.target, sampling)
        else:
            verified = self._run(inputs.target, drafts, sampling)
        return PendingStep(verified[: len(inputs.target.logits_start)], self.backend)

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

    def _run(self, inputs: TargetInputs, drafts: Tensor | None, sampling: list[SamplingMetadata]) -> Tensor:
        """The target eagerly; what `verify` says [S, w + 1]."""
        tensors = self.forward.target_tensors(inputs, Packed(inputs.arrays, self.backend))
        for rows, group in zip(tensors.groups, inputs.groups, strict=True):
            self.forward.plan(rows, group)
        _, choices = self.forward.choose(tensors, drafts, sampling)
        return self.forward.verify(tensors, choices, drafts)

    def _replay(self, graphs: StepGraphs, inputs: TargetInputs, sampling: list[SamplingMetadata]) -> Tensor:
        """The target from a graph, which chooses greedily; rows that are drawn are chosen anew behind it."""
        out = graphs.target(inputs)
        if not sampling:
            return out.verified
        self.forward.redraw(out.hidden, out.choices, sampling)
        return self.forward.verify(out.inputs, out.choices, graphs.drafts)

    def _sampling(self, kinds: list[SamplingRows], drafts: Tensor | None) -> list[SamplingMetadata]:
        """Return the sampled rows on the device, with the drafts [D, columns] that they stand on."""
        if not kinds:
            return []
        tensors = iter(Packed([array for rows in kinds for array in rows.arrays], self.backend).tensors)
        return [self._metadata(rows, tensors, drafts) for rows in kinds]

    def _metadata(self, rows: SamplingRows, tensors: Iterator[Tensor], drafts: Tensor | None) -> SamplingMetadata:
        host = rows.columns
        on_device = {
            name: tensor.view(torch.float32) if column.dtype == np.float32 else tensor
            for (name, column), tensor in zip(host.items(), islice(tensors, len(host)), strict=True)
        }
        filters = additions = penalties = None
        if rows.is_filtered:
            short = bool(host["top_k"].max() <= SHORTLIST)
            filters = Filters(on_device["top_k"], on_device["top_p"], on_device["min_p"], short)
        if len(host["bias"]):
            bias_row, bias_token = on_device["bias_row"].long(), on_device["bias_token"].long()
            additions = LogitBias(host["bias_row"].tolist(), bias_row, bias_token, on_device["bias"])
        if rows.counted:
            emitted, prompted = self._counts.of(rows.counted)
            penalties = Penalties(
                on_device["presence"],
                on_device["frequency"],
                on_device["repetition"],
                on_device["batch_slot"],
                on_device["place"],
                None if drafts is None else drafts[on_device["draft_index"]],
                emitted,
                prompted,
            )
        return SamplingMetadata(
            host["rows"].tolist(),
            on_device["rows"],
            on_device["temperature"],
            on_device["state"],
            drawn=None if host["is_drawn"].all() else on_device["is_drawn"].bool(),
            filters=filters,
            additions=additions,
            penalties=penalties,
        )
