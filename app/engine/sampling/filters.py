"""top-k, top-p and min-p over many rows at once, without a sort of the vocabulary.

The order is vLLM's: min-p, top-k, top-p, each over what the one before has left, of logits that were divided by the
temperature. Most rows need to look at few tokens only (`shortlist`); the rest find thresholds (`keep`). Both keep all
tokens that tie at an edge: 16-bit logits often do, and who stays must not depend on how a row was looked at.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SHORTLIST = 128
_RANGE = 64.0
"""Tokens that lie this far (in logits) below the best have no mass that fp32 can tell: they stay or go together."""
_HALVINGS = 26
"""Leave an edge known to 1e-6 of a logit, which is what fp32 tells of it."""


class Filters(NamedTuple):
    """Of N rows, fp32 [N]: `top_k` and `top_p` inf and `min_p` 0 keep all. `short`: the host knows that the SHORTLIST
    best tokens hold all that any row keeps, because every top-k is at most that."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    short: bool = False

    def within(self, part: slice | Tensor) -> "Filters":
        """Of some of the rows."""
        return Filters(self.top_k[part], self.top_p[part], self.min_p[part], self.short)


class Shortlist(NamedTuple):
    """The C best tokens of N rows: `logits` and `tokens` [N, C], best first, whether each is `kept`, and
    `complete` [N]: whether all that a row keeps is among them."""

    logits: Tensor
    tokens: Tensor
    kept: Tensor
    complete: Tensor


def shortlist(logits: Tensor, of: Filters, size: int) -> Shortlist:
    """Logits [N, V] fp32 -> their `size` best, of which the most likely is always kept."""
    best, tokens = logits.topk(min(size, logits.shape[-1]), dim=-1)
    top_k = of.top_k[:, None]
    few = top_k <= best.shape[1]
    min_p_edge = best[:, :1] + of.min_p[:, None].log()
    top_k_edge = best.gather(1, top_k.clamp(max=best.shape[1]).long() - 1)
    edge = torch.where(few, torch.maximum(min_p_edge, top_k_edge), min_p_edge)
    mass = (best - best[:, :1]).exp() * (best >= edge)
    whole = ((logits - best[:, :1]).exp() * (logits >= edge)).sum(dim=-1, keepdim=True)
    # The mass of the tokens before each one; where it is short of top-p, the token is still needed.
    needed = (best >= edge) & (mass.cumsum(dim=-1) - mass < of.top_p[:, None] * whole)
    edge = best.masked_fill(~needed, torch.inf).amin(dim=-1, keepdim=True)
    last = best[:, -1:]
    all_there = (last < edge) & (few | top_k.isinf() | (last < min_p_edge)) | (best.shape[1] == logits.shape[1])
    return Shortlist(best, tokens, best >= edge, all_there[:, 0])


def keep(logits: Tensor, of: Filters) -> Tensor:
    """Whether each token of logits [N, V] fp32 may be drawn, bool [N, V]; the most likely always may."""
    best = logits.max(dim=-1, keepdim=True).values
    kept = logits >= best + of.min_p[:, None].log()
    kept = kept & (logits >= _edge(logits, kept.float(), of.top_k, best))
    mass = (logits - best).exp() * kept
    return kept & (logits >= _edge(logits, mass, of.top_p * mass.sum(dim=-1), best))


def _edge(logits: Tensor, weight: Tensor, wanted: Tensor, best: Tensor) -> Tensor:
    """The highest edge [N, 1] at or above which tokens weigh `wanted` [N] or more; -inf where all together do not."""

    def enough(edge: Tensor) -> Tensor:
        return (weight * (logits >= edge)).sum(dim=-1, keepdim=True) >= wanted[:, None]

    low, high = best - _RANGE, best
    edge = torch.where(enough(low), low, -torch.inf)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        sits = enough(middle)
        low, high = torch.where(sits, middle, low), torch.where(sits, high, middle)
    edge = torch.where(edge.isinf(), edge, low)
    return torch.where(enough(best), best, edge)
