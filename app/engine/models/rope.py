"""RoPE (arXiv 2104.09864) by table, and the order of a head's dims that a backend turns in pairs."""

import math

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import Llama3Scaling, RopeConfig, RopeDivisors, YarnScaling
from app.engine.device.base import Backend, Rotation


class RotaryTable:
    """RoPE for positions [0, length) of heads of D dims: pair i turns by position * frequency i."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int, dtype: torch.dtype, backend: Backend) -> None:
        turning = frequencies(rope, rope.dim or head_dim)
        scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
        still = head_dim // 2 - len(turning)
        angles = torch.outer(torch.arange(length).float(), torch.cat((turning, torch.zeros(still))))
        scales = torch.cat((torch.full_like(turning, scale), torch.ones(still)))
        self.tables = backend.rotary_tables(angles, dtype, scales)
        self.backend = backend

    def at(self, positions: Tensor) -> Rotation:
        return self.backend.rotation_at(self.tables, positions)


def frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Return the radians that each of the dim / 2 pairs turns by from one position to the next, fp32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    match rope.scaling:
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, rope.theta, dim)
        case RopeDivisors(divisors):
            return plain / torch.tensor(divisors)
    return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return frequencies [dim / 2]: waves between both bounds are blended, by their turns in the original length."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, scaling: YarnScaling, theta: float, dim: int) -> Tensor:
    """Return frequencies [dim / 2]: a ramp over the dims from unscaled ones to `factor` times slower ones."""

    def dim_of(turns: float) -> float:
        return dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / (high - low or 0.001)  # without a range, a step at `low`
    slowed = ramp.clamp(0, 1)
    return plain / scaling.factor * slowed + plain * (1 - slowed)


def head_order(rope: RopeConfig, head_dim: int, backend: Backend) -> list[int]:
    """Return the dims of a head in the order in which the backend finds the pairs that turn together.

    Attention scores do not change if q and k are both in this order.
    """
    turning = rope.dim or head_dim
    if rope.adjacent_pairs:
        pairs = [(i, i + 1) for i in range(0, turning, 2)]
    else:
        pairs = [(i, turning // 2 + i) for i in range(turning // 2)]
    pairs += [(i, i + 1) for i in range(turning, head_dim, 2)]
    if backend.interleaved_rope:
        return [i for pair in pairs for i in pair]
    return [first for first, _ in pairs] + [second for _, second in pairs]


def reordered(weight: Tensor, order: list[int]) -> Tensor:
    """Return a projection [heads * D, H], a bias [heads * D] or a norm [D] with each head's rows in `order`."""
    if order == list(range(len(order))):
        return weight
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
