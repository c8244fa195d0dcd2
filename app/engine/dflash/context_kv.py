"""Context KV: what the draft attends to, computed once per target row from the target's features."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from app.engine.device.base import Backend, LayerKv, ProjectedRows, Rotation
from app.engine.dflash.model import DFlashModel
from app.engine.models.layers import Attention, frozen

MAX_PENDING = 32
"""Steps that may be pending. Their features stay in memory meanwhile; 32 leave 1 % of the cost."""


class ContextKv(nn.Module):
    """Features -> fc -> hidden_norm -> K and V of all draft layers in one projection -> k_norm -> RoPE -> pool.

    Context rows never pass through a draft layer (DFlash, arXiv 2602.06036), so their K and V depend on the feature and
    the position only.
    """

    def __init__(self, model: DFlashModel, backend: Backend) -> None:
        super().__init__()
        decoder = model.config.decoder
        self.fc, self.hidden_norm = model.fc, model.hidden_norm
        self._eps = decoder.rms_norm_eps
        attentions = [cast(Attention, layer.attention) for layer in model.layers]
        self.kv, self.kv_bias = model.context_kv, model.context_bias
        self.k_norm = frozen(torch.stack([cast(Tensor, attention.k_norm) for attention in attentions]))
        self.ones = frozen(torch.ones_like(self.k_norm[0]))
        self._heads = 2 * decoder.num_kv_heads, decoder.head_dim
        self._backend = backend

    def write(self, features: Tensor, rotation: Rotation, all_layers: LayerKv, slot_mapping: Tensor) -> None:
        """Write the context KV of features [T, layers * H], with `rotation` at the rows' positions.

        The slots [T * layers] of `all_layers` come from `KvPool.slots_in_all_layers`. A number that is not finite
        becomes 0, so a bad feature only costs acceptance, and leaves no NaN on pages that other sequences get.
        """
        backend = self._backend
        weights = self.fc, self.hidden_norm, self.kv, self.kv_bias, self.k_norm
        if backend.write_context(features, *weights, self._eps, rotation, all_layers, slot_mapping):
            return
        context = backend.rms_norm(backend.linear(features, self.fc), self.hidden_norm, self._eps)
        context = context.nan_to_num(0.0, 0.0, 0.0)
        kv = backend.linear(context, self.kv, self.kv_bias).view(-1, *self._heads)
        norms = self.ones, self.k_norm, self._eps
        backend.context_into_kv(ProjectedRows(kv, *norms, rotation, all_layers, slot_mapping))


class PendingContext:
    """Context rows of plain steps that are not written yet.

    While the same sequences decode without drafts, nothing reads their context KV. One write costs many small
    operators, so the rows of up to MAX_PENDING steps are written at once. On a CPU that cuts the cost from 6 to 9 % of
    a plain step to 1 % (tools/lab/NOTES.md). Until the write no block may be drafted, and only the next rows of the
    same sequences may be stored.
    """

    def __init__(self, write_rows: Callable[..., None], max_rows: int) -> None:
        """`write_rows` takes features [T, layers * H], positions and slots [T] of at most `max_rows` rows, and the
        rotation at these positions if it is known."""
        self._write_rows = write_rows
        self._max_rows = max_rows
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rotation: Rotation | None = None
        self._sequences: Sequence[object] = ()
        self._may_wait = False
        self._num_committed = 0

    def begin_step(self, sequences: Sequence[object] | None) -> None:
        """Begin a step of `sequences`, which decode without drafts; None begins any other step.

        Pending rows are written first, unless the previous step had the same sequences.
        """
        self._num_committed = len(self._steps)
        if sequences is None or sequences != self._sequences:
            self.write()
        self._sequences, self._may_wait = sequences or (), sequences is not None
        self._num_committed = len(self._steps)

    def add(self, features: Tensor, positions: Tensor, slot_mapping: Tensor, rotation: Rotation | None = None) -> None:
        """Add the rows of this step, and write all pending rows unless they may wait longer.

        A `rotation` of the draft's RoPE that is known spares a lookup, if no other step's rows are written with them.
        """
        self._rotation = None if self._steps else rotation
        self._steps.append((features, positions, slot_mapping))
        max_steps = min(MAX_PENDING, self._max_rows // len(slot_mapping))
        if not self._may_wait or len(self._steps) >= max_steps:
            self.write()

    def write(self) -> None:
        """Write all pending rows."""
        if self._steps:
            rows = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self._steps, strict=True)]
            self._write_rows(*rows, self._rotation)
            self._steps.clear()

    def rollback(self) -> None:
        """Drop the rows of the step that failed. The rows of steps before it stay pending."""
        del self._steps[self._num_committed :]
        self._sequences = ()
