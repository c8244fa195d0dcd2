"""Top-k, top-p and min-p over many rows at once, without a sort of the vocabulary.

The order is vLLM's: min-p, top-k, top-p, each over the tokens that the previous one keeps. Logits are already divided
by the temperature. Most rows look at few tokens only (`shortlist`), others find thresholds (`keep`). Both keep ties.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.sampling.metadata import Filters

_RANGE = 64.0
"""Tokens this far (in logits) below the best have no mass in fp32, so all of them stay or all go."""
_HALVINGS = 26
"""Halvings of 64 logits that leave an edge known to 1e-6, the resolution of fp32."""


class Shortlist(NamedTuple):
    """The C best tokens of N rows, best first, and a mask of those kept: [N, C].

    `complete` [N] is true if all tokens that a row keeps are among them."""

    logits: Tensor
    tokens: Tensor
    kept: Tensor
    complete: Tensor


def shortlist(logits: Tensor, of: Filters[Tensor], size: int) -> Shortlist:
    """Return the `size` best of logits [N, V] fp32. The most likely token is always kept."""
    best, tokens = logits.topk(min(size, logits.shape[-1]), dim=-1)
    top_k = of.top_k[:, None]
    few = top_k <= best.shape[1]
    min_p_edge = best[:, :1] + of.min_p[:, None].log()
    top_k_edge = best.gather(1, top_k.clamp(max=best.shape[1]).long() - 1)
    edge = torch.where(few, torch.maximum(min_p_edge, top_k_edge), min_p_edge)
    mass = (best - best[:, :1]).exp() * (best >= edge)
    if of.form == "short":  # only tokens that tie at the edge can be missing
        missing = (logits >= edge).sum(dim=-1, keepdim=True) - (best >= edge).sum(dim=-1, keepdim=True)
        whole = mass.sum(dim=-1, keepdim=True) + missing * (edge - best[:, :1]).exp()
    else:
        whole = ((logits - best[:, :1]).exp() * (logits >= edge)).sum(dim=-1, keepdim=True)
    # A token is needed if the mass of the tokens before it is short of top-p.
    needed = (best >= edge) & (mass.cumsum(dim=-1) - mass < of.top_p[:, None] * whole)
    edge = best.masked_fill(~needed, torch.inf).amin(dim=-1, keepdim=True)
    last = best[:, -1:]
    all_there = (last < edge) & (few | top_k.isinf() | (last < min_p_edge)) | (best.shape[1] == logits.shape[1])
    return Shortlist(best, tokens, best >= edge, all_there[:, 0])


def keep(logits: Tensor, of: Filters[Tensor]) -> Tensor:
    """Return the mask [N, V] of tokens that may be drawn, for logits [N, V] fp32. The most likely always may."""
    best = logits.max(dim=-1, keepdim=True).values
    kept = logits >= best + of.min_p[:, None].log()
    if of.form != "open":
        kept = kept & (logits >= _edge(logits, kept.float(), of.top_k, best))
    mass = (logits - best).exp() * kept
    return kept & (logits >= _edge(logits, mass, of.top_p * mass.sum(dim=-1), best))


def _edge(logits: Tensor, weight: Tensor, wanted: Tensor, best: Tensor) -> Tensor:
    """Return the highest edge [N, 1] at or above which tokens weigh `wanted` [N]; -inf if all tokens weigh less."""

    def enough(edge: Tensor) -> Tensor:
        return (weight * (logits >= edge)).sum(dim=-1, keepdim=True) >= wanted[:, None]

    low, high = best - _RANGE, best
    edge = low.masked_fill(~enough(low), -torch.inf)  # where() would copy a number of the host, which no capture may
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        holds = enough(middle)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    edge = torch.where(edge.isinf(), edge, low)
    return torch.where(enough(best), best, edge)
