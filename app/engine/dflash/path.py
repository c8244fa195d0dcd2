"""A head that chooses drafts among the best tokens of each row: DFlash2's selector, and DSpark's Markov heads.

Row t has candidates C_t with logits u_t. After the previous row's draft p, a candidate c scores
u_t[c] + <P[p] * m_t, S[c]>. P and S are tables of the vocabulary, and m_t is made from the row's hidden state. The path
takes the best candidate of each row, one after the other, from the anchor on.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.checkpoint.shapes import DFlashConfig
from app.engine.comm.comm import Comm
from app.engine.device.base import Backend
from app.engine.models.layers import frozen
from app.engine.models.weights import Weights
from app.engine.quantised import Weight

CHUNK = 128
"""Logits whose maximum is compared first, so that most of them are never sorted."""


class PathHead(nn.Module):
    """The head of a `draft.path`. Shapes: D blocks, n drafts, k candidates, r the rank of the tables, H hidden size.

    The lm_head is sharded over the ranks of `comm`. `in_target_vocabulary` is the draft model's method.
    """

    def __init__(
        self,
        draft: DFlashConfig,
        weights: Weights,
        backend: Backend,
        comm: Comm,
        in_target_vocabulary: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        assert draft.path is not None
        self._path, self._backend, self._comm = draft.path, backend, comm
        self._in_target_vocabulary = in_target_vocabulary
        before, after, *rest = draft.path.tensors(draft).items()
        self.predecessors, self.successors = (frozen(weights.get(name, *shape)) for name, shape in (before, after))
        wide = [frozen(weights.get(name, *shape, dtype=torch.float32)) for name, shape in rest]
        self.projection, self.bias = (*wide, None, None)[:2]

    def propose(self, hidden: Tensor, lm_head: Weight, anchors: Tensor, max_rows: int) -> Tensor:
        """Return the target's tokens [D, n] for hidden states [D * n, H] of blocks with `anchors` [D].

        Logits of at most `max_rows` rows are made at once. A row that is not finite gets any token.
        """
        parts = [self.candidates(part, lm_head) for part in hidden.split(max_rows)]
        blocks = anchors.shape[0], -1
        values, ids = (torch.cat(each).unflatten(0, blocks) for each in zip(*parts, strict=True))
        drafts = self.walk(hidden.unflatten(0, blocks).float(), values, ids, anchors)
        return drafts if self._comm.size == 1 else self._comm.all_gather(drafts)[0].clone()  # one bit may differ

    def walk(self, hidden: Tensor, values: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Return the target's tokens [D, n] on the path, for hidden states [D, n, H] and candidates [D, n, k] in order.

        A row maps each candidate before it to its best one. Maps are composed by doubling: after s rounds each leads
        over 2^s rows, so the path takes log2(n) operators and not n.
        """
        unary, cap = values * self._path.scale, self._path.softcap
        if cap is not None:
            unary = cap * torch.tanh(unary / cap)
        tokens = self._in_target_vocabulary(ids)
        after = F.embedding(ids, self.successors).float()
        if self._path.kind == "rnn":
            return self._recur(hidden, unary, tokens, after, anchors)
        num_rows, k = ids.shape[1:]
        first = anchors[:, None, None].expand(-1, 1, k).to(tokens.dtype)
        before = F.embedding(torch.cat((first, tokens[:, :-1]), 1), self.predecessors).float()
        if self._path.kind == "selector":
            assert self.projection is not None
            before = before * F.linear(hidden, self.projection)[:, :, None]
        elif self._path.kind == "gated":
            assert self.projection is not None
            for_hidden, for_token = self.projection.split((hidden.shape[-1], self._path.rank), dim=1)
            gate = F.linear(hidden, for_hidden, self.bias)[:, :, None] + F.linear(before, for_token)
            before = before * gate.sigmoid()
        maps = (before @ after.mT + unary[:, :, None]).argmax(dim=-1)
        reach = 1
        while reach < num_rows:
            maps = torch.cat((maps[:, :reach], maps[:, reach:].gather(2, maps[:, :-reach])), 1)
            reach *= 2
        return tokens.gather(2, maps[:, :, :1])[..., 0]

    def _recur(self, hidden: Tensor, unary: Tensor, tokens: Tensor, after: Tensor, anchors: Tensor) -> Tensor:
        """Return what `walk` does for a head whose state [D, r] changes with each draft, so row by row."""
        assert self.projection is not None
        state = after.new_zeros(len(after), self._path.rank)
        token, drafts = anchors, []
        for row in range(tokens.shape[1]):
            before = F.embedding(token, self.predecessors).float()
            joint = F.linear(torch.cat((state, before, hidden[:, row]), 1), self.projection, self.bias)
            gate, new, out = joint.chunk(3, dim=1)
            state = torch.lerp(new.tanh(), state, gate.sigmoid())
            scores = unary[:, row] + (after[:, row] @ out.tanh()[:, :, None])[..., 0]
            token = tokens[:, row].gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def candidates(self, hidden: Tensor, lm_head: Weight) -> tuple[Tensor, Tensor]:
        """Return the k best logits [R, k] fp32 of rows [R, H], descending, and their ids in the draft's vocabulary.

        Only the chunks with the highest maxima can hold them, so the others are not sorted.
        """
        logits, k = self._backend.logits(hidden, lm_head), self._path.top_k
        num_rows, size = logits.shape
        spare = 2 * k  # topk takes any of equal logits at the edge; the lowest ids of these are kept
        if size > spare * CHUNK:
            padded = F.pad(logits, (0, -size % CHUNK), value=-torch.inf) if size % CHUNK else logits
            chunks = padded.view(num_rows, -1, CHUNK)
            best = chunks.amax(dim=-1).topk(spare)[1]
            values = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
            values, indices = values.topk(spare)
            ids = best.gather(1, indices // CHUNK) * CHUNK + indices % CHUNK
        else:
            values, ids = logits.topk(min(spare, size))
        values = values.float()
        if self._comm.size > 1:
            pairs = torch.stack((values, (ids + self._comm.rank * size).float()))
            values, ids = self._comm.all_gather(pairs).permute(1, 2, 0, 3).flatten(2).unbind()
        order = ids.float().argsort(dim=-1)  # an NPU sorts whole numbers on its host
        values, ids = values.gather(1, order), ids.gather(1, order)
        order = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
        return values.gather(1, order), ids.gather(1, order).long()
