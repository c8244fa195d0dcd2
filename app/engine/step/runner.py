"""The device side of a step: draft, target, context KV, verify. A few copies in, one copy out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.engine.arrays import Ints
from app.engine.device.base import Backend
from app.engine.device.transfer import Packed
from app.engine.models.kv_pool import KvPool
from app.engine.sampling.penalties import TokenCounts
from app.engine.sampling.sampler import draws_on_device
from app.engine.schedule.batch import StepResult
from app.engine.step.forward import Forward
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import DraftInputs, Layout, StepInputs

Tell = Callable[[StepInputs | list[list[int]]], None]
"""Sends the other ranks a step to launch, or slots to scrub."""


class PendingStep:
    """A step in flight. `wait` returns `engine.verify` [S, w + 1] on the host once the step has ended."""

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait = wait

    def read(self) -> StepResult:
        """Return the step's result in its one device-to-host copy. Do not wait for later steps."""
        rows = self._wait().tolist()
        return StepResult(tokens=[row[:-1] for row in rows], num_accepted=[row[-1] for row in rows])


def no_rows() -> PendingStep:
    """Return a step without rows."""
    return PendingStep(lambda: torch.empty(0, 1))


@dataclass(eq=False)
class ModelRunner:
    """Runs steps.

    Drafts, and targets of steps that are padded to graphs, run from `graphs` if there are some. Everything else runs
    eagerly.
    """

    forward: Forward
    backend: Backend
    counts: TokenCounts
    layout: Layout
    """Arrangement of the arrays that `launch` takes, padded to sizes of `graphs` if there are some."""
    pools: Sequence[KvPool] = ()
    """KV of the target, and of the draft if there is one."""
    graphs: StepGraphs | None = None
    tell: Tell | None = None
    """Of rank 0, if there are more: it sends every call to them."""

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> PendingStep:
        """Queue the whole step on the device without reading anything back."""
        if self.tell:
            self.tell(inputs)
        with self.backend.step(len(inputs.target.token_ids)):
            if not self.graphs:  # a graph writes its step's context KV
                self.forward.pending_context.begin_step(inputs.plain_sequences)
            drafts = self._draft(inputs.draft) if inputs.draft else None
            kinds = [rows for rows in inputs.sampling if not rows.in_graph]
            draws = draws_on_device(kinds, drafts, self.counts, self.backend)[0] if kinds else []
            if self.graphs and inputs.in_graph:
                verified = self.graphs.target(inputs.target, inputs.sampling, draws)
            else:
                target = self.forward.on_device(inputs.target)
                out = None
                hidden = self.forward.deciding(target, drafts)
                choices = self.forward.sampler.choose(hidden, self.forward.target.lm_head, draws)
                if self.graphs and not self.backend.lengths_on_host:  # where the next step's graphs look
                    drafts, out = self.graphs.drafts, self.graphs.verified[: len(inputs.target.num_drafts)]
                verified = self.forward.verify(target.inputs, choices, drafts, out)
            if draws:
                self.counts.move(draws, verified)
        return PendingStep(self.backend.start_download(verified[: inputs.target.num_seqs]))

    def rollback(self) -> None:
        """Undo a step that failed anywhere, so that it may be launched again, whole or in parts."""
        self.forward.pending_context.rollback()
        self.counts.forget()

    def is_fatal(self, error: BaseException) -> bool:
        """Return True if no step can run after `error`. One that other ranks have begun cannot run again in parts."""
        return self.tell is not None or self.backend.is_fatal(error)

    @torch.inference_mode()
    def scrub(self, slots: list[list[int]]) -> None:
        """Zero slots of KV, after pending context KV is written: the target's, and the draft's, or the same ones."""
        if self.tell:
            self.tell(slots)
        self.forward.pending_context.write()
        arrays = {str(i): np.array(numbers, dtype=np.int32) for i, numbers in enumerate(slots)}
        packed = Packed(arrays, self.backend)
        for i, pool in enumerate(self.pools):
            pool.clear(packed.tensors[str(min(i, len(slots) - 1))])

    def _draft(self, inputs: DraftInputs[Ints]) -> Tensor:
        """Return drafts [D, columns], integers, of the step's block width, or with graphs of the widest."""
        return self.graphs.draft(inputs) if self.graphs else self.forward.draft(self.forward.on_device(inputs))
