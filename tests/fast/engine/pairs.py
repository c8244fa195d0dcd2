"""Tiny random target + draft pairs in the published file formats, made in milliseconds.

The weights are random, but their scale makes a mistake visible. Logits spread by about 2, greedy text wanders, and
every norm has a weight well away from 1. fp32 rounding moves a logit by some 3e-5 at most (4 layers, token by token
against whole). That stays below the 1e-4 of the lossless rule.

The same seed and sizes give the same tensors in every dialect, so dialects can be compared exactly. A dialect has its
own shards, key prefix, and places of block size, target layers and RoPE in the config.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Json = dict[str, Any]
Family = Literal["qwen3", "llama", "qwen2", "gpt_oss"]
Tensors = dict[str, torch.Tensor]

LLAMA3: Json = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, Json] = {
    "Llama 3.1": {"family": "llama", "head_dim": 8, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "Llama 3.2, tied": {"family": "llama", "tied": True, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "Llama 2": {"family": "llama", "num_kv_heads": 4, "head_dim": 8},
    "Qwen2.5": {"family": "qwen2", "head_dim": 8, "rope_theta": 1e6},
    "Qwen2.5, tied": {"family": "qwen2", "head_dim": 8, "tied": True, "rope_theta": 1e6},
    "Qwen3, biases": {"biases": True},
    "Qwen3, yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}
"""Arguments of `make_pair` for a target of each dense family."""
GPT_OSS: Json = {
    "family": "gpt_oss", "biases": True, "rope_theta": 150000, "experts": 8, "experts_per_tok": 3,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
GPT_OSS_WINDOW = 8


@dataclass(frozen=True)
class Pair:
    """Two checkpoint folders and what was put into them."""

    target: Path
    draft: Path
    vocab_size: int
    num_layers: int
    draft_layers: int
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    max_position_embeddings: int
    dtype: torch.dtype


def make_pair(
    folder: Path,
    *,
    family: Family = "qwen3",
    seed: int = 0,
    vocab_size: int = 97,
    hidden_size: int = 32,
    intermediate_size: int = 64,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = False,
    block_size: int = 8,
    draft_layers: int = 2,
    taps: tuple[int, ...] = (1, 2),
    mask_token_id: int | None = None,
    rope_theta: float = 10000.0,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    draft_prefix: Literal["", "model."] = "",
    block_size_in: Literal["top", "dflash_config"] = "top",
    rope_dialect: Literal["rope_theta", "rope_parameters"] = "rope_theta",
    rope_scaling: Json | None = None,
    is_neox_style: bool | None = None,
    biases: bool = False,
    name_taps: bool = True,
    own_embedding: bool = False,
    own_head: bool = False,
    eos_token_id: int | list[int] | None = None,
    mxfp4: bool = False,
    experts: int = 0,
    experts_per_tok: int = 2,
    expert_size: int = 16,
    norm_topk_prob: bool = True,
    dense_layers: tuple[int, ...] = (),
    fused_experts: bool = False,
) -> Pair:
    """Write `folder/target`, of a family, and `folder/draft` (DFlash v1).

    With `experts` the target is a Qwen3MoeForCausalLM or a GptOssForCausalLM. `fused_experts` and `mxfp4` say how those
    of a layer are stored.

    `mask_token_id` defaults to the last id of the vocabulary. `name_taps=False` leaves `target_layer_ids` out of the
    draft's config, so `taps` must be the default ones. `own_embedding` and `own_head` give the draft an embedding
    and an lm_head that differ from the target's. `biases` are of q, k, v and o. `shards`, `biases` and RoPE are those
    of both folders.
    """
    mask_token_id = vocab_size - 1 if mask_token_id is None else mask_token_id
    shape: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": biases,
        "attention_dropout": 0.0,
        "max_position_embeddings": max_position_embeddings,
        "use_sliding_window": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if rope_dialect == "rope_theta":
        shape |= {"rope_theta": rope_theta, "rope_scaling": rope_scaling}
    else:
        shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": rope_theta, **(rope_scaling or {})}}
    if is_neox_style is not None:
        shape["is_neox_style"] = is_neox_style

    target_config = shape | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": tied,
    }
    if family == "gpt_oss":
        target_config |= {
            "model_type": family,
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": experts,
            "num_experts_per_tok": experts_per_tok,
            "sliding_window": GPT_OSS_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
            "swiglu_limit": 2.0,
        }
        del target_config["use_sliding_window"]
        if mxfp4:
            target_config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    elif family != "qwen3":
        target_config |= {"model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"]}
        left_out = {"head_dim"} if head_dim * num_heads == hidden_size else set()
        left_out |= {"attention_bias"} if family == "qwen2" else set()
        target_config = {name: value for name, value in target_config.items() if name not in left_out}
    if experts and family == "qwen3":
        target_config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": experts_per_tok,
            "moe_intermediate_size": expert_size,
            "norm_topk_prob": norm_topk_prob,
            "mlp_only_layers": list(dense_layers),
            "decoder_sparse_step": 1,
        }
    if eos_token_id is not None:
        target_config["eos_token_id"] = eos_token_id

    dflash: dict[str, Any] = {"mask_token_id": mask_token_id}
    if name_taps:
        dflash["target_layer_ids"] = list(taps)
    draft_config = shape | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": draft_layers,
        "layer_types": ["full_attention"] * draft_layers,
        "num_target_layers": num_layers,
        "tie_word_embeddings": False,
        "dflash_config": dflash,
    }
    (draft_config if block_size_in == "top" else dflash)["block_size"] = block_size

    draw = Draw(2 * seed)
    target: Tensors = {"model.embed_tokens.weight": draw.normal(vocab_size, hidden_size, std=0.35)}
    for i in range(num_layers):
        layer = layer_weights(
            draw, f"model.layers.{i}.", hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, biases
        )
        if experts and i not in dense_layers:
            layer = {name: tensor for name, tensor in layer.items() if ".mlp." not in name}
            mlp = f"model.layers.{i}.mlp."
            if family == "gpt_oss":
                layer |= gpt_oss_experts(draw, mlp, hidden_size, experts, intermediate_size, mxfp4=mxfp4)
                layer[f"model.layers.{i}.self_attn.sinks"] = draw.normal(num_heads, std=2.0)
            else:
                layer |= expert_weights(draw, mlp, hidden_size, experts, expert_size, fused=fused_experts)
        if family != "qwen3":
            layer = {
                name: tensor for name, tensor in layer.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))
            }
        if family == "qwen2":
            for name, size in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
                layer[f"model.layers.{i}.self_attn.{name}_proj.bias"] = draw.normal(size * head_dim, std=1.0)
        target |= layer
    target["model.norm.weight"] = draw.norm(hidden_size)
    if not tied:
        target["lm_head.weight"] = draw.linear(vocab_size, hidden_size, gain=2.0)

    draw = Draw(2 * seed + 1)
    draft: Tensors = {
        "fc.weight": draw.linear(hidden_size, len(taps) * hidden_size),
        "hidden_norm.weight": draw.norm(hidden_size),
    }
    for i in range(draft_layers):
        draft |= layer_weights(
            draw, f"layers.{i}.", hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, biases
        )
    draft["norm.weight"] = draw.norm(hidden_size)
    if own_embedding:
        draft["embed_tokens.weight"] = draw.normal(vocab_size, hidden_size, std=0.35)
    draft = {draft_prefix + name: tensor for name, tensor in draft.items()}
    if own_head:
        draft["lm_head.weight"] = draw.linear(vocab_size, hidden_size, gain=2.0)

    write_checkpoint(folder / "target", target_config, target, dtype, shards)
    write_checkpoint(folder / "draft", draft_config, draft, dtype, shards)
    return Pair(
        target=folder / "target",
        draft=folder / "draft",
        vocab_size=vocab_size,
        num_layers=num_layers,
        draft_layers=draft_layers,
        block_size=block_size,
        taps=tuple(taps),
        mask_token_id=mask_token_id,
        max_position_embeddings=max_position_embeddings,
        dtype=dtype,
    )


class Draw:
    """Seeded weights; the gain keeps each projection's output near the size of its input."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def linear(self, out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(out_features, in_features, std=gain * in_features**-0.5)

    def norm(self, size: int) -> torch.Tensor:
        """Between 0.5 and 1.5, so that a weight that is skipped or misplaced is seen."""
        return torch.rand(size, generator=self.generator) + 0.5


def layer_weights(
    draw: Draw, prefix: str, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, biases: bool
) -> Tensors:
    # Context must outweigh the token's own embedding, or greedy text falls into a loop of one token: hence the gains of
    # attention. Sharper attention (q and k norms) wanders more still, but amplifies rounding past 1e-4.
    tensors = {
        "input_layernorm.weight": draw.norm(hidden),
        "self_attn.q_proj.weight": draw.linear(heads * head_dim, hidden),
        "self_attn.k_proj.weight": draw.linear(kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": draw.linear(kv_heads * head_dim, hidden, gain=2.0),
        "self_attn.q_norm.weight": draw.norm(head_dim) * 1.5,
        "self_attn.k_norm.weight": draw.norm(head_dim) * 1.5,
        "self_attn.o_proj.weight": draw.linear(hidden, heads * head_dim, gain=4.0),
        "post_attention_layernorm.weight": draw.norm(hidden),
        "mlp.gate_proj.weight": draw.linear(inner, hidden, gain=1.5),
        "mlp.up_proj.weight": draw.linear(inner, hidden, gain=1.5),
        "mlp.down_proj.weight": draw.linear(hidden, inner, gain=1.5),
    }
    if biases:
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": hidden}
        tensors |= {f"self_attn.{name}_proj.bias": draw.normal(size, std=1.0) for name, size in sizes.items()}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def expert_weights(draw: Draw, prefix: str, hidden: int, experts: int, inner: int, *, fused: bool) -> Tensors:
    """A router that is decided, so that rounding moves no row to another expert, and experts that differ."""
    gate_up = draw.normal(experts, 2 * inner, hidden, std=1.5 * hidden**-0.5)
    down = draw.normal(experts, hidden, inner, std=3.0 * inner**-0.5)
    tensors = {"gate.weight": draw.linear(experts, hidden, gain=2.0)}
    if fused:
        tensors |= {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    else:
        for i, (gate, up) in enumerate(gate_up.unflatten(1, (2, inner))):
            names = (f"experts.{i}.{name}_proj.weight" for name in ("gate", "up", "down"))
            tensors |= dict(zip(names, (gate, up, down[i]), strict=True))
    return {prefix + name: tensor for name, tensor in tensors.items()}


def gpt_oss_experts(draw: Draw, prefix: str, hidden: int, experts: int, inner: int, *, mxfp4: bool) -> Tensors:
    tensors = {
        "router.weight": draw.linear(experts, hidden, gain=2.0),
        "router.bias": draw.normal(experts, std=0.5),
        "experts.gate_up_proj": draw.normal(experts, hidden, 2 * inner, std=1.5 * hidden**-0.5),
        "experts.gate_up_proj_bias": draw.normal(experts, 2 * inner, std=0.5),
        "experts.down_proj": draw.normal(experts, inner, hidden, std=1.5 * inner**-0.5),
        "experts.down_proj_bias": draw.normal(experts, hidden, std=0.5),
    }
    for name in ("experts.gate_up_proj", "experts.down_proj") if mxfp4 else ():
        _, columns, rows = tensors.pop(name).shape
        size = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=draw.generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, size, generator=draw.generator).to(torch.uint8)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Tensors, dtype: torch.dtype, shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        name: (tensor if tensor.dtype == torch.uint8 else tensor.to(dtype)).contiguous()
        for name, tensor in tensors.items()
    }
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
