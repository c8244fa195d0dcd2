"""Tiny random hybrid targets with drafts, in the published file formats of Qwen3.5, as text alone or multimodal."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.fast.engine import pairs
from tests.fast.engine.pairs import Pair, Tensors, make_pair

LAYER_TYPES = ("linear_attention", "linear_attention", "full_attention", "linear_attention")


def make_hybrid_pair(
    folder: Path,
    *,
    seed: int = 0,
    layer_types: tuple[str, ...] = LAYER_TYPES,
    k_heads: int = 2,
    v_heads: int = 4,
    k_dim: int = 8,
    v_dim: int = 12,
    multimodal: bool = False,
    experts: int = 0,
    fused: bool = True,
    grouped: bool = False,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Pair:
    """Write `folder/target`, a Qwen3_5ForCausalLM, and `folder/draft`.

    With `multimodal` the target is a Qwen3_5ForConditionalGeneration. `experts` make it a Qwen3_5MoeForCausalLM, and
    `grouped` ones a Qwen3NextForCausalLM of the same weights. `settings` are those of `make_pair`, which makes drafts.
    """
    pair = make_pair(folder, seed=seed, num_layers=len(layer_types), tied=tied, dtype=dtype, **settings)
    config = json.loads((pair.target / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")} | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": list(layer_types),
        "rope_parameters": rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": k_dim,
        "linear_value_head_dim": v_dim,
        "dtype": config["torch_dtype"],
    }
    if experts:
        del config["intermediate_size"]
        config |= {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        }
    target = tensors_of(config, seed, fused=fused)
    if grouped:
        config |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "norm_topk_prob": True}
        target = _grouped(target, k_heads, v_heads // k_heads)
    if multimodal:
        target = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in target.items()}
        target |= {"model.visual.patch_embed.proj.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
        text = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
        config = {
            "architectures": [config["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
            "model_type": config["model_type"].removesuffix("_text"),
            "text_config": text,
            "vision_config": {"model_type": "qwen3_5_vision", "depth": 1},
            "tie_word_embeddings": tied,
        }
    pairs.write_checkpoint(pair.target, config, target, dtype, shards=1)
    return replace(pair)


def tensors_of(config: dict[str, Any], seed: int, *, fused: bool) -> Tensors:
    """Return random tensors whose scale makes a mistake visible: states fade within some 10 to 100 tokens."""
    hidden, inner, vocab = config["hidden_size"], config.get("intermediate_size", 64), config["vocab_size"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    draw = pairs.Draw(1000 + seed)

    def norm(size: int) -> torch.Tensor:
        return draw.norm(size) - 1  # the family multiplies by 1 + weight

    tensors = {"model.embed_tokens.weight": draw.normal(vocab, hidden, std=0.35)}
    for i, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{i}."
        layer = pairs.layer_weights(draw, prefix, hidden, inner, heads, kv_heads, dim, False)
        layer = {name: x - 1 if name.endswith("norm.weight") else x for name, x in layer.items()}
        if kind == "linear_attention":
            layer = {name: tensor for name, tensor in layer.items() if ".self_attn." not in name}
            layer |= _gated_delta(draw, f"{prefix}linear_attn.", config)
        else:
            layer[f"{prefix}self_attn.q_proj.weight"] = draw.linear(2 * heads * dim, hidden)
        if experts := config.get("num_experts"):
            layer = {name: tensor for name, tensor in layer.items() if ".mlp." not in name}
            size, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
            layer |= pairs.expert_weights(draw, f"{prefix}mlp.", hidden, experts, size, fused=fused)
            layer |= {
                f"{prefix}mlp.shared_expert.gate_proj.weight": draw.linear(shared, hidden, gain=1.5),
                f"{prefix}mlp.shared_expert.up_proj.weight": draw.linear(shared, hidden, gain=1.5),
                f"{prefix}mlp.shared_expert.down_proj.weight": draw.linear(hidden, shared),
                f"{prefix}mlp.shared_expert_gate.weight": draw.linear(1, hidden),
            }
        tensors |= layer
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw.linear(vocab, hidden, gain=2.0)
    return tensors


def _gated_delta(draw: Any, prefix: str, config: dict[str, Any]) -> Tensors:
    hidden, v_heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = v_heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    tensors = {
        "in_proj_qkv.weight": draw.linear(channels, hidden),
        "in_proj_z.weight": draw.linear(values, hidden),
        "in_proj_b.weight": draw.linear(v_heads, hidden),
        "in_proj_a.weight": draw.linear(v_heads, hidden),
        "conv1d.weight": draw.normal(channels, 1, 4, std=0.7),
        "A_log": draw.normal(v_heads, std=1.0) - 1.0,
        "dt_bias": draw.normal(v_heads, std=1.0) - 1.0,
        "norm.weight": draw.norm(config["linear_value_head_dim"]),
        "out_proj.weight": draw.linear(hidden, values),
    }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _grouped(tensors: Tensors, k_heads: int, group: int) -> Tensors:
    """Return the same model with q, k, v and z of each key head in turn, and b and a likewise."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".in_proj_z.weight")]:
        prefix = name.removesuffix("z.weight")
        qkv, z, b, a = (found.pop(f"{prefix}{kind}.weight") for kind in ("qkv", "z", "b", "a"))
        keys = (len(qkv) - len(z)) // 2
        parts = [x.unflatten(0, (k_heads, -1)) for x in (qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], z)]
        found[f"{prefix}qkvz.weight"] = torch.cat(parts, dim=1).flatten(0, 1)
        found[f"{prefix}ba.weight"] = torch.stack([x.view(k_heads, group, -1) for x in (b, a)], dim=1).flatten(0, 2)
    return found
