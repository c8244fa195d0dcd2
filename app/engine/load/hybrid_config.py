"""Fields of a `config.json` of Qwen3.5's family beyond those of a dense decoder, at the top or in `text_config`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.engine.errors import UnsupportedError
from app.engine.load.fields import number, positive
from app.engine.models.config import DecoderConfig, GatedDeltaConfig

_WHERE = "target"
_PARTIAL_ROTARY_FACTOR = 0.25
"""Share of a head that turns where a config names none, as in the family's own code."""
_SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Fields that multimodal configs have outside or inside their text part."""


def attention_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a text part as those of a decoder whose layers all have attention.

    Raises UnsupportedError for a variant of attention that would run wrongly.
    """
    for field, wanted in {"attn_output_gate": True, "attention_bias": False}.items():
        if text.get(field) not in (None, wanted):
            raise UnsupportedError(f"{_WHERE}: {field} = {text[field]!r} is not supported yet")
    left = {name: value for name, value in text.items() if name not in ("layer_types", "partial_rotary_factor")}
    left |= {"rope_parameters": _rope(text)}
    if not text.get("num_experts"):
        return left
    # Every layer has experts, whose weights always sum to 1, so the size of a dense MLP is that of none.
    wants: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
    for field, wanted in wants.items():
        if text.get(field, wanted) != wanted:
            raise UnsupportedError(f"{_WHERE}: {field} = {text[field]!r} is not supported yet")
    return left | {"norm_topk_prob": True, "intermediate_size": text.get("moe_intermediate_size")}


def with_shared_expert(config: DecoderConfig, text: Mapping[str, Any]) -> DecoderConfig:
    """Return the config with the expert that serves every row, if it has experts at all."""
    if config.moe is None:
        return config
    size = positive(text, "shared_expert_intermediate_size", _WHERE)
    return replace(config, moe=replace(config.moe, shared_size=size))


def gated_delta_config(text: Mapping[str, Any]) -> GatedDeltaConfig:
    """Return the sizes of the Gated DeltaNet layers of a text part. Raises UnsupportedError for any that are wrong."""
    sizes = GatedDeltaConfig(
        layers=tuple(i for i, kind in enumerate(_layer_types(text)) if kind == "linear_attention"),
        conv_kernel=positive(text, "linear_conv_kernel_dim", _WHERE, default=4),
        num_k_heads=positive(text, "linear_num_key_heads", _WHERE),
        num_v_heads=positive(text, "linear_num_value_heads", _WHERE),
        k_head_dim=positive(text, "linear_key_head_dim", _WHERE),
        v_head_dim=positive(text, "linear_value_head_dim", _WHERE),
    )
    if sizes.conv_kernel < 2:
        raise UnsupportedError(f"{_WHERE}: linear_conv_kernel_dim {sizes.conv_kernel}: it must be at least 2")
    if sizes.num_v_heads % sizes.num_k_heads:
        raise UnsupportedError(
            f"{_WHERE}: linear_num_value_heads {sizes.num_v_heads} is no multiple of linear_num_key_heads "
            f"{sizes.num_k_heads}"
        )
    return sizes


def text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text part: the whole, or `text_config` with what it shares with the other parts."""
    text = raw.get("text_config")
    if text is None:
        return dict(raw)
    if not isinstance(text, Mapping):
        raise UnsupportedError(f"{_WHERE}: text_config must be an object, found {text!r}")
    for field in _SHARED:
        if field in text and field in raw and text[field] != raw[field]:
            raise UnsupportedError(
                f"{_WHERE}: {field} is {raw[field]!r} in config.json and {text[field]!r} in its text_config"
            )
    return {field: raw[field] for field in _SHARED if field in raw} | dict(text)


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. Without `layer_types` every fourth one, or as the config says, has attention."""
    num_layers = positive(text, "num_hidden_layers", _WHERE)
    every = positive(text, "full_attention_interval", _WHERE, default=4)
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UnsupportedError(f"{_WHERE}: layer_types must name {num_layers} layers, found {kinds!r}")
    if not all(isinstance(kind, str) for kind in kinds) or set(kinds) != {"linear_attention", "full_attention"}:
        raise UnsupportedError(
            f"{_WHERE}: layer_types must be linear_attention and full_attention, both of them, found "
            f"{sorted(set(map(str, kinds)))}"
        )
    return kinds


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters with `rope_dim` for the share that turns.

    Positions of text are alike in all three parts of multimodal RoPE, so its sections do not matter here.
    """
    given = text.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise UnsupportedError(f"{_WHERE}: rope_parameters must be an object, found {given!r}")
    rope = dict(given)
    for name in ("mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    fallback = number(text, "partial_rotary_factor", _PARTIAL_ROTARY_FACTOR, _WHERE)
    share = number(rope, "partial_rotary_factor", fallback, _WHERE)
    rope.pop("partial_rotary_factor", None)
    if share > 1:
        raise UnsupportedError(f"{_WHERE}: partial_rotary_factor is the share of a head that turns, found {share:g}")
    heads, hidden = positive(text, "num_attention_heads", _WHERE), positive(text, "hidden_size", _WHERE)
    return rope | {"rope_dim": int(positive(text, "head_dim", _WHERE, default=hidden // heads) * share)}
