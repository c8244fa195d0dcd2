"""The device side of a step: draft, target, context KV, verify. A few copies in, one copy out."""

import numpy as np
import torch
from torch import Tensor

from app.engine import step_inputs
from app.engine.backend import Backend
from app.engine.batch import Batch, StepResult
from app.engine.sampler import Draws
from app.engine.stages import Packed, Stages
from app.engine.step_graphs import StepGraphs
from app.engine.step_inputs import DraftInputs, StepInputs, TargetInputs


class PendingStep:
    """A step that was launched. `packed` [S, w + 1] is what `dflash.verify` returns, on its way to the host."""

    def __init__(self, packed: Tensor, backend: Backend) -> None:
        self._wait = backend.start_download(packed)

    def read(self) -> StepResult:
        """The one device-to-host copy of the step; waits for this step and for nothing launched after it."""
        rows = self._wait().tolist()
        return StepResult(tokens=[row[:-1] for row in rows], num_accepted=[row[-1] for row in rows])


class ModelRunner:
    """Runs batches over the target and, when there is one, the drafter.

    With `graphs` every draft comes from a graph, and so does the target of a step in which nobody prefills.
    """

    def __init__(
        self, stages: Stages, backend: Backend, *, page_size: int, block_size: int, graphs: StepGraphs | None = None
    ) -> None:
        self.stages = stages
        self.graphs = graphs
        self._backend = backend
        self._page_size = page_size
        self._block_size = block_size

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue the whole step on the device without reading anything back."""
        inputs = step_inputs.build(batch, self._page_size, self._block_size)
        drafts = self._draft(inputs.draft) if inputs.draft else None
        if self.graphs and not batch.prefills:
            verified = self._replay(self.graphs, inputs)
        else:
            verified = self._run(inputs.target, drafts, self._draws(inputs))
        return PendingStep(verified[: len(inputs.target.first_logit)], self._backend)

    def _draft(self, inputs: DraftInputs) -> Tensor:
        """Drafts [D, b - 1]."""
        if self.graphs and self.graphs.has_draft:
            return self.graphs.draft(inputs)
        tensors = self.stages.draft_tensors(inputs, Packed(inputs.arrays, self._backend))
        self.stages.plan(tensors.rows, inputs.group)
        drafts = self.stages.draft(tensors)
        if self.graphs:
            self.graphs.keep(drafts)
        return drafts

    def _run(self, inputs: TargetInputs, drafts: Tensor | None, draws: Draws | None) -> Tensor:
        """The target eagerly; what `verify` says [S, w + 1]."""
        tensors = self.stages.target_tensors(inputs, Packed(inputs.arrays, self._backend))
        for rows, group in zip(tensors.groups, inputs.groups, strict=True):
            self.stages.plan(rows, group)
        _, choices = self.stages.choose(tensors, drafts, draws)
        return self.stages.verify(tensors, choices, drafts)

    def _replay(self, graphs: StepGraphs, inputs: StepInputs) -> Tensor:
        """The target from a graph, which chooses greedily; rows that are drawn are chosen anew behind it."""
        out = graphs.target(inputs.target)
        draws = self._draws(inputs)
        if draws is None:
            return out.verified
        self.stages.redraw(out.hidden, out.choices, draws)
        return self.stages.verify(out.inputs, out.choices, graphs.drafts)

    def _draws(self, inputs: StepInputs) -> Draws | None:
        if not len(inputs.drawn_rows):
            return None
        arrays = [inputs.drawn_rows, inputs.temperature.view(np.int32), inputs.noise_state]
        rows, temperature, state = Packed(arrays, self._backend).tensors
        return Draws(inputs.drawn_rows.tolist(), rows, temperature.view(torch.float32), state)
