"""The shape of a decoder, read from a `config.json`. A field that would be run wrongly is refused by name."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.engine.device.base import AttentionMask
from app.engine.errors import UnsupportedError
from app.engine.load.fields import number, positive
from app.engine.load.hybrid_config import attention_fields, gated_delta_config, text_part, with_shared_expert
from app.engine.load.moe_config import moe_config, num_experts
from app.engine.load.rope_config import rope_config
from app.engine.models.config import DecoderConfig
from app.engine.models.registry import target_class


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json. Raises UnsupportedError if it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedError(f"{path}: expected a JSON object")
    return raw


def target_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the sizes in a target's config.json. Raises UnsupportedError for what its class would run wrongly."""
    family = target_class(raw)
    if not family.is_hybrid:
        return family.refine(decoder_config(raw, "target", family.supports), raw)
    text = text_part(raw)
    config = decoder_config(attention_fields(text), "target", family.supports)
    config = with_shared_expert(replace(config, gated_delta=gated_delta_config(text)), text)
    return family.refine(config, text)


def decoder_config(raw: Mapping[str, Any], where: str, supports: frozenset[str] = frozenset()) -> DecoderConfig:
    """Return the sizes in a config.json. `where` says whose config it is, for the message.

    Raises UnsupportedError naming a field that would be run wrongly. A model class names in `supports` the fields
    of variants that it implements itself.
    """
    _refuse_variants(raw, where, supports)
    hidden, heads = positive(raw, "hidden_size", where), positive(raw, "num_attention_heads", where)
    head_dim = positive(raw, "head_dim", where, default=hidden // heads)
    if head_dim % 2:
        raise UnsupportedError(f"{where}: head_dim {head_dim} is odd; RoPE needs two halves")
    max_positions = positive(raw, "max_position_embeddings", where, default=32768)
    rope, max_positions = rope_config(raw, head_dim, max_positions, where)
    attention_bias = bool(raw.get("attention_bias"))
    config = DecoderConfig(
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size", where),
        num_layers=positive(raw, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=positive(raw, "num_key_value_heads", where, default=heads),
        head_dim=head_dim,
        vocab_size=positive(raw, "vocab_size", where),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6, where),
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
        masks=tuple(AttentionMask(causal=True, window=window) for window in _windows(raw, where, supports)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        moe=moe_config(raw, where) if "num_experts" in supports else None,
    )
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedError(
            f"{where}: num_attention_heads {config.num_heads} is no multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )
    return config


def _windows(raw: Mapping[str, Any], where: str, supports: frozenset[str]) -> list[int | None]:
    """Return the window of each layer, which is None for full attention."""
    num_layers = positive(raw, "num_hidden_layers", where)
    if "layer_types" not in supports or raw.get("layer_types") is None:
        return [None] * num_layers
    return layer_windows(raw["layer_types"], raw.get("sliding_window"), num_layers, where)


def layer_windows(kinds: Any, window: Any, num_layers: int, where: str) -> list[int | None]:
    """Return the window of each of `layer_types`. Raises UnsupportedError if they are not as many as layers, or one is
    neither sliding nor full."""
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UnsupportedError(
            f"{where}: layer_types must name num_hidden_layers = {num_layers} layers, found {kinds!r}"
        )
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UnsupportedError(f"{where}: layer_types has {unknown[0]!r}, which is not supported yet")
    if "sliding_attention" in kinds:
        window = positive({"sliding_window": window}, "sliding_window", where)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _refuse_variants(raw: Mapping[str, Any], where: str, supports: frozenset[str]) -> None:
    layer_types = raw.get("layer_types")
    sliding = raw.get("use_sliding_window", raw.get("sliding_window") is not None)
    refusals = {
        "sliding_window": bool(sliding),
        "layer_types": layer_types is not None and any(kind != "full_attention" for kind in _list(layer_types)),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "partial_rotary_factor": raw.get("partial_rotary_factor") not in (None, 1.0),
        "final_logit_softcapping": raw.get("final_logit_softcapping") is not None,
        "attn_logit_softcapping": raw.get("attn_logit_softcapping") is not None,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "quantization_config": raw.get("quantization_config") is not None,
        "num_experts": num_experts(raw, where) is not None,
    }
    for field, refused in refusals.items():
        if refused and field not in supports:
            raise UnsupportedError(f"{where}: {_shown(raw, field)} is not supported yet")


def _shown(raw: Mapping[str, Any], field: str) -> str:
    """Return a refused key by the name that the config has, with its value. A quantisation is shown by its method,
    because some list hundreds of modules."""
    names = {"sliding_window": "use_sliding_window", "num_experts": "num_local_experts"}
    if raw.get(field) is None:
        field = names.get(field, field)
    value = raw.get(field)
    if field == "quantization_config" and isinstance(value, Mapping):
        field, value = f"{field}.quant_method", value.get("quant_method")
    return f"{field} = {value!r}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
