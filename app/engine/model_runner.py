"""The device side of a step: draft, target, context KV, verify. One copy in, one copy out."""

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from app.engine import step_inputs
from app.engine.backend import AttnMeta, Backend
from app.engine.batch import Batch, StepResult
from app.engine.decoder_config import DecoderConfig
from app.engine.dflash.drafter import Drafter
from app.engine.dflash.verify import verify
from app.engine.kv_pool import KvPool
from app.engine.layers import RotaryTable, StepRows
from app.engine.models.qwen3 import Qwen3
from app.engine.sampler import Draws, Sampler
from app.engine.step_inputs import DraftInputs, Ints, RowGroup, StepInputs


class PendingStep:
    """A step that was launched. `packed` [S, w + 1] is what `dflash.verify` returns, on its way to the host."""

    def __init__(self, packed: Tensor, backend: Backend) -> None:
        self._wait = backend.start_download(packed)

    def read(self) -> StepResult:
        """The one device-to-host copy of the step; waits for this step and for nothing launched after it."""
        rows = self._wait().tolist()
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
        draws = self._draws(inputs)
        metas = [self._attn_meta(group, self.target.config, causal=True) for group in inputs.groups]
        drafts = self._draft(inputs.draft, token_ids) if inputs.draft else None
        rows = StepRows(*self._rotary.at(positions), slots, metas)
        hidden, features = self.target.forward(token_ids, rows, self._pool)
        if self.drafter is not None and features is not None:
            self.drafter.write_context(features, positions, slots)
        choices = self._sampler.choose(hidden[logit_rows], self.target.lm_head, draws)
        return PendingStep(verify(choices, drafts, first_logit, num_drafts, draft_of), self._backend)

    def _draft(self, inputs: DraftInputs, token_ids: Tensor) -> Tensor:
        """Drafts [D, b - 1]; those to be verified are also put among the target's `token_ids`."""
        if self.drafter is None:
            raise RuntimeError("a batch with drafts came to a runner without a drafter")
        anchors, positions, slots, target_rows, draft_index = self._upload(
            inputs.anchors, inputs.group.positions, inputs.group.slots, inputs.target_rows, inputs.draft_index
        )
        meta = self._attn_meta(inputs.group, self.drafter.decoder, causal=False)
        drafts = self.drafter.propose(inputs.request_ids, anchors, positions, slots, meta)
        token_ids[target_rows] = drafts.flatten()[draft_index].to(token_ids.dtype)
        return drafts

    def _attn_meta(self, group: RowGroup, decoder: DecoderConfig, *, causal: bool) -> AttnMeta:
        cu_q, kv_len, page_table = self._upload(
            np.array([0, *accumulate(group.q_lens)], dtype=np.int32),
            np.array(group.kv_lens, dtype=np.int32),
            group.page_table.ravel(),
        )
        page_table = page_table.view(group.page_table.shape)
        meta = AttnMeta(cu_q, kv_len, page_table, group.q_lens, group.kv_lens, self._page_size, causal)
        meta.plan = self._backend.plan_attention(meta, decoder.num_heads // decoder.num_kv_heads)
        return meta

    def _draws(self, inputs: StepInputs) -> Draws | None:
        if not len(inputs.drawn_rows):
            return None
        rows, temperature, state = self._upload(
            inputs.drawn_rows, inputs.temperature.view(np.int32), inputs.noise_state
        )
        return Draws(inputs.drawn_rows.tolist(), rows, temperature.view(torch.float32), state)

    def _upload(self, *arrays: Ints) -> Iterable[Tensor]:
        """Host arrays of int32 to the device in one copy."""
        packed = torch.from_numpy(np.concatenate(arrays)).to(self._backend.device)
        return packed.split_with_sizes([len(array) for array in arrays])
