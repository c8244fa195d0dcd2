"""Qwen3 dense (arXiv 2505.09388)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.engine.models.config import DecoderConfig
from app.engine.models.target import Target


class Qwen3(Target):
    """Decoder with RMSNorm on each q and k head before RoPE, without biases."""

    @classmethod
    def refine(cls, config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
        return replace(config, qk_norm=True)
