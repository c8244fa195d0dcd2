"""The two forwards of a step, on tensors of one packed copy. The same code runs eagerly and is captured in graphs."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from app.engine.arrays import Ints
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import AttentionMetadata, Backend, Rotation
from app.engine.device.transfer import Packed
from app.engine.dflash.context_kv import PendingContext
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import StepRows
from app.engine.models.rope import RotaryTable
from app.engine.models.state_pool import RecurrentRows, SequenceRows
from app.engine.models.target import Target
from app.engine.sampling.metadata import SamplingMetadata
from app.engine.sampling.sampler import Sampler
from app.engine.step.inputs import DraftInputs, RowGroup, TargetInputs


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A RowGroup on the device: R rows of sequences `seq_ids` [R] int32, for the layers of `decoder`.

    `position_offsets` [S] int32 is a row's position less its number in the group. `places` are the positions and the
    slots [R] int32, or None if the device computes them.
    """

    seq_ids: Tensor
    position_offsets: Tensor
    meta: AttentionMetadata
    decoder: DecoderConfig
    places: tuple[Tensor, Tensor] | None = None


class DraftTensors(NamedTuple):
    """DraftInputs on the device."""

    request_ids: list[str]
    anchors: Tensor
    prev_rows: Tensor
    rows: AttentionInputs


class RecurrentTensors(NamedTuple):
    """RecurrentInputs on the device."""

    slots: Tensor
    next_slots: Tensor
    chunk_starts: Tensor
    chunk_lens: Tensor
    host_chunk_lens: list[int]
    width: int
    static: bool


class TargetTensors(NamedTuple):
    """TargetInputs on the device. `logits_indices` is None if all rows are."""

    token_ids: Tensor
    token_source: Tensor
    logits_indices: Tensor | None
    logits_start: Tensor
    num_drafts: Tensor
    draft_index: Tensor
    prev_rows: Tensor
    groups: list[AttentionInputs]
    recurrent: RecurrentTensors | None


class TargetOutput(NamedTuple):
    """Result of the target's layers: hidden states [R, H] of the logit rows, positions and slots [T].

    `choices` [R] int64 are greedy ones that are already made. `features` [T, layers * H] are there with a draft.
    `rotation` is the target's at these positions, if it was looked up.
    """

    hidden: Tensor
    choices: Tensor | None
    features: Tensor | None
    positions: Tensor
    slot_mapping: Tensor
    rotation: Rotation | None = None


class CompiledSteps(Protocol):
    """Forwards that run in the place of those by operators."""

    def run_target(self, token_ids: Tensor, inputs: TargetTensors, *, greedy: bool) -> TargetOutput:
        """Return `Forward.run_target`."""

    def draft(self, inputs: DraftTensors) -> Tensor | None:
        """Return `Forward.draft`, or None if these inputs run by operators."""


class Forward:
    """Draft, and target with context KV and verify. A group has at most `max_rows` rows."""

    compiled: CompiledSteps | None = None

    def __init__(
        self,
        target: Target,
        pool: KvPool,
        rotary: RotaryTable,
        sampler: Sampler,
        backend: Backend,
        page_size: int,
        max_rows: int,
        drafter: DFlashDrafter | None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.rotary = rotary
        self.sampler = sampler
        self.backend = backend
        self.pool = pool
        self._page_size = page_size
        forward = weakref.proxy(self)  # a cycle would keep the KV pools of the profile run until some collection
        self.pending_context = PendingContext(lambda *rows: forward._drafter.write_context(*rows), max_rows)
        self.row_numbers = torch.arange(max_rows, dtype=torch.int32, device=backend.device)

    def arrays(self, inputs: DraftInputs | TargetInputs) -> list[Ints]:
        """Return the arrays that `draft_tensors` or `target_tensors` find in a `Packed`."""
        groups = [inputs.group] if isinstance(inputs, DraftInputs) else inputs.groups
        if not self.backend.lengths_on_host:
            return inputs.arrays
        return inputs.arrays + [array for group in groups for array in group.positions_and_slots(self._page_size)]

    def draft_tensors(self, inputs: DraftInputs, packed: Packed) -> DraftTensors:
        """Return `inputs` as `packed` holds them. Attention has yet to be planned."""
        anchors, prev_rows, *group = packed.tensors
        rows = self._rows(inputs.group, group[:5], group[5:], self._drafter.decoder)
        return DraftTensors(inputs.request_ids, anchors, prev_rows, rows)

    def target_tensors(self, inputs: TargetInputs, packed: Packed) -> TargetTensors:
        """Return `inputs` as `packed` holds them. Attention has yet to be planned."""
        token_ids, source, logits_indices, logits_start, num_drafts, draft_index, prev_rows, *rest = packed.tensors
        decoder = self.target.config
        parts = iter(rest)
        shares = [[next(parts) for _ in range(5)] for _ in inputs.groups]
        states = [next(parts) for _ in range(4)] if inputs.recurrent else []
        places = [[next(parts), next(parts)] if self.backend.lengths_on_host else [] for _ in inputs.groups]
        groups = [self._rows(*part, decoder) for part in zip(inputs.groups, shares, places, strict=True)]
        every_row = len(logits_indices) == len(token_ids)
        logits = None if every_row else logits_indices, logits_start, num_drafts, draft_index
        recurrent = None
        if inputs.recurrent is not None:
            host = inputs.recurrent
            slots, next_slots, starts, lens = states
            recurrent = RecurrentTensors(
                slots, next_slots, starts, lens, host.chunk_lens.tolist(), host.width, host.static
            )
        return TargetTensors(token_ids, source, *logits, prev_rows, groups, recurrent)

    def plan(self, rows: AttentionInputs, group: RowGroup | AttentionMetadata) -> None:
        """Plan the attention of `rows` for the lengths of `group`, after their tensors were sent.

        Layers of a mask share a plan. The lengths in the meta itself stay as they were made. In a graph they are those
        of the capture.
        """
        meta, lengths = rows.meta, (group.query_lens, group.host_seq_lens)
        planned = AttentionMetadata(meta.query_start_loc, meta.seq_lens, meta.page_table, *lengths, meta.page_size)
        heads_per_kv = rows.decoder.num_heads // rows.decoder.num_kv_heads
        for mask in dict.fromkeys(rows.decoder.masks):
            meta.plans[mask] = self.backend.plan_attention(planned, mask, heads_per_kv)

    def draft(self, inputs: DraftTensors) -> Tensor:
        """Return drafts [D, w - first_draft_row], integers, of the tokens after each anchor, of blocks of w rows."""
        if self.compiled and (drafts := self.compiled.draft(inputs)) is not None:
            return drafts
        positions, slot_mapping = self._positions_and_slots(inputs.rows)
        return self._drafter.propose(inputs.request_ids, inputs.anchors, positions, slot_mapping, inputs.rows.meta)

    def choose(
        self, inputs: TargetTensors, drafts: Tensor | None, draws: Sequence[SamplingMetadata]
    ) -> tuple[Tensor, Tensor]:
        """Run the target's rows through its layers and into its KV pool, and add their context rows to
        `pending_context`.

        Returns the hidden states [R, H] of the logit rows, and the target's choice [R] int64 after each.
        """
        token_ids = inputs.token_ids
        if drafts is not None:
            token_ids = torch.cat((token_ids, drafts.flatten().to(torch.int32)))[inputs.token_source]
        out = self.run_target(token_ids, inputs, greedy=not draws)
        if self.drafter is not None and out.features is not None:
            rotation = out.rotation if self.drafter.rotary is self.rotary else None
            self.pending_context.add(out.features, out.positions, out.slot_mapping, rotation)
        choices = out.choices
        if choices is None:
            choices = self.sampler.choose(out.hidden, self.target.lm_head, draws)
        return out.hidden, choices

    def run_target(self, token_ids: Tensor, inputs: TargetTensors, *, greedy: bool) -> TargetOutput:
        """Run token ids [T] through the target's layers. If all choices are `greedy`, they may be made here."""
        if self.compiled:
            return self.compiled.run_target(token_ids, inputs, greedy=greedy)
        parts = [self._positions_and_slots(rows) for rows in inputs.groups]
        positions, slot_mapping = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        recurrent = None if inputs.recurrent is None else self._recurrent_rows(inputs.recurrent, inputs.groups)
        metas = [rows.meta for rows in inputs.groups]
        rows = StepRows(self.rotary.at(positions), slot_mapping, metas, recurrent)
        hidden, features = self.target.forward(token_ids, rows, self.pool)
        if inputs.logits_indices is not None:
            hidden = hidden[inputs.logits_indices]
        return TargetOutput(hidden, None, features, positions, slot_mapping, rows.rotation)

    def verify(self, inputs: TargetTensors, choices: Tensor, drafts: Tensor | None) -> Tensor:
        """Return `engine.verify.verify` of the choices [R] and drafts [D, columns]."""
        return self.backend.verify(choices, drafts, inputs.logits_start, inputs.num_drafts, inputs.draft_index)

    @property
    def _drafter(self) -> DFlashDrafter:
        assert self.drafter is not None, "a batch with drafts came to a runner without a drafter"
        return self.drafter

    def _recurrent_rows(self, inputs: RecurrentTensors, groups: list[AttentionInputs]) -> RecurrentRows:
        """Return the rows of decoding sequences, which are the first group, and those of each chunk alone."""
        slots, next_slots = inputs.slots.long(), inputs.next_slots.long()
        num_decodes, decodes, chunks = len(slots) - len(inputs.host_chunk_lens), None, []
        if num_decodes:
            ends = groups[0].meta.query_start_loc
            starts, counts = groups[0].position_offsets + ends[:-1], ends.diff().clamp(max=inputs.width)
            own = slots[:num_decodes], next_slots[:num_decodes], starts, counts
            decodes = SequenceRows(*own, *self._padded(groups[0], inputs.width), inputs.static)
        for i, count in enumerate(inputs.host_chunk_lens):
            one, rows = slice(i, i + 1), self.row_numbers[:count]
            of_all = slice(num_decodes + i, num_decodes + i + 1)
            own = slots[of_all], next_slots[of_all], inputs.chunk_starts[one], inputs.chunk_lens[one]
            chunks.append(SequenceRows(*own, rows[None], rows))
        return RecurrentRows(decodes, chunks)

    def _padded(self, group: AttentionInputs, width: int) -> tuple[Tensor, Tensor]:
        """Return (row [S, width] at each place, place of each row [R]) for sequences of at most `width` rows.

        A place without a row has that of a neighbour, and so does a padding row behind the width.
        """
        firsts, num_rows = group.meta.query_start_loc[:-1], len(group.seq_ids)
        rows = (firsts[:, None] + self.row_numbers[:width]).clamp(max=num_rows - 1)
        in_sequence = self.row_numbers[:num_rows] - firsts[group.seq_ids]
        return rows, group.seq_ids * width + in_sequence.clamp(max=width - 1)

    def _rows(
        self, group: RowGroup, tensors: Sequence[Tensor], places: Sequence[Tensor], decoder: DecoderConfig
    ) -> AttentionInputs:
        seq_ids, position_offsets, query_start_loc, seq_lens, page_table = tensors
        table = page_table.view(group.page_table.shape)
        lengths = list(group.query_lens), list(group.host_seq_lens)
        meta = AttentionMetadata(query_start_loc, seq_lens, table, *lengths, self._page_size)
        return AttentionInputs(seq_ids, position_offsets, meta, decoder, (places[0], places[1]) if places else None)

    def _positions_and_slots(self, rows: AttentionInputs) -> tuple[Tensor, Tensor]:
        if rows.places is not None:
            return rows.places
        row_numbers, meta = self.row_numbers[: len(rows.seq_ids)], rows.meta
        return self.backend.positions_and_slots(
            rows.seq_ids, rows.position_offsets, row_numbers, meta.page_table, meta.page_size
        )
