"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115)."""

from app.engine.models.target import Target


class Qwen2(Target):
    """Decoder with biases on q, k and v, which no key of its config.json names."""

    qkv_bias = True
