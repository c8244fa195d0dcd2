"""What `--compile` compiles of a step, each as one function of C++: the target from token ids to its greedy choice, the
draft from anchors to drafts, and the context KV."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.engine.backend.base import AttentionMetadata, Backend, LayerKv
from app.engine.compile.aot import Compiled, compiler
from app.engine.compile.backend import OneCall, Padded
from app.engine.compile.cache import compile_cache
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.errors import UnsupportedError
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import StepRows, rotation_at
from app.engine.sampling.sampler import greedy
from app.engine.sequence import NOT_FINITE
from app.engine.step.forward import DraftTensors, Forward, Forwarded, TargetTensors


def compile_stages(
    forward: Forward, pools: Sequence[KvPool], dtype: torch.dtype, on_compiled: Callable[[int, int], None]
) -> None:
    """Have `forward`, and the drafter if it is DFlash's, run what is compiled wherever a step's attention is one call.

    Raises UnsupportedError where there is no compiler, and for another dtype than float32.
    """
    if dtype != torch.float32:
        raise UnsupportedError(f"--compile: --dtype {str(dtype).removeprefix('torch.')} is not supported yet")
    if not shutil.which(compiler()):
        raise UnsupportedError(
            "--compile: there is no g++ here: install it, name another compiler in CXX, or leave it out"
        )
    drafter = forward.drafter if isinstance(forward.drafter, DFlashDrafter) else None
    total = 3 if drafter else 1
    on_compiled(0, total)
    with compile_cache() as folder:
        forward.fused_forward = _target(forward, pools[0], folder)
        on_compiled(1, total)
        if drafter:
            forward.fused_propose = _draft(forward, drafter, pools[1], folder)
            on_compiled(2, total)
            drafter.fused_write = _context(drafter, pools[1], folder)
            on_compiled(3, total)


class _TargetInputs(NamedTuple):
    """What `_target` compiles a function of, all int32.

    TargetTensors of one group of rows; `starts` and `ends` [S] of each sequence's rows among all; numbers from 0 on, of
    the rows a sequence can have here [Q], and of the tokens [L]. `choice_rows` [C] are those of the logit rows whose
    next token is chosen.
    """

    token_ids: Tensor
    logits_indices: Tensor
    choice_rows: Tensor
    seq_ids: Tensor
    position_offsets: Tensor
    starts: Tensor
    ends: Tensor
    seq_lens: Tensor
    pages: Tensor
    queries: Tensor
    tokens: Tensor


class _DraftInputs(NamedTuple):
    """What `_draft` compiles a function of, likewise; `in_block` [w] are the numbers from 0 on of a block's rows."""

    anchors: Tensor
    position_offsets: Tensor
    seq_lens: Tensor
    pages: Tensor
    in_block: Tensor
    tokens: Tensor


def _target(forward: Forward, pool: KvPool, folder: Path) -> Callable[[Tensor, TargetTensors, bool], Forwarded | None]:
    """`Forward.fused_forward`: it takes steps whose attention is one call."""
    model, max_rows = forward.target, forward.sampler.max_rows
    config, page_size = model.config, pool.layers[0].k.shape[1]
    group = config.num_heads // config.num_kv_heads

    def target_step(flat: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        x = _TargetInputs(*inputs)
        *layers, cos, sin = flat
        numbers = torch.arange(x.token_ids.shape[0], dtype=torch.int32)
        unseen = x.seq_lens.unsqueeze(1) - (x.ends - x.starts).unsqueeze(1)
        seen = torch.minimum(unseen + x.queries, x.seq_lens.unsqueeze(1) - 1)
        padded_places = x.seq_ids * x.queries.shape[0] + numbers - x.starts[x.seq_ids]
        plan = Padded(x.pages, _mask(seen, x.tokens, group), padded_places)
        meta = AttentionMetadata(
            x.ends, x.seq_lens, x.pages, [x.token_ids.shape[0]], [], page_size, causal=True, plan=plan
        )
        positions, slot_mapping = Backend.positions_and_slots(
            forward.backend, x.seq_ids, x.position_offsets, numbers, x.pages, page_size
        )
        rows = StepRows(rotation_at((cos, sin), positions), slot_mapping, [meta])
        hidden, features = model.forward(x.token_ids, rows, _Layers.of(layers))
        hidden = hidden[x.logits_indices]
        choices, is_lost = greedy(torch.nn.functional.linear(hidden[x.choice_rows], model.lm_head))
        found = (hidden, choices.masked_fill(is_lost, NOT_FINITE), positions, slot_mapping)
        return found if features is None else (*found, features)

    num_seqs, max_q, max_kv = 2, 3, 5 * page_size - 1
    num_rows = num_seqs * max_q
    examples = _TargetInputs(
        token_ids=_zeros(num_rows),
        logits_indices=_zeros(num_rows - 1),
        choice_rows=_zeros(num_rows - 2),
        seq_ids=_zeros(num_rows),
        position_offsets=_zeros(num_seqs),
        starts=_zeros(num_seqs),
        ends=_zeros(num_seqs),
        seq_lens=_zeros(num_seqs) + max_kv,
        pages=_zeros(num_seqs, -(-max_kv // page_size)),
        queries=_zeros(max_q),
        tokens=_zeros(max_kv),
    )
    kept = [*_flat(pool), *forward.rotary.tables]
    settings = (config, model.target_layer_ids, page_size)
    run = Compiled("target", settings, target_step, model, kept, examples, _all_open(examples), folder)
    numbers = torch.arange(len(forward.rotary.tables[0]), dtype=torch.int32)

    def fused(token_ids: Tensor, inputs: TargetTensors, chooses: bool) -> Forwarded | None:
        (rows,) = inputs.groups
        meta = rows.meta
        if not isinstance(meta.plan, OneCall):
            return None
        logits_indices = numbers[: len(token_ids)] if inputs.logits_indices is None else inputs.logits_indices
        num_logits = len(logits_indices)
        chooses = chooses and 0 < num_logits <= max_rows
        step = _TargetInputs(
            token_ids=token_ids,
            logits_indices=logits_indices if num_logits else numbers[:1],  # there is no function of nothing
            choice_rows=numbers[: num_logits if chooses else 1],
            seq_ids=rows.seq_ids,
            position_offsets=rows.position_offsets,
            starts=meta.query_start_loc[:-1],
            ends=meta.query_start_loc[1:],
            seq_lens=meta.seq_lens,
            pages=meta.page_table,
            queries=numbers[: meta.plan.max_q],
            tokens=numbers[: meta.plan.max_kv],
        )
        hidden, choices, positions, slot_mapping, *features = run(*step)
        return Forwarded(
            hidden[:num_logits],
            choices if chooses else None,
            features[0] if features else None,
            positions,
            slot_mapping,
        )

    return fused


def _draft(
    forward: Forward, drafter: DFlashDrafter, pool: KvPool, folder: Path
) -> Callable[[DraftTensors], Tensor | None]:
    """`Forward.fused_propose`: it takes steps whose attention is one call."""
    model, max_rows = drafter.model, forward.sampler.max_rows
    config, page_size = model.config, pool.layers[0].k.shape[1]
    group = config.decoder.num_heads // config.decoder.num_kv_heads

    def propose(flat: list[Tensor], *inputs: Tensor) -> tuple[Tensor]:
        x = _DraftInputs(*inputs)
        *layers, cos, sin = flat
        block = x.in_block.shape[0]
        numbers = torch.arange(x.anchors.shape[0] * block, dtype=torch.int32)
        plan = Padded(x.pages, _mask((x.seq_lens - 1).unsqueeze(1).expand(-1, block), x.tokens, group), None)
        meta = AttentionMetadata(
            x.seq_lens, x.seq_lens, x.pages, [numbers.shape[0]], [], page_size, causal=False, plan=plan
        )
        positions, slot_mapping = Backend.positions_and_slots(
            forward.backend, numbers // block, x.position_offsets, numbers, x.pages, page_size
        )
        rows = StepRows(rotation_at((cos, sin), positions), slot_mapping, [meta])
        embedded = forward.backend.embed_blocks(x.anchors, config.mask_token_id, block, model.embedding)
        hidden = model.forward(embedded, rows, _Layers.of(layers)).view(-1, block, embedded.shape[1])[:, 1:]
        return (torch.nn.functional.linear(hidden, model.lm_head).argmax(dim=-1).to(torch.int32),)

    num_blocks, num_rows, max_kv = 2, 3, 5 * page_size - 1
    examples = _DraftInputs(
        anchors=_zeros(num_blocks),
        position_offsets=_zeros(num_blocks),
        seq_lens=_zeros(num_blocks) + max_kv,
        pages=_zeros(num_blocks, -(-max_kv // page_size)),
        in_block=_zeros(num_rows),
        tokens=_zeros(max_kv),
    )
    kept = [*_flat(pool), *drafter.rotary.tables]
    run = Compiled("draft", (config, page_size), propose, model, kept, examples, _all_open(examples), folder)
    numbers = torch.arange(len(drafter.rotary.tables[0]), dtype=torch.int32)

    def fused(inputs: DraftTensors) -> Tensor | None:
        rows, meta = inputs.rows, inputs.rows.meta
        if not isinstance(meta.plan, OneCall) or len(inputs.anchors) * (meta.plan.max_q - 1) > max_rows:
            return None
        of_block, tokens = numbers[: meta.plan.max_q], numbers[: meta.plan.max_kv]
        (drafts,) = run(
            *_DraftInputs(inputs.anchors, rows.position_offsets, meta.seq_lens, meta.page_table, of_block, tokens)
        )
        return drafts

    return fused


def _context(drafter: DFlashDrafter, pool: KvPool, folder: Path) -> Callable[[Tensor, Tensor, Tensor], None]:
    """`DFlashDrafter.fused_write`."""
    context, layers = drafter.context, [pool.all_layers.k.flatten(0, 1), pool.all_layers.v.flatten(0, 1)]

    def write(
        flat: list[Tensor], features: Tensor, positions: Tensor, slot_mapping: Tensor, first_slots: Tensor
    ) -> Tensor:
        k, v, cos, sin = flat
        slots = (slot_mapping[:, None] + first_slots).flatten()
        context.write(features, rotation_at((cos, sin), positions), LayerKv(k, v), slots)
        return slot_mapping

    rows = 6
    first_slots = pool.slots_in_all_layers(torch.zeros(1, dtype=torch.int32))
    examples = [
        torch.zeros(rows, drafter.model.fc.shape[1], dtype=layers[0].dtype),
        *torch.zeros(2, rows, dtype=torch.int32),
        first_slots,
    ]
    kept = [*layers, *drafter.rotary.tables]
    open_sizes = [[0], [0], [0], []]
    run = Compiled("context", drafter.model.config, write, context, kept, examples, open_sizes, folder)

    def fused(features: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        run(features, positions, slot_mapping, first_slots)

    return fused


def _flat(pool: KvPool) -> list[Tensor]:
    """K and V of layer after layer, each [slots, kv_heads, D]."""
    return [part.flatten(0, 1) for kv in pool.layers for part in (kv.k, kv.v)]


def _mask(seen: Tensor, tokens: Tensor, group: int) -> Tensor:
    """[S, 1, G * Q, L] for rows [S, Q] that see the tokens up to number `seen`."""
    return torch.where(tokens <= seen.repeat(1, group).unsqueeze(2), 0.0, -torch.inf).unsqueeze(1)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _all_open(examples: Sequence[Tensor]) -> list[list[int]]:
    return [list(range(example.dim())) for example in examples]


@dataclass(frozen=True, slots=True)
class _Layers:
    """A KvPool as a model's forward sees it."""

    layers: list[LayerKv]

    @staticmethod
    def of(flat: Sequence[Tensor]) -> Any:
        return _Layers([LayerKv(k, v) for k, v in zip(flat[::2], flat[1::2], strict=True)])
