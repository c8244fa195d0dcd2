"""Mistakes that leave every text right, and the draft useless."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.engine.device.base import AttentionMask
from app.engine.load.engine import Engine


def with_taps_off_by_one(engine: Engine) -> None:
    engine.core.runner.forward.target.target_layer_ids = tuple(
        tap + 1 for tap in engine.core.runner.forward.target.target_layer_ids
    )


def with_taps_in_another_order(engine: Engine) -> None:
    drafter = engine.core.runner.forward.drafter
    write = drafter.write_context
    drafter.write_context = lambda tapped, *args: write(tapped.roll(engine.target.hidden_size, dims=-1), *args)


def with_mask_for_anchor(engine: Engine) -> None:
    drafter = engine.core.runner.forward.drafter
    propose = drafter.propose
    drafter.propose = lambda ids, anchors, *args: propose(
        ids, torch.full_like(anchors, engine.draft.mask_token_id), *args
    )


def with_causal_blocks(engine: Engine) -> None:
    with_masks(engine, lambda mask: mask._replace(causal=True))


def with_masks(engine: Engine, change: Callable[[AttentionMask], AttentionMask]) -> None:
    """Let the draft's layers attend under changed masks."""
    drafter = engine.core.runner.forward.drafter
    drafter.decoder = replace(drafter.decoder, masks=tuple(map(change, drafter.decoder.masks)))
    for layer, mask in zip(drafter.model.layers, drafter.decoder.masks, strict=True):
        layer.attention._mask = mask


def with_blocks_one_position_late(engine: Engine) -> None:
    drafter = engine.core.runner.forward.drafter
    propose = drafter.propose
    drafter.propose = lambda ids, anchors, positions, *args: propose(ids, anchors, positions + 1, *args)


def without_context_of_prompts(engine: Engine) -> None:
    """More rows than a block has are a prompt's here: nothing is written for them."""
    drafter = engine.core.runner.forward.drafter
    write, block = drafter.write_context, engine.sizes.block_size

    def forgetful(tapped: Tensor, positions: Tensor, *rest: Any) -> None:
        if len(positions) <= block:
            write(tapped, positions, *rest)

    drafter.write_context = forgetful


def without_hidden_norm(tensors: dict[str, Tensor]) -> None:
    tensors["hidden_norm.weight"].fill_(1.0)


def without_k_norm(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.self_attn.k_norm.weight"].fill_(1.0)


def without_own_head(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def without_own_embedding(tensors: dict[str, Tensor]) -> None:
    del tensors["embed_tokens.weight"]


IN_THE_ENGINE = [
    with_taps_off_by_one,
    with_taps_in_another_order,
    with_mask_for_anchor,
    with_causal_blocks,
    with_blocks_one_position_late,
    without_context_of_prompts,
]


IN_THE_WEIGHTS = [without_hidden_norm, without_k_norm, without_own_head, without_own_embedding]
