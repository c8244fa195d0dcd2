"""Qwen3.5, 3.6, 3.8 and Qwen3-Next: three of four layers are Gated DeltaNet, the others gated attention."""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from app.engine.checkpoint.quantised import OTHER_PARTS
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import LayerKv
from app.engine.models.gated_delta_net import GatedDeltaNet
from app.engine.models.layers import Attention, DecoderLayer, StepRows, frozen, held, load_mlp
from app.engine.models.target import Target
from app.engine.models.weights import LayerSource, Part, Weights
from app.engine.quantised import Rows, Weight, by_rows

logger = logging.getLogger(__name__)


class HybridLayer(DecoderLayer):
    """Decoder layer with a Gated DeltaNet or gated attention, and an MLP or experts, one of them shared by all rows."""

    def __init__(self, layer: LayerSource) -> None:
        super().__init__(layer)
        moe = layer.config.moe_of(layer.index)
        self._has_shared_expert = bool(moe and moe.shared_size)
        if moe and moe.shared_size:
            self.shared_gate_up, self.shared_down = load_mlp(layer, "mlp.shared_expert", moe.shared_size)
            gate = layer.get("mlp.shared_expert_gate.weight", 1, layer.config.hidden_size)
            self.shared_gate = frozen(layer.backend.pack_weight(gate))
            self.mlp_readers += (self.shared_gate_up, self.shared_gate)

    def feed_forward(self, normed: Rows) -> Tensor:
        out = super().feed_forward(normed)
        if not self._has_shared_expert:
            return out
        shared = self._backend.gated_mlp(normed, self.shared_gate_up, self.shared_down)
        return self._backend.add_shared_expert(out, shared, normed, self.shared_gate)

    def make_attention(self, layer: LayerSource) -> nn.Module:
        return (GatedDeltaNet if layer.index in layer.config.recurrent_layers else GatedAttention)(layer)


class GatedAttention(Attention):
    """Attention whose heads are multiplied by the sigmoid of a projection of the layer's input."""

    def __init__(self, layer: LayerSource) -> None:
        super().__init__(layer)
        config = layer.config
        size = config.num_heads * config.head_dim
        gate = layer.linear("self_attn.gate_proj.weight", size, config.hidden_size, split=0)
        self.gate = held(layer.backend.pack_linear(gate))
        self.readers += (self.gate,)

    def attend(self, x: Rows, rows: StepRows, kv: LayerKv) -> Rows:
        gate = self._backend.linear(x, self.gate)
        return self._backend.sigmoid_mul(super().attend(x, rows, kv), gate, self.o)


class TextWeights:
    """Weights of the text part, under the names and with the meaning that the shared layers expect.

    The stored q_proj has the query and the gate of each head in turn; `q_proj` and then `gate_proj` are its parts.
    Norms get their 1 added. Norms and decays are in float32, because a narrower dtype would round 1 + weight and
    exp(A_log).
    """

    def __init__(self, weights: Weights, config: DecoderConfig) -> None:
        self._weights = weights
        self._config = config
        self._parts: dict[str, Weight] = {}
        others = [name for name in weights.names if name.startswith(OTHER_PARTS)]
        for name in others:
            weights.skip(name)
        if others:
            logger.info("target: %d tensors under %s are left out", len(others), " and ".join(OTHER_PARTS))

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(part_of_fused := self._parts.pop(name, None), Tensor):
            return part_of_fused
        if name.endswith(("norm.weight", ".A_log", ".dt_bias")):
            dtype = torch.float32
        stored = self._weights.get(name, *shape, part=part, dtype=dtype)
        return stored + 1 if name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight") else stored

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> Weight:
        if name in self._parts:
            return self._parts.pop(name)
        if not name.endswith(".q_proj.weight"):
            return self._weights.get_linear(name, *shape, part=part)
        stored = self._weights.get_linear(name, 2 * shape[0], shape[1], part=part and part.scaled(2))

        def head_rows(which: int) -> Weight:
            heads = (-1, 2, self._config.head_dim)
            return by_rows(stored, lambda rows: rows.unflatten(0, heads)[:, which].flatten(0, 1))

        self._parts[name.replace(".q_proj.", ".gate_proj.")] = head_rows(1)
        return head_rows(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)


class GroupedWeights(TextWeights):
    """Weights whose `in_proj_qkvz` has q, k, v and z of each key head in turn, and whose `in_proj_ba` has b and a.

    A key head has v and z of all value heads that it serves. Loading sorts the rows by kind.
    """

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> Weight:
        prefix, _, kind = name.rpartition("in_proj_")
        if prefix and kind == "qkv.weight":
            self._parts |= self._ungrouped(prefix, shape[1], part)
        return super().get_linear(name, *shape, part=part)

    def _ungrouped(self, prefix: str, hidden: int, part: Part | None) -> dict[str, Weight]:
        sizes = self._config.gated_delta
        assert sizes is not None, "a config with Gated DeltaNet layers has their sizes"
        k_heads, copies, dim = sizes.num_k_heads, sizes.k_copies, sizes.k_head_dim
        group = sizes.num_v_heads // k_heads  # value heads to a key head, on this rank
        q, k, v = (rows.start for rows in part.ranges) if part else (0, k_heads * dim, 2 * k_heads * dim)
        first, piece = q // dim, (v - 2 * (k - q)) // (group * sizes.v_head_dim) % copies
        num_heads = (k - q) // dim  # of all ranks
        values = [group * sizes.v_head_dim] * copies
        widths = {"qkvz": [dim, dim, *values, *values], "ba": [group] * 2 * copies}
        stored: dict[str, Weight] = {}
        for name, get in (("qkvz", self._weights.get_linear), ("ba", self._weights.get)):
            head_rows = sum(widths[name])
            local = Part(0, (range(first, first + k_heads),)).scaled(head_rows) if part else None
            stored[name] = get(f"{prefix}in_proj_{name}.weight", num_heads * head_rows, hidden, part=local)

        def rows_of(name: str, *kinds: int) -> Weight:
            return by_rows(stored[name], partial(_rows_of_kinds, k_heads, widths[name], kinds))

        return {
            f"{prefix}in_proj_qkv.weight": rows_of("qkvz", 0, 1, 2 + piece),
            f"{prefix}in_proj_z.weight": rows_of("qkvz", 2 + copies + piece),
            f"{prefix}in_proj_b.weight": rows_of("ba", piece),
            f"{prefix}in_proj_a.weight": rows_of("ba", copies + piece),
        }


def _rows_of_kinds(num_heads: int, widths: list[int], kinds: tuple[int, ...], rows: Tensor) -> Tensor:
    """Return the rows of `kinds`, kind by kind, of rows in which each head has `widths[i]` of each kind i in turn."""
    split = rows.unflatten(0, (num_heads, -1)).split_with_sizes(widths, dim=1)
    return torch.cat([split[kind].flatten(0, 1) for kind in kinds])


class Qwen3_5(Target):
    """Hybrid decoder. Its RMSNorms multiply by 1 + weight, and RoPE turns a part of each head."""

    layer_class = HybridLayer

    @classmethod
    def adapt(cls, weights: Weights, config: DecoderConfig) -> Weights:
        return TextWeights(weights, config)


class Qwen3Next(Qwen3_5):
    """Hybrid decoder with experts in an older layout."""

    @classmethod
    def adapt(cls, weights: Weights, config: DecoderConfig) -> Weights:
        return GroupedWeights(weights, config)
