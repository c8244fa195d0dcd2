"""Penalties for tokens that a sequence has had, by counts of its committed tokens `[batch slots, V]`.

Meanings are vLLM's. The repetition penalty counts prompt and answer, presence and frequency only the answer. A row of
a block also counts the drafts before it. They are a small correction, and no counts are kept for rows.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from app.engine.arrays import Ints
from app.engine.device.base import Backend
from app.engine.device.transfer import Packed
from app.engine.sampling.metadata import CountedTokens, Penalties

_NONE = np.zeros(0, dtype=np.int32)


def penalise(logits: Tensor, of: Penalties[Tensor]) -> Tensor:
    """Return logits `[N, V]` fp32 with the penalties of their rows."""
    assert of.counts
    counts, prompted = (counted[of.batch_slot] for counted in of.counts)
    penalised = _penalised(logits, counts, prompted, of)
    if of.drafts is None:
        return penalised
    # The first draft fills the columns after a row's drafts. With place 0 no draft counts.
    before = torch.arange(of.drafts.shape[1], device=logits.device) < of.place[:, None]
    tokens = torch.where(before, of.drafts, of.drafts[:, :1]).long()
    more = ((tokens[:, :, None] == of.drafts[:, None, :]) & before[:, None, :]).sum(dim=2)
    corrected = _penalised(logits.gather(1, tokens), counts.gather(1, tokens) + more, prompted.gather(1, tokens), of)
    return penalised.scatter(1, tokens, corrected)


def _penalised(logits: Tensor, counts: Tensor, prompted: Tensor, of: Penalties[Tensor]) -> Tensor:
    """Return penalised logits `[N, K]` of tokens that were emitted `counts` `[N, K]` times."""
    emitted = counts > 0
    scaled = torch.where(logits > 0, logits / of.repetition[:, None], logits * of.repetition[:, None])
    logits = torch.where(emitted | prompted, scaled, logits)
    return logits - of.frequency[:, None] * counts - of.presence[:, None] * emitted


class TokenCounts:
    """Counts of all batch slots, kept up to date.

    Memory is taken for the first sequence with a penalty: 5 bytes a batch slot and token of the vocabulary.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, backend: Backend) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._backend = backend
        self._counted: dict[int, tuple[tuple[str, int], int]] = {}
        self._counts: tuple[Tensor, Tensor] | None = None

    def of(self, sequences: Iterable[CountedTokens]) -> tuple[Tensor, Tensor]:
        """Return the `counts` of `Penalties`, after counting all tokens of these sequences."""
        cleared: list[int] = []
        prompted, emitted = [_NONE], [_NONE]
        for seq in sequences:
            owner, done = self._counted.get(seq.batch_slot, (None, 0))
            row = seq.batch_slot * self._shape[1]
            if owner != seq.key:
                cleared.append(seq.batch_slot)
                done = seq.num_prompt_tokens
                prompted.append(np.array(seq.token_ids[:done], dtype=np.int32) + row)
            emitted.append(np.array(seq.token_ids[done:], dtype=np.int32) + row)
            self._counted[seq.batch_slot] = (seq.key, len(seq.token_ids))
        return self._add(np.array(cleared, dtype=np.int32), np.concatenate(prompted), np.concatenate(emitted))

    def forget(self) -> None:
        """Count all tokens again at the next call, because a step failed."""
        self._counted.clear()

    def _add(self, cleared: Ints, prompted_places: Ints, emitted_places: Ints) -> tuple[Tensor, Tensor]:
        if self._counts is None:
            zeros = partial(torch.zeros, self._shape, device=self._backend.device)
            self._counts = zeros(dtype=torch.int32), zeros(dtype=torch.bool)
        emitted, prompted = self._counts
        arrays = {"cleared": cleared, "prompted": prompted_places, "emitted": emitted_places}
        packed = {name: x.long() for name, x in Packed(arrays, self._backend).tensors.items()}
        batch_slots, places = packed["cleared"], packed["emitted"]
        if len(batch_slots):
            emitted.index_fill_(0, batch_slots, 0)
            prompted.index_fill_(0, batch_slots, False)
            prompted.view(-1).index_fill_(0, packed["prompted"], True)
        if len(places):
            emitted.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        return self._counts
