"""Verification: keep the longest prefix of the draft that equals the target's own choices, plus one bonus token.

Because a kept draft *equals* the target's choice, the emitted tokens are the target's choices themselves, at any
temperature. The draft decides how many tokens a step emits, never which. That makes every drafter lossless.
"""

import torch
from torch import Tensor


def verify(
    choices: Tensor,
    drafts: Tensor | None,
    logits_start: Tensor,
    num_drafts: Tensor,
    draft_index: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Accept drafts of S sequences at once.

    `choices` [R] int64 is the target's choice after each logit row. Sequence i has the rows logits_start[i] ..
    logits_start[i] + num_drafts[i], int32 [S]. `drafts` [D, columns] int32 has the drafts of sequence i in row
    draft_index[i], or in any row if it has none. Returns [S, w + 1] int64: the choices of a sequence padded with
    repeats, then its number of accepted drafts. w is columns + 1, or 1 without drafts. It is written to `out` if that
    is given.
    """
    if drafts is None:
        return torch.stack((choices[logits_start], torch.zeros_like(logits_start)), dim=1, out=out)
    columns, limits = drafts.shape[1], num_drafts[:, None]
    column = torch.arange(columns + 1, dtype=num_drafts.dtype, device=choices.device)
    column = torch.minimum(column, limits)
    tokens = choices[logits_start[:, None] + column]
    # The first draft that is not kept: those that equal their choice are moved past all others. Not every device has
    # a product along the rows.
    equal = tokens[:, :-1] == drafts[draft_index]
    accepted = torch.add(column[:, :-1], equal, alpha=columns).amin(dim=1, keepdim=True)
    return torch.cat((tokens, torch.minimum(accepted, limits)), dim=1, out=out)
