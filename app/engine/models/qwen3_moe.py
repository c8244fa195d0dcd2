"""Qwen3 with experts (arXiv 2505.09388): Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B."""

from app.engine.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """Qwen3 whose layers have a mixture of experts in the place of their MLP, or most of its layers."""

    supports = Qwen3.supports | {"num_experts"}
