"""The families of targets that are supported. A family is one line here, and a file in app/engine/models.

A wrong family is refused before anything is loaded, so this table knows classes by their names alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.config.error import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """A family's name in messages, and where its class is: `module.Class` of app/engine/models."""

    name: str
    location: str


FAMILIES: dict[str, Family] = {
    "qwen3": Family("dense Qwen3", "qwen3.Qwen3"),
    "qwen3_moe": Family("Qwen3 with experts", "qwen3_moe.Qwen3Moe"),
    "llama": Family("Llama 3", "llama.Llama"),
    "gpt_oss": Family("gpt-oss", "gpt_oss.GptOss"),
    "qwen2": Family("Qwen2 and Qwen2.5", "qwen2.Qwen2"),
    "qwen3_5": Family("dense Qwen3.5, 3.6 and 3.8", "qwen3_5.Qwen3_5"),
    "qwen3_5_text": Family("the text part of these", "qwen3_5.Qwen3_5"),
    "qwen3_next": Family("Qwen3-Next", "qwen3_next.Qwen3Next"),
    "qwen3_5_moe": Family("Qwen3.5 and 3.6 with experts", "qwen3_5.Qwen3_5Moe"),
    "qwen3_5_moe_text": Family("the text part of these", "qwen3_5.Qwen3_5Moe"),
}
"""By the `model_type` of a target's config.json."""


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family of a target's config.json. Raises ConfigError if it is not supported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(f"{name!r} ({family.name})" for name, family in FAMILIES.items())
        raise ConfigError(f"target: model_type {model_type!r} is not supported yet; supported: {supported}")
    return FAMILIES[model_type]
