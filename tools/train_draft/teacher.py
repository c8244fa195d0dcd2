"""The target as the engine runs it, over whole talks: its hidden states, and the features of a draft."""

from array import array
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from app.engine.comm.comm import ALONE
from app.engine.load.engine import Engine
from app.engine.load.models import use_operator
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import StepRows
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence
from app.messages import Request


class Lesson(NamedTuple):
    """B talks of up to T tokens. Padding is no answer."""

    ids: Tensor
    """[B, T] int64."""
    own: Tensor
    """[B, T] bool: the token is of an answer."""
    hidden: Tensor
    """[B, T, H], the target's hidden states after its final norm."""
    features: Tensor
    """[B, T, taps * H]."""


class Teacher:
    """The target of `engine`, with features of the layers `taps`. A lesson has at most `max_tokens` tokens, each talk
    rounded up to whole pages. They are pages of its own, so requests in the engine are not disturbed."""

    def __init__(self, engine: Engine, taps: tuple[int, ...], max_tokens: int) -> None:
        self._forward, self._layout = engine.core.runner.forward, engine.core.runner.layout
        self.target, backend = self._forward.target, self._forward.backend
        self.target.target_layer_ids = taps
        use_operator(self.target, engine.target, backend, ALONE, taps)
        self.page_size = self._layout.page_size
        self._num_pages = 1 + 2 * max_tokens // self.page_size  # page 0 is no sequence's
        self._pool = KvPool(engine.target, self._num_pages, self.page_size, self.target.embedding.dtype, backend)

    @torch.no_grad()
    def lesson(self, talks: Rows[tuple[list[int], list[bool]]]) -> Lesson:
        """Return what the target makes of talks (ids, own)."""
        batch, page = Batch(), 1
        for row, _ in talks:
            num_pages = -(-len(row) // self.page_size)
            seq = Sequence(Request("talk", row, 1), arrival=0, pages=array("i", range(page, page := page + num_pages)))
            batch.prefills.append(ScheduledSequence(seq, 0, len(row), needs_logits=False))
        assert page <= self._num_pages, "a lesson is too long for its pages"
        tensors = self._forward.on_device(self._layout.target(batch, None, 0))
        (group,) = tensors.inputs.groups
        positions, slots = self._forward.positions_and_slots(group)
        rows = StepRows(self._forward.rotary.at(positions), slots, tensors.metas)
        hidden, features = self.target.forward(tensors.inputs.token_ids, rows, self._pool)
        assert features is not None
        lengths = [len(row) for row, _ in talks]
        parts = (pad_sequence(states.split(lengths), batch_first=True) for states in (hidden, features))
        ids, own = (
            pad_sequence(list(map(torch.tensor, each)), batch_first=True).to(hidden.device)
            for each in zip(*talks, strict=True)
        )
        return Lesson(ids, own, *parts)
