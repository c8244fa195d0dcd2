"""The two forwards of a step, on tensors of one packed copy. The same code runs eagerly and is captured in graphs."""

import weakref
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from app.engine.arrays import arrays, with_arrays
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import AttentionMetadata, Backend
from app.engine.device.transfer import Packed
from app.engine.dflash.context_kv import PendingContext
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import StepRows
from app.engine.models.rope import RotaryTable
from app.engine.models.target import Target
from app.engine.sampling.sampler import Sampler
from app.engine.step.inputs import DraftInputs, RowGroup, TargetInputs

Inputs = TypeVar("Inputs", DraftInputs[Any], TargetInputs[Any])


@dataclass(frozen=True, slots=True)
class OnDevice(Generic[Inputs]):
    """The inputs of a forward as tensors, and the metadata of their groups, which are for the layers of `decoder`.

    `packed` writes the tensors' memory. Without it they are the host's arrays.
    """

    inputs: Inputs
    metas: list[AttentionMetadata]
    packed: Packed | None
    decoder: DecoderConfig


DraftTensors = OnDevice[DraftInputs[Tensor]]
TargetTensors = OnDevice[TargetInputs[Tensor]]


@dataclass(eq=False)
class Forward:
    """Draft, and target with context KV and verify. A group has at most `max_rows` rows."""

    target: Target
    pool: KvPool
    rotary: RotaryTable
    sampler: Sampler
    backend: Backend
    page_size: int
    max_rows: int
    drafter: DFlashDrafter | None

    def __post_init__(self) -> None:
        forward = weakref.proxy(self)  # a cycle would keep the KV pools of the profile run until some collection
        self.pending_context = PendingContext(lambda *rows: forward.drafter.write_context(*rows), self.max_rows)
        self.row_numbers = torch.arange(self.max_rows, dtype=torch.int32, device=self.backend.device)

    def on_device(self, inputs: Inputs, *, captured: bool = False) -> OnDevice[Inputs]:
        """Return `inputs` as tensors, after one copy or none, with their attention planned."""
        packed = Packed(arrays(inputs), self.backend) if captured or not self.backend.reads_arrays else None
        tensors = with_arrays(inputs, lambda name, array: packed.tensors[name] if packed else torch.from_numpy(array))
        size = self.page_size
        metas = [
            AttentionMetadata(g.query_start_loc, g.seq_lens, g.page_table, g.query_lens, g.host_seq_lens, size)
            for g in tensors.groups
        ]
        decoder = self.drafter.decoder if self.drafter and isinstance(inputs, DraftInputs) else self.target.config
        on_device = OnDevice(tensors, metas, packed, decoder)
        self.plan(on_device, inputs)
        return on_device

    def plan(self, tensors: OnDevice[Inputs], inputs: Inputs) -> None:
        """Plan attention for the host's lengths of `inputs`, once for all layers of a mask.

        The lengths in the metadata itself do not change. In a graph they are those of the capture.
        """
        heads_per_kv = tensors.decoder.num_heads // tensors.decoder.num_kv_heads
        for meta, group in zip(tensors.metas, inputs.groups, strict=True):
            planned = replace(meta, query_lens=group.query_lens, host_seq_lens=group.host_seq_lens)
            for mask in dict.fromkeys(tensors.decoder.masks):
                meta.plans[mask] = self.backend.plan_attention(planned, mask, heads_per_kv)

    def draft(self, tensors: DraftTensors) -> Tensor:
        """Return drafts [D, w - first_draft_row], integers, of the tokens after each anchor, of blocks of w rows."""
        assert self.drafter is not None, "a batch with drafts came to a runner without a drafter"
        inputs, (group,), (meta,) = tensors.inputs, tensors.inputs.groups, tensors.metas
        positions, slot_mapping = self.positions_and_slots(group, group.draft_table)
        return self.drafter.propose(inputs.request_ids, inputs.anchors, positions, slot_mapping, meta)

    def deciding(self, tensors: TargetTensors, drafts: Tensor | None) -> Tensor:
        """Return the hidden states [R, H] of the logit rows, after which the target chooses.

        KV of all rows is written, and their context rows are added to `pending_context`.
        """
        inputs, metas, token_ids = tensors.inputs, tensors.metas, tensors.inputs.token_ids
        if drafts is not None:
            drafted = torch.cat((token_ids, drafts.flatten().to(torch.int32)))
            token_ids = drafted.index_select(0, inputs.token_source)
        parts = [self.positions_and_slots(group) for group in inputs.groups]
        positions, slot_mapping = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        recurrent = inputs.recurrent
        if recurrent and recurrent.decodes:  # begin where the step in flight leaves them
            starts = inputs.groups[0].position_offsets + inputs.groups[0].query_start_loc[:-1]
            recurrent = replace(recurrent, decodes=replace(recurrent.decodes, starts=starts))
        rows = StepRows(self.rotary.at(positions), slot_mapping, metas, recurrent)
        hidden, features = self.target.forward(token_ids, rows, self.pool)
        if self.drafter is not None and features is not None:
            rotation = rows.rotation if self.drafter.rotary is self.rotary else None
            self.pending_context.add(features, positions, self._draft_slots(inputs.groups, slot_mapping), rotation)
        indices = inputs.logits_indices
        return hidden[indices] if indices.shape[0] < token_ids.shape[0] else hidden

    def verify(
        self, inputs: TargetInputs[Tensor], choices: Tensor, drafts: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Return `engine.verify.verify` of the choices [R] and drafts [D, columns]."""
        return self.backend.verify(choices, drafts, inputs.logits_start, inputs.num_drafts, inputs.draft_index, out)

    def positions_and_slots(self, group: RowGroup[Tensor], page_table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the positions and slots of a group's rows. If it has none, make them by `page_table` or its table."""
        if group.positions is not None and group.slot_mapping is not None:
            return group.positions, group.slot_mapping
        rows = group.seq_ids, group.position_offsets, self.row_numbers[: len(group.seq_ids)]
        table = group.page_table if page_table is None else page_table
        return self.backend.positions_and_slots(*rows, table, self.page_size)

    def _draft_slots(self, groups: list[RowGroup[Tensor]], slot_mapping: Tensor) -> Tensor:
        """Return the slots of the rows' context KV: the target's `slot_mapping`, or those on separate draft pages."""
        if groups[0].draft_table is not None:
            slots = [self.positions_and_slots(group, group.draft_table)[1] for group in groups]
        else:
            slots = [group.draft_slots for group in groups if group.draft_slots is not None] or [slot_mapping]
        return slots[0] if len(slots) == 1 else torch.cat(slots)
