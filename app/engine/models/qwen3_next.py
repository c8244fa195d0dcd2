"""Qwen3-Next and Qwen3-Coder-Next: Qwen3.5 with experts, whose Gated DeltaNet is stored head by head."""

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.models.qwen3_5 import Qwen3_5, TextWeights
from app.engine.models.weights import Part, Weights


class GroupedWeights(TextWeights):
    """Weights whose `in_proj_qkvz` has q, k, v and z of each key head in turn, and whose `in_proj_ba` has b and a.

    A key head's v and z are those of all the value heads that it serves. They are put together by kind.
    """

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        prefix, _, kind = name.rpartition("in_proj_")
        if prefix and kind == "qkv.weight":
            self._parts |= self._ungrouped(prefix, *shape, part=part)
        return super().get(name, *shape, part=part, dtype=dtype)

    def _ungrouped(self, prefix: str, channels: int, hidden: int, part: Part | None) -> dict[str, Tensor]:
        sizes = self._config.gated_delta
        assert sizes is not None, "a config with Gated DeltaNet layers has their sizes"
        k_heads, group = sizes.num_k_heads, sizes.num_v_heads // sizes.num_k_heads
        rows = [sizes.k_head_dim, sizes.k_head_dim, group * sizes.v_head_dim, group * sizes.v_head_dim]
        first = part.ranges[0].start // sizes.k_head_dim if part else 0

        def heads(kind: str, width: int) -> Tensor:
            """Return this rank's key heads [Nk, width, H] of a projection."""
            own = part and Part(0, (range(first, first + k_heads),)).scaled(width)
            whole = channels // sizes.channels * k_heads * width
            stored = TextWeights.get(self, f"{prefix}in_proj_{kind}.weight", whole, hidden, part=own)
            return stored.unflatten(0, (k_heads, -1))

        qkvz, ba = heads("qkvz", sum(rows)), heads("ba", 2 * group)
        q, k, v, z = (part.flatten(0, 1) for part in qkvz.split_with_sizes(rows, dim=1))
        b, a = (part.flatten(0, 1) for part in ba.split_with_sizes([group, group], dim=1))
        parts = {"qkv": torch.cat((q, k, v)), "z": z, "b": b, "a": a}
        return {f"{prefix}in_proj_{name}.weight": part for name, part in parts.items()}


class Qwen3Next(Qwen3_5):
    """Hybrid decoder with experts in an older layout."""

    @classmethod
    def adapt(cls, weights: Weights, config: DecoderConfig) -> Weights:
        return GroupedWeights(weights, config)
