"""The families of targets. A family is a line of FAMILIES, and a class in app/engine/models if its layers differ."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from app.engine.checkpoint.decoder import QUANTISED, decoder_config, layer_kinds, layer_masks
from app.engine.checkpoint.fields import Raw, fields, naming, number, only, positive, without
from app.engine.checkpoint.shapes import SWIGLU_ALPHA, DecoderConfig, GatedDeltaConfig
from app.engine.errors import UnsupportedError

_SHARED = ("dtype", "torch_dtype", "quantization_config")
"""Fields that multimodal configs have outside or inside their text part."""
_TIED = "tie_word_embeddings"


class Family(NamedTuple):
    """A family of targets: its name in messages, its class `module.Class` of app/engine/models, and its reader."""

    name: str
    location: str
    read: Callable[[Raw], DecoderConfig]


@naming("target")
def target_config(raw: Raw) -> DecoderConfig:
    """Return the shape of a target's config.json. Raises UnsupportedError for what its class would run wrongly."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(f"{name!r} ({family.name})" for name, family in FAMILIES.items())
        raise UnsupportedError(f"model_type {model_type!r} is not supported yet; supported: {supported}")
    return replace(FAMILIES[model_type].read(raw), model_type=model_type)


def _gpt_oss(raw: Raw) -> DecoderConfig:
    only(raw, swiglu_alpha=(SWIGLU_ALPHA,))
    rope = fields(raw, "rope_parameters") or fields(raw, "rope_scaling")
    for field, value in {
        "num_local_experts": raw.get("num_experts") or raw.get("num_local_experts"),
        "rope_scaling": rope or None,
        "rope_theta": rope.get("rope_theta", raw.get("rope_theta")),
        **{name: raw.get(name) for name in ("rms_norm_eps", "attention_bias")},
    }.items():
        if value is None:
            raise UnsupportedError(f"{field} is missing, whose default gpt-oss does not share with other families")
    num_layers = positive(raw, "num_hidden_layers")
    kinds = raw.get("layer_types") or (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
    masks = layer_masks(kinds, raw.get("sliding_window", 128), num_layers, causal=True)
    shared = without(raw, ("layer_types", "sliding_window"))
    limit = number(raw, "swiglu_limit", 7.0) if raw.get("swiglu_limit", 7.0) is not None else math.inf
    # Weights of experts are a softmax over the chosen ones.
    experts = {"norm_topk_prob": True, "has_bias": True, "swiglu_limit": limit}
    return decoder_config(shared, experts=experts, quantised=("mxfp4", *QUANTISED), sinks=True, masks=masks)


def _hybrid(raw: Raw, *, experts: bool = False) -> DecoderConfig:
    """Return the shape of Qwen3.5's family, whose fields are at the top or in `text_config`."""
    text = fields(raw, "text_config")
    for field in _SHARED:
        if field in text and field in raw and text[field] != raw[field]:
            raise UnsupportedError(f"{field} is {raw[field]!r} in config.json and {text[field]!r} in its text_config")
    outer = {field: raw[field] for field in (*_SHARED, _TIED) if raw.get(field) is not None}
    # The lm_head is the whole model's, so the outer field of it decides, as in Transformers.
    text = outer | text | {_TIED: outer.get(_TIED, text.get(_TIED))} if text else dict(raw)
    only(text, attn_output_gate=(True,), attention_bias=(False,))
    rope = fields(text, "rope_parameters")
    share = number(rope, "partial_rotary_factor", number(text, "partial_rotary_factor", 0.25))  # default of Qwen3.5
    if share > 1:
        raise UnsupportedError(f"partial_rotary_factor is the share of a head that turns, found {share:g}")
    # Positions of text are equal in all three parts of multimodal RoPE, so its sections do not matter here.
    noise = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
    head_dim = positive(text, "head_dim", positive(text, "hidden_size") // positive(text, "num_attention_heads"))
    rope = without(rope, noise) | {"rope_dim": int(head_dim * share)}
    plain = without(text, ("layer_types", *noise)) | {"rope_parameters": rope}
    known: dict[str, Any] | None = {} if experts else None
    if experts and text.get("num_experts"):  # in every layer, with weights that always sum to 1
        only(text, mlp_only_layers=([],), decoder_sparse_step=(1,), norm_topk_prob=(True,))
        plain |= {"intermediate_size": text.get("moe_intermediate_size")}
        known = {"norm_topk_prob": True, "shared_size": positive(text, "shared_expert_intermediate_size")}
    return decoder_config(plain, experts=known, qk_norm=True, gated_delta=_gated_delta(text))


def _gated_delta(text: Raw) -> GatedDeltaConfig:
    num_layers, every = positive(text, "num_hidden_layers"), positive(text, "full_attention_interval", 4)
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    kinds = layer_kinds(text.get("layer_types") or usual, num_layers, ("linear_attention", "full_attention"))
    if len(set(kinds)) < 2:
        raise UnsupportedError(f"layer_types must be linear_attention and full_attention, both, found {kinds[0]}")
    sizes = GatedDeltaConfig(
        layers=tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        conv_kernel=positive(text, "linear_conv_kernel_dim", 4),
        num_k_heads=positive(text, "linear_num_key_heads"),
        num_v_heads=positive(text, "linear_num_value_heads"),
        k_head_dim=positive(text, "linear_key_head_dim"),
        v_head_dim=positive(text, "linear_value_head_dim"),
    )
    if sizes.conv_kernel < 2:
        raise UnsupportedError(f"linear_conv_kernel_dim {sizes.conv_kernel}: it must be at least 2")
    if sizes.num_v_heads % sizes.num_k_heads:
        both = f"linear_num_value_heads {sizes.num_v_heads} is no multiple of linear_num_key_heads {sizes.num_k_heads}"
        raise UnsupportedError(both)
    return sizes


_hybrid_experts = partial(_hybrid, experts=True)
FAMILIES: dict[str, Family] = {
    "qwen3": Family("dense Qwen3", "target.Target", partial(decoder_config, qk_norm=True)),
    "qwen3_moe": Family("Qwen3 with experts", "target.Target", partial(decoder_config, qk_norm=True, experts={})),
    "llama": Family("Llama 3", "target.Target", decoder_config),
    "gpt_oss": Family("gpt-oss", "target.GptOss", _gpt_oss),
    "qwen2": Family("Qwen2 and Qwen2.5", "target.Target", partial(decoder_config, qkv_bias=True)),
    "qwen3_5": Family("dense Qwen3.5, 3.6 and 3.8", "qwen3_5.Qwen3_5", _hybrid),
    "qwen3_5_text": Family("the text part of these", "qwen3_5.Qwen3_5", _hybrid),
    "qwen3_next": Family("Qwen3-Next", "qwen3_5.Qwen3Next", _hybrid_experts),
    "qwen3_5_moe": Family("Qwen3.5 and 3.6 with experts", "qwen3_5.Qwen3_5", _hybrid_experts),
    "qwen3_5_moe_text": Family("the text part of these", "qwen3_5.Qwen3_5", _hybrid_experts),
}
"""By the `model_type` of a target's config.json."""
