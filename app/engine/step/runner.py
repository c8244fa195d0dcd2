"""The device side of a step: draft, target, context KV, verify. A few copies in, one copy out."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from app.engine.device.base import Backend
from app.engine.device.transfer import Packed
from app.engine.models.kv_pool import KvPool
from app.engine.sampling.metadata import SamplingMetadata, sampling_metadata
from app.engine.sampling.penalties import TokenCounts
from app.engine.schedule.batch import StepResult
from app.engine.step.forward import Forward
from app.engine.step.graph_sizes import GraphSizes
from app.engine.step.inputs import DraftInputs, Layout, StepInputs


class PendingStep:
    """A step in flight. `verified` [S, w + 1] is the result of `engine.verify`, on its way to the host."""

    def __init__(self, verified: Tensor, backend: Backend) -> None:
        self._wait = backend.start_download(verified)

    def read(self) -> StepResult:
        """Return the step's result in its one device-to-host copy. Wait for nothing that was launched after it."""
        rows = self._wait().tolist()
        return StepResult(tokens=[row[:-1] for row in rows], num_accepted=[row[-1] for row in rows])


class ModelRunner:
    """Runs steps operator by operator. `pools` hold the KV of the target and of the draft, if there is one."""

    def __init__(
        self, forward: Forward, backend: Backend, counts: TokenCounts, layout: Layout, pools: Sequence[KvPool] = ()
    ) -> None:
        """`layout` is the arrangement of arrays that `launch` takes."""
        self.forward = forward
        self.backend = backend
        self.layout = layout
        self.pools = pools
        self._counts = counts

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> PendingStep:
        """Queue the whole step on the device without reading anything back."""
        with self.backend.step(len(inputs.target.token_ids)):
            self.forward.pending_context.begin_step(self._plain_sequences(inputs))
            drafts = self._draft(inputs.draft) if inputs.draft else None
            draws = sampling_metadata(inputs.sampling, drafts, self._counts, self.backend)
            verified = self._target(inputs, drafts, draws)
        return PendingStep(verified[: len(inputs.target.logits_start)], self.backend)

    @property
    def padded_to(self) -> GraphSizes | None:
        """Return the sizes that decode steps are padded to, or None if they are not."""
        return None

    def rollback(self) -> None:
        """Undo a step that failed anywhere, so that it may be launched again, whole or in parts."""
        self.forward.pending_context.rollback()
        self._counts.forget()

    def is_fatal(self, error: BaseException) -> bool:
        """Return True if no step can run after `error`."""
        return self.backend.is_fatal(error)

    @torch.inference_mode()
    def scrub(self, slot_mapping: list[int]) -> None:
        """Zero slots of all models' KV, after pending context KV is written."""
        self.forward.pending_context.write()
        (slots,) = Packed([np.array(slot_mapping, dtype=np.int32)], self.backend).tensors
        for pool in self.pools:
            pool.clear(slots)

    def _plain_sequences(self, inputs: StepInputs) -> list[tuple[str, int]] | None:
        """Return the keys of the sequences of a step without drafts and prefill, whose context KV may be pending."""
        return None if inputs.has_prefill or inputs.draft else inputs.sequence_keys

    def _draft(self, inputs: DraftInputs) -> Tensor:
        """Return drafts [D, w - 1], integers."""
        tensors = self.forward.draft_tensors(inputs, Packed(self.forward.arrays(inputs), self.backend))
        self.forward.plan(tensors.rows, inputs.group)
        return self.forward.draft(tensors)

    def _target(self, inputs: StepInputs, drafts: Tensor | None, draws: list[SamplingMetadata]) -> Tensor:
        """Return the result of `engine.verify` [S, w + 1]."""
        tensors = self.forward.target_tensors(inputs.target, Packed(self.forward.arrays(inputs.target), self.backend))
        for rows, group in zip(tensors.groups, inputs.target.groups, strict=True):
            self.forward.plan(rows, group)
        _, choices = self.forward.choose(tensors, drafts, draws)
        return self.forward.verify(tensors, choices, drafts)
