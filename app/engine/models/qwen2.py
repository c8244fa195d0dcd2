"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.engine.models.config import DecoderConfig
from app.engine.models.target import Target


class Qwen2(Target):
    """Decoder with biases on q, k and v, which no key of its config.json names."""

    @classmethod
    def refine(cls, config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
        return replace(config, qkv_bias=True)
