"""The device side of a step: draft, target, context KV, verify. One copy in, one copy out."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from app.engine import step_inputs
from app.engine.backend import AttnMeta, Backend
from app.engine.batch import Batch, StepResult
from app.engine.dflash.drafter import Drafter
from app.engine.dflash.verify import verify
from app.engine.kv_pool import KvPool
from app.engine.layers import RotaryTable, StepRows
from app.engine.models.qwen3 import Qwen3
from app.engine.sampler import Noise, Sampler, noise_states
from app.engine.step_inputs import DraftInputs, Ints, RowGroup


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched; `packed` [S, w + 1] is still on the device."""

    packed: Tensor

    def read(self) -> StepResult:
        """The one device-to-host copy of the step; waits for the device."""
        rows = self.packed.tolist()
        return StepResult(tokens=[row[:-1] for row in rows], num_accepted=[row[-1] for row in rows])


class ModelRunner:
    """Runs batches over the target and, when there is one, the drafter."""

    def __init__(
        self,
        target: Qwen3,
        pool: KvPool,
        rotary: RotaryTable,
        sampler: Sampler,
        backend: Backend,
        *,
        page_size: int,
        block_size: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._pool = pool
        self._rotary = rotary
        self._sampler = sampler
        self._backend = backend
        self._page_size = page_size
        self._block_size = block_size

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue the whole step on the device without reading anything back."""
        inputs = step_inputs.build(batch, self._page_size, self._block_size)
        token_ids, positions, slots, logit_rows, first_logit, num_drafts, draft_of = self._upload(
            inputs.token_ids,
            np.concatenate([group.positions for group in inputs.groups]),
            np.concatenate([group.slots for group in inputs.groups]),
            inputs.logit_rows,
            inputs.first_logit,
            inputs.num_drafts,
            inputs.draft_of,
        )
        drafts = self._draft(inputs.draft, token_ids) if inputs.draft else None
        rows = StepRows(
            *self._rotary.at(positions), slots, [self._attn_meta(group, causal=True) for group in inputs.groups]
        )
        hidden, features = self.target.forward(token_ids, rows, self._pool)
        if self.drafter is not None and features is not None:
            self.drafter.write_context(features, positions, slots)
        choices = self._sampler.choose(hidden[logit_rows], self.target.lm_head, self._noise(inputs.sampled))
        return PendingStep(verify(choices, drafts, first_logit, num_drafts, draft_of))

    def _draft(self, inputs: DraftInputs, token_ids: Tensor) -> Tensor:
        """Drafts [D, b - 1]; those to be verified are also put among the target's `token_ids`."""
        if self.drafter is None:
            raise RuntimeError("a batch with drafts came to a runner without a drafter")
        anchors, positions, slots, target_rows, draft_index = self._upload(
            inputs.anchors, inputs.group.positions, inputs.group.slots, inputs.target_rows, inputs.draft_index
        )
        meta = self._attn_meta(inputs.group, causal=False)
        drafts = self.drafter.propose(inputs.request_ids, anchors, positions, slots, meta)
        token_ids[target_rows] = drafts.flatten()[draft_index]
        return drafts

    def _attn_meta(self, group: RowGroup, *, causal: bool) -> AttnMeta:
        lengths = np.array([0, *accumulate(group.q_lens), *group.kv_lens], dtype=np.int64)
        lengths_on_device, page_table = self._upload(lengths, group.page_table.ravel())
        cu_q, kv_len = lengths_on_device.int().split_with_sizes([len(group.q_lens) + 1, len(group.kv_lens)])
        page_table = page_table.view(group.page_table.shape)
        return AttnMeta(cu_q, kv_len, page_table, group.q_lens, group.kv_lens, causal)

    def _noise(self, sampled: list[tuple[int, float, int, int]]) -> Noise | None:
        if not sampled:
            return None
        states = noise_states((seed, index) for _, _, seed, index in sampled)
        device = self._backend.device
        return Noise(
            rows=[row for row, _, _, _ in sampled],
            temperature=torch.tensor([temperature for _, temperature, _, _ in sampled], device=device),
            state=torch.tensor(states, dtype=torch.int32, device=device),
        )

    def _upload(self, *arrays: Ints) -> Iterable[Tensor]:
        """Host arrays to the device in one copy."""
        packed = torch.from_numpy(np.concatenate(arrays)).to(self._backend.device, non_blocking=True)
        return packed.split_with_sizes([len(array) for array in arrays])
