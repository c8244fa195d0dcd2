"""The target's own choice for a row: argmax, or argmax of logits / T + Gumbel noise that depends on nothing else.

The noise of a token is a hash of (the request's seed, the index of the token drawn, the token), so a draw does not
depend on the batch, on preemption, or on speculation. Integers only inside the hash; 23 mantissa bits, so that the
noise is always finite.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.backend import Backend

LOGITS_CHUNK_BYTES = 256 << 20
"""Logits are made in row chunks of at most this many fp32 bytes: 4096 rows x 152k tokens would be 2.5 GB."""

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Noise:
    """Rows at temperature > 0: `rows` (ascending, host) of the logit rows, with `temperature` [N] fp32 and the hash
    `state` [N] int32 of each on the device."""

    rows: list[int]
    temperature: Tensor
    state: Tensor


class Sampler:
    def __init__(self, vocab_size: int, backend: Backend) -> None:
        self._backend = backend
        self._chunk = max(1, LOGITS_CHUNK_BYTES // (4 * vocab_size))
        tokens = torch.arange(vocab_size, dtype=torch.int32, device=backend.device)
        self._token_hash = _mix(tokens + _signed(0x85EBCA6B))

    def choose(self, hidden: Tensor, lm_head: Tensor, noise: Noise | None = None) -> Tensor:
        """Hidden states [R, H] -> token ids [R] int64; ties go to the lowest id."""
        chunks = []
        for i, part in enumerate(torch.split(hidden, self._chunk)):
            logits = self._backend.linear(part, lm_head)
            choice = logits.argmax(dim=-1)
            if noise:
                self._draw(logits, choice, noise, i * self._chunk)
            chunks.append(choice)
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _draw(self, logits: Tensor, choice: Tensor, noise: Noise, start: int) -> None:
        """Overwrite the argmax of the chunk's rows that are sampled."""
        inside = [i for i, row in enumerate(noise.rows) if start <= row < start + logits.shape[0]]
        if not inside:
            return
        part = slice(inside[0], inside[-1] + 1)
        rows = torch.tensor([row - start for row in noise.rows[part]], device=logits.device)
        perturbed = logits[rows].float() / noise.temperature[part, None] + self.gumbel(noise.state[part])
        choice[rows] = perturbed.argmax(dim=-1)

    def gumbel(self, state: Tensor) -> Tensor:
        """Standard Gumbel noise [N, V] fp32 for hash states [N]."""
        bits = _shift(_mix(state[:, None] ^ self._token_hash), 9)
        uniform = (bits.float() + 0.5) * 2.0**-23
        return -torch.log(-torch.log(uniform))


def noise_states(draws: Iterator[tuple[int, int]]) -> list[int]:
    """The hash state, as a signed 32-bit number, for each (seed, index of the token drawn)."""
    return [_signed(_mix_int(_mix_int(_mix_int(s & _MASK ^ 0x9E3779B9) ^ s >> 32) ^ p)) for s, p in draws]


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (Wellons' lowbias32) on int32, where multiplication wraps."""
    x = x ^ _shift(x, 16)
    x = x * _signed(0x7FEB352D)
    x = x ^ _shift(x, 15)
    x = x * _signed(0x846CA68B)
    return x ^ _shift(x, 16)


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x
