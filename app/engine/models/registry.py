"""The targets that are supported, by the `model_type` of their config.json. A family is one line."""

from collections.abc import Mapping
from typing import Any

from app.engine.errors import UnsupportedError
from app.engine.models.qwen3 import Qwen3
from app.engine.models.qwen3_moe import Qwen3Moe
from app.engine.models.target import Target

TARGETS: dict[str, type[Target]] = {
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}


def target_class(raw: Mapping[str, Any]) -> type[Target]:
    """Return the class of a target's config.json. Raises UnsupportedError for a family that is not here."""
    model_type = raw.get("model_type")
    if model_type not in TARGETS:
        supported = ", ".join(f"{name!r} ({target.family})" for name, target in TARGETS.items())
        raise UnsupportedError(f"target: model_type {model_type!r} is not supported yet; supported: {supported}")
    return TARGETS[model_type]
