"""The forwards of `--compile`, each one function of C++: the target from token ids to its greedy choice, the draft from
anchors to drafts, and the context KV."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.engine.compile.aot import Compiled, Function
from app.engine.device.base import AttentionMetadata, LayerKv
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import StepRows
from app.engine.models.rope import RotaryTable
from app.engine.sampling.sampler import greedy
from app.engine.sequence import NOT_FINITE
from app.engine.step.forward import DraftTensors, Forward, TargetOutput, TargetTensors


class CompiledForward:
    """The compiled `functions` of a forward, in the place of operators. No step may be between its plan and its end."""

    def __init__(self, forward: Forward, compiled: Sequence[Compiled]) -> None:
        self._numbers = torch.arange(len(forward.rotary.tables[0]), dtype=torch.int32)
        self._max_rows = forward.sampler.max_rows
        self.target_step, *of_draft = compiled
        self.draft_step: Compiled | None = None
        if forward.drafter:
            self._first_draft_row = forward.drafter.model.config.first_draft_row
            self.draft_step, forward.drafter.context_step = of_draft

    def run_target(self, token_ids: Tensor, tensors: TargetTensors, *, greedy: bool) -> TargetOutput:
        (rows,), numbers, logits_indices = tensors.inputs.groups, self._numbers, tensors.inputs.logits_indices
        num_logits = len(logits_indices)
        greedy = greedy and 0 < num_logits <= self._max_rows
        step = _TargetInputs(
            token_ids=token_ids,
            logits_indices=logits_indices if num_logits else numbers[:1],  # an exported size is at least 1
            choice_rows=numbers[: num_logits if greedy else 1],
            seq_ids=rows.seq_ids,
            position_offsets=rows.position_offsets,
            query_start_loc=rows.query_start_loc,
            seq_lens=rows.seq_lens,
            pages=rows.page_table,
        )
        hidden, choices, positions, slot_mapping, *features = self.target_step(*step)
        chosen = choices if greedy else None
        return TargetOutput(hidden[:num_logits], chosen, features[0] if features else None, positions, slot_mapping)

    def draft(self, tensors: DraftTensors) -> Tensor | None:
        (rows,), anchors = tensors.inputs.groups, tensors.inputs.anchors
        block = rows.query_lens[0]
        if self.draft_step is None or len(anchors) * (block - self._first_draft_row) > self._max_rows:
            return None
        step = _DraftInputs(anchors, rows.position_offsets, rows.seq_lens, rows.page_table, self._numbers[:block])
        (drafts,) = self.draft_step(*step)
        return drafts


def functions(forward: Forward) -> list[Function]:
    """Return what there is to compile: the target, then the draft and its context KV if there is one."""
    of_draft = [draft_function(forward.drafter), context_function(forward.drafter)] if forward.drafter else []
    return [target_function(forward), *of_draft]


class _TargetInputs(NamedTuple):
    """Arguments of the compiled target, all int32.

    TargetTensors of one group of rows. `choice_rows` [C] are those of the logit rows whose next token is chosen.
    """

    token_ids: Tensor
    logits_indices: Tensor
    choice_rows: Tensor
    seq_ids: Tensor
    position_offsets: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    pages: Tensor


class _DraftInputs(NamedTuple):
    """Arguments of the compiled draft, likewise. `in_block` [w] are the numbers from 0 on of a block's rows."""

    anchors: Tensor
    position_offsets: Tensor
    seq_lens: Tensor
    pages: Tensor
    in_block: Tensor


def target_function(forward: Forward) -> Function:
    """Return the function of `_TargetInputs` that is (hidden, choices, positions, slots), then features if any."""
    model, pool = forward.target, forward.pool
    config, backend, page_size = model.config, forward.backend, pool.layers[0].k.shape[1]

    def target_step(flat: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        x = _TargetInputs(*inputs)
        *layers, turns = flat
        numbers = torch.arange(x.token_ids.shape[0], dtype=torch.int32)
        meta = AttentionMetadata(x.query_start_loc, x.seq_lens, x.pages, [x.token_ids.shape[0]], [], page_size)
        positions, slot_mapping = backend.positions_and_slots(
            x.seq_ids, x.position_offsets, numbers, x.pages, page_size
        )
        rows = StepRows(backend.rotation_at((turns,), positions), slot_mapping, [meta])
        hidden, features = model.forward(x.token_ids, rows, _Layers.of(layers))
        hidden = hidden[x.logits_indices]
        choices, is_lost = greedy(backend.linear(hidden[x.choice_rows], model.lm_head))
        found = (hidden, choices.masked_fill(is_lost, NOT_FINITE), positions, slot_mapping)
        return found if features is None else (*found, features)

    num_seqs, num_rows = 2, 6
    examples = _TargetInputs(
        token_ids=_zeros(num_rows),
        logits_indices=_zeros(num_rows - 1),
        choice_rows=_zeros(num_rows - 2),
        seq_ids=_zeros(num_rows),
        position_offsets=_zeros(num_seqs),
        query_start_loc=_zeros(num_seqs + 1),
        seq_lens=_zeros(num_seqs),
        pages=_zeros(num_seqs, 5),
    )
    settings = (config, model.target_layer_ids, page_size)
    return Function("target", settings, target_step, model, _flat(pool, forward.rotary), examples)


def draft_function(drafter: DFlashDrafter) -> Function:
    """Return the function of `_DraftInputs` that is (drafts,)."""
    model, pool, backend = drafter.model, drafter.pool, drafter.backend
    config, page_size = model.config, pool.layers[0].k.shape[1]

    def draft_step(flat: list[Tensor], *inputs: Tensor) -> tuple[Tensor]:
        x = _DraftInputs(*inputs)
        *layers, turns = flat
        block = x.in_block.shape[0]
        numbers = torch.arange(x.anchors.shape[0] * block, dtype=torch.int32)
        starts = torch.arange(x.anchors.shape[0] + 1, dtype=torch.int32) * block
        meta = AttentionMetadata(starts, x.seq_lens, x.pages, [numbers.shape[0]], [], page_size)
        positions, slot_mapping = backend.positions_and_slots(
            numbers // block, x.position_offsets, numbers, x.pages, page_size
        )
        rows = StepRows(backend.rotation_at((turns,), positions), slot_mapping, [meta])
        embedded = backend.embed_blocks(x.anchors, config.mask_token_id, block, model.embedding)
        blocks = model.forward(embedded, rows, _Layers.of(layers)).view(-1, block, embedded.shape[1])
        predicting = blocks[:, config.first_draft_row :]
        drafts = backend.linear(predicting.flatten(0, 1), model.lm_head).argmax(dim=-1).view(predicting.shape[:2])
        return (model.in_target_vocabulary(drafts).to(torch.int32),)

    num_blocks, num_rows = 2, 3
    examples = _DraftInputs(
        anchors=_zeros(num_blocks),
        position_offsets=_zeros(num_blocks),
        seq_lens=_zeros(num_blocks),
        pages=_zeros(num_blocks, 5),
        in_block=_zeros(num_rows),
    )
    return Function("draft", (config, page_size), draft_step, model, _flat(pool, drafter.rotary), examples)


def context_function(drafter: DFlashDrafter) -> Function:
    """Return the function of (features, positions, slots) that writes context KV."""
    context, pool, backend = drafter.context, drafter.pool, drafter.backend
    num_layers = len(pool.layers)

    def context_step(
        flat: list[Tensor], features: Tensor, positions: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, ...]:
        k, v, turns = flat
        first_slots = torch.arange(num_layers, dtype=torch.int32) * (k.shape[0] // num_layers)
        slots = (slot_mapping[:, None] + first_slots).flatten()
        context.write(features, backend.rotation_at((turns,), positions), LayerKv(k, v), slots)
        return (slot_mapping,)

    all_layers = pool.all_layers
    kept = [all_layers.k.flatten(0, 1), all_layers.v.flatten(0, 1), *_turns(drafter.rotary)]
    examples = [torch.zeros(6, drafter.model.fc.shape[1]), _zeros(6), _zeros(6)]
    return Function("context", drafter.model.config, context_step, context, kept, examples)


def _flat(pool: KvPool, rotary: RotaryTable) -> list[Tensor]:
    """Return K and V of layer after layer, each [slots, kv_heads, D], then the table of RoPE."""
    return [part.flatten(0, 1) for kv in pool.layers for part in (kv.k, kv.v)] + _turns(rotary)


def _turns(rotary: RotaryTable) -> list[Tensor]:
    """Return the table [length, D / 2, 2] of cos and sin."""
    return [torch.view_as_real(table) for table in rotary.tables]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class _Layers:
    """A KvPool as a model's forward sees it."""

    layers: list[LayerKv]

    @staticmethod
    def of(flat: Sequence[Tensor]) -> Any:
        return _Layers([LayerKv(k, v) for k, v in zip(flat[::2], flat[1::2], strict=True)])
