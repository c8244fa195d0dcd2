"""Verification: keep the longest prefix of the draft that equals the target's own choices, plus one bonus token.

Because a kept draft *equals* the target's choice, the emitted tokens are the target's choices themselves, at any
temperature: what the draft proposes decides how many come out of a step, never which.
"""

import torch
from torch import Tensor


def verify(choices: Tensor, drafts: Tensor | None, first: Tensor, num_drafts: Tensor, draft_index: Tensor) -> Tensor:
    """Accept drafts of S sequences at once.

    `choices` [R] is the target's choice after each logit row; sequence i has rows first[i] .. first[i] +
    num_drafts[i]. `drafts` [D, columns] with `draft_index[i]` the sequence's row in it, any row if it has no drafts.
    Returns [S, w + 1] int64, w the columns and one more, 1 without drafts: the choices padded with repeats, then the
    number of accepted drafts.
    """
    if drafts is None:
        return torch.stack((choices[first], torch.zeros_like(first)), dim=1)
    column = torch.arange(drafts.shape[1] + 1, device=choices.device)
    rows = first[:, None] + torch.minimum(column, num_drafts[:, None])
    tokens = choices[rows]
    kept = (tokens[:, :-1] == drafts[draft_index]) & (column[1:] <= num_drafts[:, None])
    # The first draft that is not kept; a product along the rows would say the same, on an NPU's host processor (N32).
    accepted = torch.where(kept, drafts.shape[1], column[:-1]).amin(dim=1, keepdim=True)
    return torch.cat((tokens, accepted), dim=1)
