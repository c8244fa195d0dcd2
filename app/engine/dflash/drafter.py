"""One forward of the draft model proposes a whole block per sequence."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from app.engine.backend.base import AttentionMetadata, Backend
from app.engine.dflash.context_kv import ContextKv
from app.engine.dflash.model import DFlashModel
from app.engine.models.config import DecoderConfig
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import RotaryTable, StepRows
from app.engine.sampling.sampler import Sampler


class Drafter(Protocol):
    """What the runner needs of a draft, whatever proposes it. `decoder` has the heads its attention plan is for."""

    @property
    def decoder(self) -> DecoderConfig: ...

    def propose(
        self, request_ids: list[str], anchors: Tensor, positions: Tensor, slot_mapping: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        """Drafts [D, w - 1] of the tokens after each anchor [D]. Blocks of w rows, as many as the trained ones have or
        fewer, lie at `positions` and `slot_mapping` [D * w]."""
        ...

    def write_context(self, features: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """Take in the features [T, layers * H] of all target rows of the step."""
        ...


class DFlashDrafter:
    """Blocks `[anchor, MASK x (w - 1)]`, bidirectional inside and over the context KV; row k predicts token k.

    `fused_write` does what `write_context` does, faster; None where there is no such thing.
    """

    def __init__(
        self, model: DFlashModel, pool: KvPool, rotary: RotaryTable, sampler: Sampler, backend: Backend
    ) -> None:
        self.model = model
        self._pool = pool
        self.rotary = rotary
        self._sampler = sampler
        self._backend = backend
        self.context = ContextKv(model, backend)
        self.fused_write: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self.decoder = model.config.decoder

    def propose(
        self, request_ids: list[str], anchors: Tensor, positions: Tensor, slot_mapping: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        hidden = self.masked(anchors, positions, slot_mapping, meta)
        return self._sampler.propose(hidden, self.model.lm_head).view(anchors.shape[0], -1)

    def masked(self, anchors: Tensor, positions: Tensor, slot_mapping: Tensor, meta: AttentionMetadata) -> Tensor:
        """Hidden states [D * (w - 1), H] of the blocks' rows behind their anchors [D]; arguments as of `propose`."""
        num_blocks, model = anchors.shape[0], self.model
        num_rows = positions.shape[0] // num_blocks
        embedded = self._backend.embed_blocks(anchors, model.config.mask_token_id, num_rows, model.embedding)
        hidden = model.forward(embedded, StepRows(self.rotary.at(positions), slot_mapping, [meta]), self._pool)
        return hidden.view(num_blocks, num_rows, -1)[:, 1:].flatten(0, 1)

    def write_context(self, features: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        if self.fused_write:
            self.fused_write(features, positions, slot_mapping)
        else:
            slots = self._pool.slots_in_all_layers(slot_mapping)
            self.context.write(features, self.rotary.at(positions), self._pool.all_layers, slots)
