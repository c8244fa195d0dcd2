"""Training rows and the two losses over them: next token for the target, whole blocks for the draft."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.demo_pair.model import Draft, Target

TOKENS_PER_ANCHOR = 16


@dataclass(frozen=True)
class Batch:
    """`ids` `[B, T]` int64; `supervised` `[B, T]` bool: the token is part of an answer, or the end mark after one.

    `positions` `[T]` int64 are 0, 1, ... unless given.
    """

    ids: Tensor
    supervised: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.ids.to(device), self.supervised.to(device), positions)


def target_loss(target: Target, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the supervised tokens, given all tokens before."""
    hidden, _ = target(batch.ids, batch.positions)
    wanted = batch.supervised[:, 1:]
    return F.cross_entropy(target.logits(hidden[:, :-1][wanted]), batch.ids[:, 1:][wanted])


def block_embeddings(target: Target, ids: Tensor, anchors: Tensor, mask_id: int) -> Tensor:
    """Return `[anchor, MASK x (S - 1)]` for every anchor `[B, A]` of ids `[B, T]` -> embeddings `[B, A, S, H]`."""
    blocks = torch.full((*anchors.shape, target.shape.block), mask_id, device=ids.device)
    blocks[..., 0] = ids.gather(1, anchors)
    return target.model.embed_tokens(blocks)


def draft_loss(
    target: Target, draft: Draft, batch: Batch, mask_id: int, generator: torch.Generator, gamma: float = 7.0
) -> Tensor:
    """Return the cross-entropy of block rows 1..S-1 at random anchors.

    Weights are `exp(-(k-1) / gamma)` (DFlash, arXiv 2602.06036).

    A row counts while the text is what the target itself would have written: from the anchor on, every token up to
    and including the row's own is the target's argmax. Anchors are drawn where that holds for at least one row.
    """
    with torch.no_grad():
        hidden, features = target(batch.ids, batch.positions)
        choices = target.logits(hidden).argmax(-1)
        agrees = torch.zeros_like(batch.supervised)
        agrees[:, 1:] = (choices[:, :-1] == batch.ids[:, 1:]) & batch.supervised[:, 1:]
        length, size = batch.ids.shape[1], target.shape.block
        usable = batch.supervised.clone()
        usable[:, :-1] &= agrees[:, 1:]
        usable[:, -1] = False
        weights = usable.float() + 1e-9
        anchors = torch.multinomial(weights, length // TOKENS_PER_ANCHOR, generator=generator)
        embeddings = block_embeddings(target, batch.ids, anchors, mask_id)
        positions = anchors.unsqueeze(-1) + torch.arange(1, size, device=anchors.device)
        inside = positions < length
        positions = positions.clamp(max=length - 1)
        labels = batch.ids.gather(1, positions.flatten(1)).view_as(positions)
        valid = (agrees.gather(1, positions.flatten(1)).view_as(positions) & inside).cumprod(-1).bool()
        valid &= usable.gather(1, anchors).unsqueeze(-1)
        decay = torch.exp(-torch.arange(size - 1, device=anchors.device) / gamma).expand_as(positions)[valid]
    rows = draft(features, anchors, embeddings, batch.positions)[:, :, 1:][valid]
    before = torch.cat((batch.ids.gather(1, anchors).unsqueeze(-1), labels[..., :-1]), -1)[valid]
    losses = F.cross_entropy(target.logits(rows) + draft.pairs(rows, before), labels[valid], reduction="none")
    return (losses * decay).sum() / decay.sum().clamp(min=math.ulp(1.0))
