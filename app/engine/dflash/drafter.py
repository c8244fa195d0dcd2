"""One forward of the draft model proposes a whole block per sequence."""

from torch import Tensor

from app.engine.device.base import AttentionMetadata, Backend, Rotation
from app.engine.dflash.context_kv import ContextKv
from app.engine.dflash.model import DFlashModel
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import StepRows
from app.engine.models.rope import RotaryTable
from app.engine.sampling.sampler import Sampler


class DFlashDrafter:
    """Blocks of an anchor and masks over the context KV, each layer under its mask (DFlash, arXiv 2602.06036).

    Row k of a block predicts the k-th token after the anchor, or the next one if `first_draft_row` is 0.
    """

    def __init__(
        self, model: DFlashModel, pool: KvPool, rotary: RotaryTable, sampler: Sampler, backend: Backend
    ) -> None:
        self.model = model
        self.rotary = rotary
        self.context = ContextKv(model, backend)
        self.decoder = model.config.decoder
        self.pool = pool
        self._sampler = sampler
        self.backend = backend

    def propose(
        self, request_ids: list[str], anchors: Tensor, positions: Tensor, slot_mapping: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        """Return drafts [D, w - first_draft_row] of the tokens after each anchor [D]. Blocks of w rows, at most the
        trained number, lie at `positions` and `slot_mapping` [D * w]."""
        hidden = self.predicting(anchors, positions, slot_mapping, meta)
        if self.model.path is not None:
            return self.model.path.propose(hidden, self.model.lm_head, anchors, self._sampler.max_greedy_rows)
        drafts = self._sampler.propose(hidden, self.model.lm_head).view(anchors.shape[0], -1)
        return self.model.in_target_vocabulary(drafts)

    def predicting(self, anchors: Tensor, positions: Tensor, slot_mapping: Tensor, meta: AttentionMetadata) -> Tensor:
        """Return hidden states [D * drafts, H] of the rows that predict the tokens after each anchor [D]."""
        num_blocks, model = anchors.shape[0], self.model
        num_rows = positions.shape[0] // num_blocks
        embedded = self.backend.embed_blocks(anchors, model.config.mask_token_id, num_rows, model.embedding)
        if model.mask_row is not None:
            embedded.view(num_blocks, num_rows, -1)[:, 1:] = model.mask_row
        if (scale := model.config.embedding_scale) != 1.0:
            embedded = embedded * scale
        hidden = model.forward(embedded, StepRows(self.rotary.at(positions), slot_mapping, [meta]), self.pool)
        return hidden.view(num_blocks, num_rows, -1)[:, model.config.first_draft_row :].flatten(0, 1)

    def write_context(
        self, features: Tensor, positions: Tensor, slot_mapping: Tensor, rotation: Rotation | None = None
    ) -> None:
        """Write the context KV of features [T, layers * H] of target rows at positions and slots [T].

        `rotation` is the draft's RoPE at these positions, or None to look it up.
        """
        slots = self.pool.slots_in_all_layers(slot_mapping)
        self.context.write(features, rotation or self.rotary.at(positions), self.pool.all_layers, slots)
