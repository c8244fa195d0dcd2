"""RoPE of a config.json, in the dialects of `rope_scaling` and `rope_parameters`."""

import math

from app.engine.checkpoint.fields import Raw, fields, flag, number, positive
from app.engine.checkpoint.shapes import Llama3Scaling, RopeConfig, YarnScaling
from app.engine.errors import UnsupportedError

_PAIR_KEYS = ("is_neox_style", "rope_is_neox_style")
_KEYS = {"rope_type", "type", "rope_theta", "rope_dim", *_PAIR_KEYS}
_SCALING_KEYS = {
    "default": set[str](),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
    },
}  # fmt: skip


def rope_config(raw: Raw, head_dim: int) -> tuple[RopeConfig, int]:
    """Return RoPE as a config.json has it, and the longest context with it.

    Raises UnsupportedError naming a type or a parameter that is not computed here.
    """
    rope = fields(raw, "rope_scaling") | fields(raw, "rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        supported = ", ".join(_SCALING_KEYS)
        raise UnsupportedError(f"RoPE scaling of type {kind!r} is not supported yet; supported: {supported}")
    if unknown := sorted(set(rope) - _KEYS - _SCALING_KEYS[kind]):
        raise UnsupportedError(f"RoPE parameter {unknown[0]} = {rope[unknown[0]]!r} of {kind} is not supported yet")
    dim = positive(rope, "rope_dim", head_dim)
    if dim > head_dim or dim % 2:
        raise UnsupportedError(f"rope_dim {dim} must be even, and at most head_dim {head_dim}")
    longest = positive(raw, "max_position_embeddings", 32768)
    original = positive({**rope, **raw}, "original_max_position_embeddings", longest)
    scaling: Llama3Scaling | YarnScaling | None = None
    if kind == "llama3":
        factor, low, high = (number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        if high <= low:
            raise UnsupportedError(f"RoPE parameter high_freq_factor {high} must exceed low_freq_factor {low}")
        scaling = Llama3Scaling(factor, low, high, original)
    elif kind == "yarn":
        factor = number(rope, "factor")
        scaling = YarnScaling(
            factor,
            original,
            beta_fast=number(rope, "beta_fast", 32.0),
            beta_slow=number(rope, "beta_slow", 1.0),
            attention_factor=number(rope, "attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
            truncate=flag(rope, "truncate") is not False,
        )
        longest = max(longest, int(factor * original))
    styles = {flag(part, key) for key in _PAIR_KEYS for part in (raw, rope)} - {None}
    if len(styles) > 1:
        raise UnsupportedError(f"{' and '.join(_PAIR_KEYS)} disagree, in config.json or its RoPE parameters")
    theta = number({"rope_theta": raw.get("rope_theta"), **rope}, "rope_theta", 10000.0)
    turning = None if dim == head_dim else dim
    return RopeConfig(theta, scaling, turning, adjacent_pairs=False in styles), longest
