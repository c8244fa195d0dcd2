"""RoPE of a `config.json`, in the dialects of `rope_scaling` and `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

from app.engine.errors import UnsupportedError
from app.engine.load.fields import number, positive
from app.engine.models.config import Llama3Scaling, RopeConfig, YarnScaling

_PAIR_KEYS = ("is_neox_style", "rope_is_neox_style")
_KEYS = {"rope_type", "type", "rope_theta", "rope_dim", *_PAIR_KEYS}
_SCALING_KEYS = {
    "default": set[str](),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
    },
}  # fmt: skip


def rope_config(raw: Mapping[str, Any], head_dim: int, max_positions: int, where: str) -> tuple[RopeConfig, int]:
    """Return RoPE as a config.json has it, and the longest context with it, of at least `max_positions`.

    Raises UnsupportedError naming a type or a parameter that is not computed here.
    """
    rope = _parameters(raw, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        supported = ", ".join(_SCALING_KEYS)
        raise UnsupportedError(
            f"{where}: RoPE scaling of type {kind!r} is not supported yet; supported are {supported}"
        )
    if unknown := sorted(set(rope) - _KEYS - _SCALING_KEYS[kind]):
        raise UnsupportedError(
            f"{where}: RoPE parameter {unknown[0]} = {rope[unknown[0]]!r} of type {kind} is not supported yet"
        )
    theta = number({"rope_theta": raw.get("rope_theta"), **rope}, "rope_theta", 10000.0, where)
    dim = positive(rope, "rope_dim", where, default=head_dim)
    if dim > head_dim or dim % 2:
        raise UnsupportedError(f"{where}: rope_dim {dim} must be even, and at most head_dim {head_dim}")
    original = positive({**rope, **raw}, "original_max_position_embeddings", where, default=max_positions)
    scaling: Llama3Scaling | YarnScaling | None = None
    if kind == "llama3":
        scaling = _llama3(rope, original, where)
    elif kind == "yarn":
        scaling = _yarn(rope, original, where)
        max_positions = max(max_positions, int(scaling.factor * original))
    config = RopeConfig(theta, scaling, dim if dim < head_dim else None, _has_adjacent_pairs(raw, rope, where))
    return config, max_positions


def _parameters(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        part = raw.get(field) or {}
        if not isinstance(part, Mapping):
            raise UnsupportedError(f"{where}: {field} must be an object, found {part!r}")
        rope |= part
    return rope


def _llama3(rope: Mapping[str, Any], original: int, where: str) -> Llama3Scaling:
    factor, low, high = (_given(rope, name, where) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise UnsupportedError(f"{where}: RoPE parameter high_freq_factor {high} must exceed low_freq_factor {low}")
    return Llama3Scaling(factor, low, high, original)


def _yarn(rope: Mapping[str, Any], original: int, where: str) -> YarnScaling:
    factor = _given(rope, "factor", where)
    truncate = rope.get("truncate", True)
    if type(truncate) is not bool:
        raise UnsupportedError(f"{where}: RoPE parameter truncate must be true or false, found {truncate!r}")
    return YarnScaling(
        factor,
        original,
        beta_fast=number(rope, "beta_fast", 32.0, where),
        beta_slow=number(rope, "beta_slow", 1.0, where),
        attention_factor=number(rope, "attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0, where),
        truncate=truncate,
    )


def _given(rope: Mapping[str, Any], name: str, where: str) -> float:
    if rope.get(name) is None:
        raise UnsupportedError(f"{where}: RoPE parameter {name} is missing")
    return number(rope, name, 1.0, where)


def _has_adjacent_pairs(raw: Mapping[str, Any], rope: Mapping[str, Any], where: str) -> bool:
    """Return True if a key says that dims are not in halves."""
    styles = [part[key] for key in _PAIR_KEYS for part in (raw, rope) if part.get(key) is not None]
    if any(type(style) is not bool for style in styles) or len(set(styles)) > 1:
        raise UnsupportedError(f"{where}: {' and '.join(_PAIR_KEYS)} must be true or false and agree, found {styles}")
    return False in styles
