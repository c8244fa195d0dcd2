"""The pre-norm decoder layer that targets and drafts share, with fused weights. Only masks and KV lengths differ."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.engine.comm.comm import Comm
from app.engine.device.base import AttentionMetadata, Backend, LayerKv, ProjectedRows, Rotation
from app.engine.models.experts import load_experts
from app.engine.models.recurrent_rows import RecurrentRows
from app.engine.models.rope import head_order, reordered
from app.engine.models.weights import LayerSource
from app.engine.quantised import Rows, Weight, by_rows, plain


def frozen(weight: Tensor) -> nn.Parameter:
    """Return a weight as a parameter that is never trained."""
    return nn.Parameter(weight, requires_grad=False)


def held(weight: Weight) -> Weight:
    """Return a weight of a product as a parameter, or unchanged if it is quantised."""
    return frozen(weight) if isinstance(weight, Tensor) else weight


@dataclass(frozen=True, slots=True)
class StepRows:
    """The T rows of one forward, which all layers read."""

    rotation: Rotation
    slot_mapping: Tensor  # [T] int32
    groups: list[AttentionMetadata]  # one attention call each, over consecutive rows
    recurrent: RecurrentRows[Tensor] | None = None  # for a hybrid target
    shared: dict[str, Any] = field(default_factory=dict)  # what the first recurrent layer finds for all


class Attention(nn.Module):
    """Grouped-query attention under the layer's mask. With `config.qk_norm` RMSNorm is applied to each q and k head
    before RoPE."""

    def __init__(self, layer: LayerSource) -> None:
        super().__init__()
        config, backend = layer.config, layer.backend
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        weights, self.qkv_bias = read_projections(layer, "qkv")
        self.qkv = held(backend.pack_linear(*weights))
        self.readers: tuple[Weight, ...] = (self.qkv,)
        self.o = held(backend.pack_linear(layer.linear("self_attn.o_proj.weight", hidden, q_size, split=1)))
        has_o_bias = config.o_bias or has_quant_bias(layer, "o")
        self.o_bias = frozen(layer.get_summed("self_attn.o_proj.bias", hidden)) if has_o_bias else None
        sinks = layer.get("self_attn.sinks", config.num_heads, split=0) if config.sinks else None
        self.sinks = None if sinks is None else frozen(backend.pack_sinks(sinks))
        self.q_norm = load_head_norm(layer, "q_norm") if config.qk_norm else None
        self.k_norm = load_head_norm(layer, "k_norm") if config.qk_norm else None
        self.mask = config.masks[layer.index]
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._backend = backend
        self._project = layer.comm.reduced(backend.linear)

    def forward(self, x: Rows, rows: StepRows, kv: LayerKv) -> Tensor:
        """Return the output projection [T, H] of attention over `kv`, after K and V of the rows are written there."""
        return self._project(self.attend(x, rows, kv), self.o, self.o_bias)

    def attend(self, x: Rows, rows: StepRows, kv: LayerKv) -> Tensor:
        """Return the heads [T, heads * D] that `forward` projects."""
        backend, norms = self._backend, (self.q_norm, self.k_norm)
        qkv = backend.linear(x, self.qkv, self.qkv_bias).view(x.shape[0], -1, self._head_dim)
        q = backend.qkv_into_kv(ProjectedRows(qkv, *norms, self._eps, rows.rotation, kv, rows.slot_mapping))
        parts = q.split_with_sizes([sum(meta.query_lens) for meta in rows.groups])
        groups = zip(parts, rows.groups, strict=True)
        o = [backend.attention(part, kv, meta, self.mask, self.sinks) for part, meta in groups]
        return (o[0] if len(o) == 1 else torch.cat(o)).flatten(1)


class DecoderLayer(nn.Module):
    """Norm, attention, norm, gated MLP or experts, with the residual carried next to the hidden states."""

    def __init__(self, layer: LayerSource) -> None:
        super().__init__()
        config, moe = layer.config, layer.config.moe_of(layer.index)
        self.attention = self.make_attention(layer)
        self.input_readers = cast(Sequence[Weight], self.attention.readers)
        self.mixture = (moe, load_experts(layer, moe)) if moe else None
        if self.mixture is None:
            self.gate_up, self.down = load_mlp(layer, "mlp", config.intermediate_size)
            self.mlp_readers: tuple[Weight, ...] = (self.gate_up,)
        else:
            self.mlp_readers = (self.mixture[1].router, self.mixture[1].gate_up)
        self.input_norm = frozen(layer.get("input_layernorm.weight", config.hidden_size))
        self.post_attention_norm = frozen(layer.get("post_attention_layernorm.weight", config.hidden_size))
        self._eps = config.rms_norm_eps
        self._backend = layer.backend
        self._summed_feed_forward = layer.comm.reduced(self.feed_forward)

    def make_attention(self, layer: LayerSource) -> nn.Module:
        """Return the part that mixes rows, with the weights `readers` of its input's products. Families override it."""
        return Attention(layer)

    def enter(self, hidden: Tensor, residual: Tensor | None) -> tuple[Rows, Tensor]:
        """Return (the normed input of `forward`, the residual stream before this layer), each [T, H]."""
        return self._backend.norm_for(hidden, residual, self.input_norm, self._eps, self.input_readers)

    def forward(self, normed: Rows, residual: Tensor, rows: StepRows, kv: LayerKv) -> tuple[Tensor, Tensor]:
        """Return (output of MLP or experts, residual stream before it), each [T, H]. The next norm adds them up."""
        hidden = self.attention.forward(normed, rows, kv)
        weight, readers = self.post_attention_norm, self.mlp_readers
        normed, residual = self._backend.norm_for(hidden, residual, weight, self._eps, readers)
        return self._summed_feed_forward(normed), residual

    def feed_forward(self, normed: Rows) -> Tensor:
        """Return the output of the MLP or the experts [T, H], which is a part of a sum if ranks share them."""
        if self.mixture is not None:
            moe, experts = self.mixture
            return self._backend.moe(normed, experts, moe)
        return self._backend.gated_mlp(normed, self.gate_up, self.down)


def read_projections(layer: LayerSource, names: str) -> tuple[list[Weight], nn.Parameter | None]:
    """Return the weights [heads * D, H] of the `names` of q, k and v, and their biases in one, or None without any.

    Rows of a q and k head are in the order in which the device rotates them.
    """
    config = layer.config
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    order, as_stored = head_order(config.rope, config.head_dim, layer.backend), list(range(config.head_dim))
    parts = {
        "q": (q_size, 1, order),
        "k": (kv_size, config.kv_copies, order),
        "v": (kv_size, config.kv_copies, as_stored),
    }
    weights: list[Weight] = []
    biases: list[Tensor | None] = []
    for name in names:
        size, copies, of_head = parts[name]
        turned = partial(reordered, order=of_head)
        split = {"split": 0, "copies": (copies,)}
        stored = layer.linear(f"self_attn.{name}_proj.weight", size, config.hidden_size, **split)
        weights.append(by_rows(stored, turned))
        has_bias = config.qkv_bias or has_quant_bias(layer, name)
        biases.append(turned(layer.get(f"self_attn.{name}_proj.bias", size, **split)) if has_bias else None)
    given = [bias for bias in biases if bias is not None]
    if not given:
        return weights, None
    sizes = [parts[name][0] for name in names]
    whole = [given[0].new_zeros(size) if bias is None else bias for size, bias in zip(sizes, biases, strict=True)]
    return weights, frozen(torch.cat(whole))


def has_quant_bias(layer: LayerSource, name: str) -> bool:
    """Return True if the quantised projection `name` of attention has a bias that is not 0."""
    return layer.name(f"self_attn.{name}_proj.quant_bias") in layer.weights


def load_head_norm(layer: LayerSource, name: str) -> nn.Parameter:
    """Return the weight [D] of the RMSNorm of q or k heads, ordered like these."""
    config = layer.config
    order = head_order(config.rope, config.head_dim, layer.backend)
    return frozen(reordered(layer.get(f"self_attn.{name}.weight", config.head_dim), order))


def load_mlp(layer: LayerSource, name: str, inner: int) -> tuple[Weight, Weight]:
    """Return gate and up in one [2 * inner, H], and down [H, inner], of the gated MLP called `name`."""
    hidden, pack = layer.config.hidden_size, layer.backend.pack_linear
    gate, up = (layer.linear(f"{name}.{part}_proj.weight", inner, hidden, split=0) for part in ("gate", "up"))
    down = layer.linear(f"{name}.down_proj.weight", hidden, inner, split=1)
    return held(pack(gate, up)), held(pack(down))


def tied_head(embedding: nn.Parameter, comm: Comm) -> nn.Parameter:
    """Return the rank's rows of an lm_head that is the embedding [V, H], in the same memory."""
    rows = comm.part(len(embedding))
    return embedding if comm.size == 1 else frozen(embedding[rows.start : rows.stop])


def add_norm(
    backend: Backend, hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of the residual stream in the engine's dtype, the stream itself), each [T, H]."""
    normed, total = backend.norm_for(hidden, residual, weight, eps, ())
    return plain(normed), total
