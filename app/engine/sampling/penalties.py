"""Penalties for tokens that a sequence already has, by counts of its committed tokens `[batch slots, V]`.

Meanings are vLLM's. The repetition penalty counts prompt and answer, presence and frequency only the answer. A row of
a block also counts the drafts before it. That is a small correction, so no counts are kept for each row.
"""

from collections.abc import Iterable
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from app.engine.device.base import Backend
from app.engine.device.transfer import Packed
from app.engine.sampling.metadata import CountedTokens, Penalties, SamplingMetadata


def penalise(logits: Tensor, of: Penalties[Tensor]) -> Tensor:
    """Return logits `[N, V]` fp32 with the penalties of their rows."""
    assert of.seen
    counts, prompted = (counted[of.batch_slot] for counted in of.seen[:2])
    penalised = _penalised(logits, counts, prompted, of)
    if of.seen[2] is None:
        return penalised
    drafts = of.seen[2][of.draft_index]
    # The first draft fills the columns after a row's drafts. Without drafts before it none counts.
    before = torch.arange(drafts.shape[1], device=logits.device) < of.num_before[:, None]
    tokens = torch.where(before, drafts, drafts[:, :1]).long()
    more = ((tokens[:, :, None] == drafts[:, None, :]) & before[:, None, :]).sum(dim=2)
    corrected = _penalised(logits.gather(1, tokens), counts.gather(1, tokens) + more, prompted.gather(1, tokens), of)
    return penalised.scatter(1, tokens, corrected)


def _penalised(logits: Tensor, counts: Tensor, prompted: Tensor, of: Penalties[Tensor]) -> Tensor:
    """Return penalised logits `[N, K]` of tokens that were emitted `counts` `[N, K]` times."""
    emitted = counts > 0
    scaled = torch.where(logits > 0, logits / of.repetition[:, None], logits * of.repetition[:, None])
    logits = torch.where(emitted | prompted, scaled, logits)
    return logits - of.frequency[:, None] * counts - of.presence[:, None] * emitted


class TokenCounts:
    """Counts of all batch slots, which the device moves by the tokens of each step.

    Memory is taken with graphs, or for the first sequence with a penalty: 5 bytes a batch slot and token of the
    vocabulary.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, backend: Backend) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._backend = backend
        self._owners: dict[int, tuple[str, int, int]] = {}

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        zeros = partial(torch.zeros, self._shape, device=self._backend.device)
        return zeros(dtype=torch.int32), zeros(dtype=torch.bool)

    def begin(self, sequences: Iterable[CountedTokens]) -> None:
        """Count all tokens of the sequences that are new in their batch slots."""
        new = [seq for seq in sequences if self._owners.get(seq.batch_slot) != seq.key]
        if not new:
            return
        self._owners.update((seq.batch_slot, seq.key) for seq in new)
        rows = [np.array(seq.token_ids, dtype=np.int32) + seq.batch_slot * self._shape[1] for seq in new]
        arrays = {
            "cleared": np.array([seq.batch_slot for seq in new], dtype=np.int32),
            "prompted": np.concatenate([row[: seq.num_prompt_tokens] for row, seq in zip(rows, new, strict=True)]),
            "emitted": np.concatenate([row[seq.num_prompt_tokens :] for row, seq in zip(rows, new, strict=True)]),
        }
        slots, prompted, emitted = (x.long() for x in Packed(arrays, self._backend).tensors.values())
        for counts in self.tensors:
            counts.index_fill_(0, slots, 0)
        self.tensors[1].view(-1).index_fill_(0, prompted, True)
        if len(emitted):
            self.tensors[0].view(-1).index_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))

    def move(self, draws: Iterable[SamplingMetadata[Tensor]], verified: Tensor) -> None:
        """Count the tokens of a step's result [S, w + 1] for its `draws` with penalties."""
        tokens, column = verified[:, :-1], torch.arange(verified.shape[1] - 1, device=verified.device)
        for slots in (draw.penalties.counted_in[:, None] for draw in draws if draw.penalties):
            is_emitted = (column <= verified[:, -1:]) & (tokens >= 0) & (slots >= 0)
            indices = tokens.clamp(min=0) + slots.clamp(min=0) * self._shape[1]
            self.tensors[0].view(-1).index_add_(0, indices.flatten(), is_emitted.flatten().to(torch.int32))

    def forget(self) -> None:
        """Count all tokens again at the next call, because a step failed."""
        self._owners.clear()
