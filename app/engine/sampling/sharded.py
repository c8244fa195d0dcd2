"""Sampler of ranks that each have a part of the lm_head's rows."""

import torch
from torch import Tensor

from app.engine.comm.comm import Comm
from app.engine.device.base import Backend
from app.engine.sampling.metadata import SamplingMetadata
from app.engine.sampling.sampler import Sampler, checked_argmax


class ShardedSampler(Sampler):
    """Choices that are equal on all ranks, because each is made from gathered bits, or by rank 0 only.

    The lm_head of a rank is [V / size, H]. The ranks gather the best of their own logits as pairs (value, id) in fp32,
    where ids below 2^24 are exact. Ids ascend with ranks, so ties go to the lowest one.
    """

    def __init__(self, vocab_size: int, backend: Backend, comm: Comm) -> None:
        super().__init__(vocab_size, backend)
        self._comm = comm

    def _choose_at_once(self, hidden: Tensor, lm_head: Tensor) -> None:
        """Return None: an operator that makes no logits would only see those of the rank's own rows."""

    def _checked_argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return `checked_argmax` of all ranks' logits, for the rank's own [R, V / size]."""
        best, choice = logits.max(dim=-1)
        choice += self._comm.rank * logits.shape[1]
        values, ids = self._comm.all_gather(torch.stack((best.float(), choice.float()))).unbind(1)
        rank, is_lost = checked_argmax(values.t())
        return ids.gather(0, rank[None])[0].long(), is_lost

    def _argmax(self, logits: Tensor) -> Tensor:
        return self._checked_argmax(logits)[0]

    def _draw(self, logits: Tensor, draws: SamplingMetadata[Tensor]) -> Tensor:
        """Return the tokens [N] that rank 0 draws from all ranks' logits. The rank's own are [N, V / size] fp32."""
        whole = self._comm.all_gather(logits).transpose(0, 1).flatten(1)
        if self._comm.rank == 0:
            return self._comm.broadcast(super()._draw(whole, draws))
        return self._comm.broadcast(torch.empty(len(whole), dtype=torch.int64, device=whole.device))
