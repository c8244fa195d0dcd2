"""What a draft learns from a lesson, and how many tokens a step it would have on one.

Rows 1 .. S-1 of blocks at random anchors inside answers learn the token that the target wrote there, and its whole
distribution. Row k weighs exp(-(k - 1) / DECAY) (DFlash, arXiv 2602.06036). The distributions are made for a slice of
rows at a time, and its gradients at once, so that the largest vocabulary fits.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from app.engine.models.target import Target
from tools.train_draft.model import Draft
from tools.train_draft.shape import TOP_K
from tools.train_draft.teacher import Lesson

DECAY = 4.0
WRITTEN, DISTRIBUTION = 0.4, 0.6
"""Weights of the two losses."""
TOKENS_PER_ANCHOR = 8
SLICE_BYTES = 128 << 20
"""Bytes of the logits of a slice of rows."""
_ANCHORS = 64
"""Blocks that are drafted at once to measure a draft."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What the draft borrows: the target's `embedding` [V, H] and `lm_head` [V, H], and of the latter its own `rows`
    [Vd, H], those of the tokens `ids` [Vd], or None if both have one vocabulary. Products run in `precision`."""

    embedding: Tensor
    lm_head: Tensor
    rows: Tensor
    ids: Tensor | None
    precision: Callable[[], AbstractContextManager[object]]

    @classmethod
    def of(cls, target: Target, ids: Tensor | None, precision: Callable[[], AbstractContextManager[object]]) -> "Ends":
        head = target.lm_head
        rows = head if ids is None else head[ids]
        is_half = precision is not nullcontext
        return cls(target.embedding, head, rows if is_half else rows.float(), ids, precision)

    def distribution(self, hidden: Tensor) -> Tensor:
        """Return the target's probabilities [N, Vd] after hidden states [N, H]. They sum to less than 1 if the draft's
        vocabulary is reduced."""
        probabilities = F.linear(hidden, self.lm_head).float().softmax(-1)
        return probabilities if self.ids is None else probabilities[:, self.ids]

    def index(self, tokens: Tensor) -> Tensor:
        """Return the draft's number of each of the target's tokens, or -1."""
        if self.ids is None:
            return tokens
        numbers = tokens.new_full((len(self.lm_head),), -1)
        numbers[self.ids] = torch.arange(len(self.ids), device=tokens.device)
        return numbers[tokens]

    def tokens(self, numbers: Tensor) -> Tensor:
        return numbers if self.ids is None else self.ids[numbers]

    def scores(self, rows: Tensor) -> Tensor:
        """Return logits [N, Vd] fp32 of a draft's hidden states [N, H]."""
        return F.linear(rows, self.rows).float()


def learn(draft: Draft, ends: Ends, lesson: Lesson, generator: torch.Generator) -> float:
    """Add the gradients of a lesson's loss to the draft's parameters, and return the loss."""
    size, length = draft.shape.block, lesson.ids.shape[1]
    device = lesson.ids.device
    follows = F.pad(lesson.own[:, 1:], (0, 1)) & lesson.own  # an answer's token comes after it
    count = max(1, length // TOKENS_PER_ANCHOR)
    anchors = torch.multinomial(follows.float() + 1e-9, count, generator=generator)
    places = anchors[..., None] + torch.arange(1, size, device=device)
    inside, places = places < length, places.clamp(max=length - 1)
    owned = lesson.own.gather(1, places.flatten(1)).view_as(places) & inside
    valid = owned.cumprod(-1).bool() & follows.gather(1, anchors)[..., None]
    labels = lesson.ids.gather(1, places.flatten(1)).view_as(places)
    before = torch.cat((lesson.ids.gather(1, anchors)[..., None], labels[..., :-1]), -1)[valid]
    talk = torch.arange(len(places), device=device)[:, None, None].expand_as(places)[valid]
    hidden = lesson.hidden[talk, places[valid] - 1]
    labels = labels[valid]
    weights = torch.exp(-torch.arange(size - 1, device=device) / DECAY).expand_as(places)[valid]
    weights = weights / weights.sum().clamp(min=1e-9)

    rows = block_rows(draft, ends, lesson, anchors)[valid].float()
    leaf = rows.detach().requires_grad_()
    loss = torch.zeros((), device=device)
    for part in torch.arange(len(rows), device=device).split(max(1, SLICE_BYTES // (4 * len(ends.lm_head)))):
        with ends.precision():
            with torch.no_grad():
                wanted = ends.distribution(hidden[part])
            logits = ends.scores(leaf[part]) + draft.pairs(leaf[part], before[part])
        scores = logits.float().log_softmax(-1)
        numbers = ends.index(labels[part])
        written = -scores.gather(1, numbers.clamp(min=0)[:, None])[:, 0] * (numbers >= 0)
        other = -(wanted * scores).sum(-1)
        of_part = ((WRITTEN * written + DISTRIBUTION * other) * weights[part]).sum()
        of_part.backward()
        loss = loss + of_part.detach()
    with ends.precision():
        rows.backward(leaf.grad)
    return float(loss)


def block_rows(draft: Draft, ends: Ends, lesson: Lesson, anchors: Tensor) -> Tensor:
    """Return the hidden states of the rows after the anchors [B, A]: [B, A, S - 1, H]."""
    blocks = torch.full((*anchors.shape, draft.shape.block), draft.shape.mask_token_id, device=anchors.device)
    blocks[..., 0] = lesson.ids.gather(1, anchors)
    embedded = F.embedding(blocks, ends.embedding).float()
    with ends.precision():
        return draft(lesson.features.float(), anchors, embedded)[:, :, 1:]


@torch.no_grad()
def tokens_a_step(draft: Draft, ends: Ends, lessons: Iterator[Lesson]) -> float:
    """Return the mean tokens of a verify step, the bonus included, when whole blocks are verified in answers that the
    target wrote greedily, from the first token of each answer on."""
    steps = tokens = 0
    for lesson in lessons:
        for b in range(len(lesson.ids)):
            one = Lesson(*(part[b : b + 1] for part in lesson))
            own = one.own[0].nonzero().flatten().tolist()
            if len(own) < 2:  # no token comes after the first
                continue
            begin, last = own[0], own[-1]
            anchors = torch.arange(begin, last, device=one.ids.device)
            parts = [_accepted(draft, ends, one, part, last) for part in anchors.split(_ANCHORS)]
            accepted = torch.cat(parts).tolist()
            at = begin
            while at < last:
                steps += 1
                at += accepted[at - begin] + 1
            tokens += min(at, last) - begin
    return tokens / max(1, steps)


def _accepted(draft: Draft, ends: Ends, lesson: Lesson, anchors: Tensor, last: int) -> Tensor:
    """Return how many drafts of the blocks at `anchors` [A] the target accepts up to its token `last`: [A]."""
    ids, rows = lesson.ids[0], block_rows(draft, ends, lesson, anchors[None])[0].float()
    with ends.precision():
        values, numbers = ends.scores(rows.flatten(0, 1)).topk(TOP_K)
    values, numbers = (part.unflatten(0, rows.shape[:2]) for part in (values, numbers))
    before, is_right = ids[anchors], torch.ones_like(anchors, dtype=torch.bool)
    count = torch.zeros_like(anchors)
    for k in range(rows.shape[1]):
        scores = values[:, k]
        if draft.path is not None:
            state = draft.path.state(rows[:, k], before)
            scores = scores + (draft.path.successors[numbers[:, k]] @ state[..., None])[..., 0]
        before = ends.tokens(numbers[:, k].gather(1, scores.argmax(-1, keepdim=True))[:, 0])
        places = anchors + 1 + k
        is_right &= (places <= last) & (ids[places.clamp(max=last)] == before)
        count += is_right
    return count
