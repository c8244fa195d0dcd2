"""The target's own choice for a row: argmax, or argmax of logits / T + Gumbel noise that depends on nothing else.

The noise of a token is a hash of (the request's seed, the index of the token drawn, the token), so a draw does not
depend on the batch, on preemption, or on speculation. Integers only inside the hash; 23 mantissa bits, so that the
noise is always finite.
"""

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.backend import Backend
from app.engine.noise import FACTORS, signed

LOGITS_CHUNK_BYTES = 256 << 20
"""Logits are made in row chunks of at most this many fp32 bytes: 4096 rows x 152k tokens would be 2.5 GB."""

_TOKEN_SALT = 0x85EBCA6B


@dataclass(frozen=True, slots=True)
class Draws:
    """Logit rows that are not greedy: `host_rows` ascending, and on the device the same `rows` [N], the
    `temperature` [N] fp32 and the noise `state` [N] int32 of each."""

    host_rows: list[int]
    rows: Tensor
    temperature: Tensor
    state: Tensor


class Sampler:
    def __init__(self, vocab_size: int, backend: Backend) -> None:
        self._backend = backend
        self._chunk = max(1, LOGITS_CHUNK_BYTES // (4 * vocab_size))
        # On an NPU `int_tensor >> number` uploads the number at every call (N25), so these are tensors.
        self._bits = {bits: torch.tensor(bits, dtype=torch.int32, device=backend.device) for bits in (9, 15, 16)}
        tokens = torch.arange(vocab_size, dtype=torch.int32, device=backend.device)
        self._token_hash = self._mix(tokens + signed(_TOKEN_SALT))

    def choose(self, hidden: Tensor, lm_head: Tensor, draws: Draws | None = None) -> Tensor:
        """Hidden states [R, H] -> token ids [R] int64; ties go to the lowest id."""
        chunks = []
        for i, part in enumerate(torch.split(hidden, self._chunk)):
            logits = self._backend.linear(part, lm_head)
            choice = logits.argmax(dim=-1)
            if draws:
                self._draw(logits, choice, draws, i * self._chunk)
            chunks.append(choice)
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def gumbel(self, state: Tensor) -> Tensor:
        """Standard Gumbel noise [N, V] fp32 for noise states [N]."""
        bits = self._shift(self._mix(state[:, None] ^ self._token_hash), 9)
        uniform = (bits.float() + 0.5) * 2.0**-23
        return -torch.log(-torch.log(uniform))

    def _draw(self, logits: Tensor, choice: Tensor, draws: Draws, start: int) -> None:
        """Overwrite the argmax of those rows of a chunk, which begins at logit row `start`, that are not greedy."""
        part = slice(bisect_left(draws.host_rows, start), bisect_left(draws.host_rows, start + logits.shape[0]))
        if part.start == part.stop:
            return
        rows = draws.rows[part] - start
        perturbed = logits[rows].float() / draws.temperature[part, None] + self.gumbel(draws.state[part])
        choice[rows] = perturbed.argmax(dim=-1)

    def _mix(self, x: Tensor) -> Tensor:
        """`noise._mix` on int32, where multiplication wraps."""
        x = x ^ self._shift(x, 16)
        x = x * signed(FACTORS[0])
        x = x ^ self._shift(x, 15)
        x = x * signed(FACTORS[1])
        return x ^ self._shift(x, 16)

    def _shift(self, x: Tensor, bits: int) -> Tensor:
        """Logical shift right of int32."""
        return (x >> self._bits[bits]) & ((1 << (32 - bits)) - 1)
