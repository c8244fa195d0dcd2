"""Qwen3 dense (arXiv 2505.09388)."""

from app.engine.models.target import Target


class Qwen3(Target):
    """Decoder with RMSNorm on each q and k head before RoPE, without biases."""

    qk_norm = True
