"""Sampler: the target's own choice of a row is argmax, or argmax of logits / temperature + Gumbel noise.

The latter samples from the softmax (the Gumbel-max trick, arXiv 1411.0030). `noise.py` has the hash that makes the
noise, so a draw does not depend on the batch, on preemption, or on speculation. 23 mantissa bits keep it finite.

The order is vLLM's: additions (logit_bias, and stop tokens before min_tokens), penalties, temperature, min-p, top-k,
top-p, noise, argmax.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.engine.arrays import Array, arrays, with_arrays
from app.engine.comm.comm import Comm
from app.engine.device.base import Backend
from app.engine.device.transfer import Packed
from app.engine.quantised import Weight
from app.engine.sampling import filters
from app.engine.sampling.metadata import SHORTLIST, Filters, LogitBias, SamplingMetadata, part_of
from app.engine.sampling.noise import FACTORS, NOISE_BITS, signed
from app.engine.sampling.penalties import TokenCounts, penalise
from app.engine.sequence import NOT_FINITE

LOGITS_CHUNK_BYTES = 256 << 20
"""Logits are made in row chunks of at most this many fp32 bytes: 4096 rows x 152k tokens would be 2.5 GB."""
GREEDY_CHUNK_BYTES = 1 << 30
"""Limit for greedy rows on an accelerator. Only the argmax is kept, and each chunk reads the whole lm_head."""

_TOKEN_SALT = 0x85EBCA6B

Draws = Sequence[SamplingMetadata[Tensor]]


def draws_on_device(
    kinds: list[SamplingMetadata[Array]], drafts: Tensor | None, counts: TokenCounts, backend: Backend
) -> tuple[Draws, Packed]:
    """Return sampled rows as tensors of one packed copy, and that copy. The rows verify `drafts` [D, columns]."""
    packed = Packed(arrays(kinds), backend)
    draws: list[Any] = with_arrays(kinds, lambda name, _: packed.tensors[name])
    for draw in draws:
        if of := draw.penalties:
            counts.begin(of.counted)
            of.seen = *counts.tensors, drafts
    return draws, packed


def checked_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the argmax [R] int64 of logits [R, V], a mask [R] bool of rows whose best logit is NaN or infinite)."""
    best, choice = logits.max(dim=-1)  # NaN is larger than every number
    return choice, (best - best).ne(0)


class Sampler:
    """Choices of the target, and proposals of the draft, made from hidden states in chunks of rows."""

    def __init__(self, vocab_size: int, backend: Backend) -> None:
        self._backend = backend
        self.max_rows = max(1, LOGITS_CHUNK_BYTES // (4 * vocab_size))
        """Rows whose logits are made at once."""
        greedy_rows = max(1, GREEDY_CHUNK_BYTES // (4 * vocab_size))
        self.max_greedy_rows = self.max_rows if backend.memory_is_host else greedy_rows
        """The same where no row is drawn."""
        tokens = torch.arange(vocab_size, dtype=torch.int32, device=backend.device)
        self._token_hash = self.mix(tokens + signed(_TOKEN_SALT))

    def choose(self, hidden: Tensor, lm_head: Tensor, draws: Draws = ()) -> Tensor:
        """Return token ids [R] int64 for hidden states [R, H]; ties go to the lowest id.

        A row whose best logit is NaN or infinite gets NOT_FINITE.
        """
        choices, logits = self.choose_greedily(hidden, lm_head, self.max_rows if draws else 0)
        for draw in draws:
            self.redraw(choices, hidden, lm_head, logits, draw)
        return choices

    def choose_greedily(self, hidden: Tensor, lm_head: Tensor, most_kept: int) -> tuple[Tensor, Tensor | None]:
        """Return `choose` without draws, and the logits [R, V] for `redraw` if they are of at most `most_kept` rows."""
        chunks, logits = [], None
        keep = len(hidden) <= most_kept
        parts = [hidden] if hidden.shape[0] <= self.max_greedy_rows else torch.split(hidden, self.max_greedy_rows)
        for part in parts:
            if keep or (chosen := self._choose_at_once(part, lm_head)) is None:
                logits = self._backend.logits(part, lm_head)
                choice, is_lost = self._checked_argmax(logits)
                chosen = choice.masked_fill_(is_lost, NOT_FINITE)
            chunks.append(chosen)
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks), logits if keep else None

    def redraw(
        self, choices: Tensor, hidden: Tensor, lm_head: Tensor, logits: Tensor | None, draws: SamplingMetadata[Tensor]
    ) -> None:
        """Choose rows of greedy choices [R] again, unless they are NOT_FINITE. Without `logits` compute them."""
        size = 1 if self._backend.batch_invariant else self.max_rows  # sums of other shapes have other orders
        for start in range(0, len(draws.rows), size):
            part = _part(draws, start, start + size)
            rows = part.rows.long()
            row_logits = self._backend.logits(hidden[rows], lm_head) if logits is None else logits[rows]
            drawn, greedy = self._draw(row_logits.float(), part), choices[rows]
            choices[rows] = torch.where(greedy < 0, greedy, drawn)

    def propose(self, hidden: Tensor, lm_head: Weight) -> Tensor:
        """Return the argmax [R] int64 for hidden states [R, H]; a row that is not finite gets any token."""
        if (chosen := self._choose_at_once(hidden, lm_head)) is not None:
            return chosen.clamp_(min=0)
        parts = torch.split(hidden, self.max_greedy_rows)
        chunks = [self._argmax(self._backend.logits(part, lm_head)) for part in parts]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def gumbel(self, state: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return standard Gumbel noise [N, V] fp32 for noise states [N] int32, or [N, C] of the `tokens` [N, C]."""
        uniform = (self.noise_bits(state, tokens).float() + 0.5) * 2.0**-NOISE_BITS
        return -torch.log(-torch.log(uniform))

    def noise_bits(self, state: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return the 23 bits of the noise, int32 and the same on every device."""
        token_hash = self._token_hash if tokens is None else self._token_hash[tokens]
        return self.mix(state[:, None] ^ token_hash) & ((1 << NOISE_BITS) - 1)

    def _choose_at_once(self, hidden: Tensor, lm_head: Weight) -> Tensor | None:
        """Return `Backend.choose`: greedy choices without logits, or None if the device does not make them."""
        return self._backend.choose(hidden, lm_head)

    def _checked_argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return checked_argmax(logits)

    def _argmax(self, logits: Tensor) -> Tensor:
        return logits.max(dim=-1)[1]

    def _draw(self, logits: Tensor, draws: SamplingMetadata[Tensor]) -> Tensor:
        """Return tokens [N] for logits [N, V] fp32 of the rows of `draws`."""
        if added := draws.additions:
            logits.index_put_((added.rows.long(), added.tokens.long()), added.values, accumulate=True)
        if draws.penalties:
            logits = penalise(logits, draws.penalties)
        logits = logits / draws.temperature[:, None]
        drawn = self._filtered(logits, draws.state, draws.filters) if draws.filters else self._pick(logits, draws.state)
        return drawn if draws.drawn is None else torch.where(draws.drawn.bool(), drawn, logits.argmax(dim=-1))

    def _pick(self, logits: Tensor, state: Tensor) -> Tensor:
        return (logits + self.gumbel(state)).argmax(dim=-1)

    def _filtered(self, logits: Tensor, state: Tensor, of: Filters[Tensor]) -> Tensor:
        """Return tokens drawn from a short list, if it has all tokens that the filters keep.

        If that is not certain, the host reads `complete`, but only on a device where this read is cheap.
        """
        is_short = of.form == "short" and not self._backend.batch_invariant
        if not (is_short or self._backend.memory_is_host):
            return self._pick(logits.masked_fill(~filters.keep(logits, of), -torch.inf), state)
        short = filters.shortlist(logits, of, SHORTLIST)
        noise = self.gumbel(state, short.tokens)
        best = (short.logits.masked_fill(~short.kept, -torch.inf) + noise).argmax(dim=-1, keepdim=True)
        drawn = short.tokens.gather(1, best)[:, 0]
        if of.form != "short" and not bool(short.complete.all()):
            rest = (~short.complete).nonzero()[:, 0]
            kept = filters.keep(logits[rest], part_of(of, rest))
            drawn[rest] = self._pick(logits[rest].masked_fill(~kept, -torch.inf), state[rest])
        return drawn

    def mix(self, x: Tensor) -> Tensor:
        """Apply `noise._mix` to int32, where multiplication wraps, without shifts, which an NPU's host makes (N32)."""
        for factor in (*FACTORS, None):
            x = x ^ (x.contiguous().view(torch.int16).unflatten(-1, (-1, 2))[..., 1].to(torch.int32) & 0xFFFF)
            x = x if factor is None else x * signed(factor)
        return x


class ShardedSampler(Sampler):
    """Sampler of ranks that each have a slice of the lm_head's rows, with the same choices on all of them.

    The lm_head of a rank is [V / size, H]. The ranks gather the best of their local logits as pairs (value, id) in
    fp32, where ids below 2^24 are exact. Ids ascend with ranks, so ties go to the lowest one. Only rank 0 draws.
    """

    def __init__(self, vocab_size: int, backend: Backend, comm: Comm) -> None:
        super().__init__(vocab_size, backend)
        self._comm = comm

    def _choose_at_once(self, hidden: Tensor, lm_head: Weight) -> None:
        """Return None: an operator that makes no logits would only see the local rows of the lm_head."""

    def _checked_argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return `checked_argmax` of all ranks' logits, for local logits [R, V / size]."""
        best, choice = logits.max(dim=-1)
        choice += self._comm.rank * logits.shape[1]
        values, ids = self._comm.all_gather(torch.stack((best.float(), choice.float()))).unbind(1)
        rank, is_lost = checked_argmax(values.t())
        return ids.gather(0, rank[None])[0].long(), is_lost

    def _argmax(self, logits: Tensor) -> Tensor:
        return self._checked_argmax(logits)[0]

    def _draw(self, logits: Tensor, draws: SamplingMetadata[Tensor]) -> Tensor:
        """Return the tokens [N] that rank 0 draws from all ranks' logits, for local logits [N, V / size] fp32."""
        whole = self._comm.all_gather(logits).transpose(0, 1).flatten(1)
        if self._comm.rank == 0:
            return self._comm.broadcast(super()._draw(whole, draws))
        return self._comm.broadcast(torch.empty(len(whole), dtype=torch.int64, device=whole.device))


def _part(draws: SamplingMetadata[Tensor], start: int, stop: int) -> SamplingMetadata[Tensor]:
    """Return rows [start, stop) of `draws`. Additions to other rows add nothing."""
    part = part_of(replace(draws, additions=None), slice(start, stop))
    if added := draws.additions:
        is_other = (added.rows < start) | (added.rows >= stop)
        rows, values = (added.rows - start).masked_fill(is_other, 0), added.values.masked_fill(is_other, 0.0)
        part.additions = LogitBias(rows, added.tokens, values)
    return part
