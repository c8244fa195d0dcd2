"""The shape of a decoder of any family, with its RoPE. A field that would be run wrongly is refused by name."""

import math
from collections.abc import Mapping
from typing import Any

from app.engine.checkpoint.fields import MOST, Raw, fields, flag, number, only, positive
from app.engine.checkpoint.quantised import check_method
from app.engine.checkpoint.shapes import (
    AttentionMask,
    DecoderConfig,
    Llama3Scaling,
    MoeConfig,
    RopeConfig,
    RopeDivisors,
    YarnScaling,
)
from app.engine.errors import UnsupportedError

EXPERTS_ALIGNMENT = 8
"""Numbers that a row of an expert's weights is a multiple of: 16 bytes in 16 bits, for PyTorch's grouped product."""
QUANTISED = ("fp8", "compressed-tensors")
"""Methods of quantization_config of the targets' families. Quantised drafts are not read."""
_NUM_EXPERTS = ("num_experts", "num_local_experts")
"""The number of experts, by its names. Transformers 5 writes the second one."""
_PAIR_KEYS = ("is_neox_style", "rope_is_neox_style")
_WHOLE_HEAD = {"partial_rotary_factor": (1.0,)}
"""All of a head turns, by the field that Transformers 5 moved to the RoPE parameters."""
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "rope_dim", *_PAIR_KEYS}
_SCALING_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "divisors": {"divisors"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"},
}


def decoder_config(
    raw: Raw, *, experts: Mapping[str, Any] | None = None, quantised: tuple[str, ...] = QUANTISED, **traits: Any
) -> DecoderConfig:
    """Return the sizes in a config.json, of a family that may be `quantised` by these methods. `traits` are fields of
    the result that the family decides, and `experts` fields of its experts, None for a family without. Raises
    UnsupportedError naming a field that would be run wrongly."""
    _refuse_variants(raw, experts is not None, quantised)
    hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    num_layers = positive(raw, "num_hidden_layers")
    kv_heads = positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = positive(raw, "head_dim", hidden // heads)
    rope, longest = rope_config(raw, head_dim)
    biases = dict.fromkeys(("qkv_bias", "o_bias"), bool(raw.get("attention_bias")))
    traits = {"masks": (AttentionMask(causal=True),) * num_layers} | biases | traits
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=positive(raw, "vocab_size"),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=longest,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
        moe=None if experts is None else _experts(raw, experts),
        **traits,
    )


def layer_masks(kinds: Any, window: Any, num_layers: int, causal: bool | None) -> tuple[AttentionMask, ...]:
    """Return the mask of each of `layer_types`. A layer is `causal`, or for None if it slides."""
    kinds = layer_kinds(kinds, num_layers, ("full_attention", "sliding_attention"))
    if "sliding_attention" in kinds:
        window = positive({"sliding_window": window}, "sliding_window")
    full, sliding = AttentionMask(causal is True), AttentionMask(causal is not False, window)
    return tuple(sliding if kind == "sliding_attention" else full for kind in kinds)


def layer_kinds(kinds: Any, num_layers: int, known: tuple[str, ...]) -> list[str]:
    """Return `layer_types`. Raises UnsupportedError unless there is one for each layer, and all are known."""
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise UnsupportedError(f"layer_types must name num_hidden_layers = {num_layers} layers, found {kinds!r}")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UnsupportedError(f"layer_types has {unknown[0]!r}, which is not supported yet; known: {', '.join(known)}")
    return kinds


def rope_config(raw: Raw, head_dim: int) -> tuple[RopeConfig, int]:
    """Return RoPE by `rope_scaling` and `rope_parameters`, and the longest context with it. Raises UnsupportedError."""
    given = fields(raw, "rope_scaling") | fields(raw, "rope_parameters")
    only(given, **_WHOLE_HEAD)
    rope = {name: value for name, value in given.items() if value is not None and name not in _WHOLE_HEAD}
    kind = next((rope[key] for key in ("rope_type", "type") if rope.get(key) is not None), "default")
    only({"rope_type": kind}, rope_type=tuple(_SCALING_KEYS))
    if unknown := sorted(set(rope) - _ROPE_KEYS - _SCALING_KEYS[kind]):
        raise UnsupportedError(f"RoPE parameter {unknown[0]} = {rope[unknown[0]]!r} of {kind} is not supported yet")
    dim = positive(rope, "rope_dim", head_dim)
    if dim > head_dim or dim % 2 or head_dim % 2:
        raise UnsupportedError(f"rope_dim {dim} must be even, and at most head_dim {head_dim}, which must be even too")
    longest = positive(raw, "max_position_embeddings", 32768)
    original = positive({**rope, **raw}, "original_max_position_embeddings", longest)
    scaling: Llama3Scaling | YarnScaling | RopeDivisors | None = None
    if kind in ("linear", "divisors"):
        scaling = _divisors(rope, kind, dim // 2)
    elif kind == "llama3":
        factor, low, high = (number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        if high <= low:
            raise UnsupportedError(f"RoPE parameter high_freq_factor {high} must exceed low_freq_factor {low}")
        scaling = Llama3Scaling(factor, low, high, original)
    elif kind == "yarn":
        factor, truncate = number(rope, "factor"), flag(rope, "truncate") is not False
        betas = number(rope, "beta_fast", 32.0), number(rope, "beta_slow", 1.0)
        attention_factor = number(rope, "attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0)
        scaling = YarnScaling(factor, original, *betas, attention_factor, truncate)
        if factor * original > MOST:
            raise UnsupportedError(f"RoPE parameter factor {factor:g} makes a context of over {MOST} tokens")
        longest = max(longest, int(factor * original))
    styles = {flag(part, key) for key in _PAIR_KEYS for part in (raw, rope)} - {None}
    if len(styles) > 1:
        raise UnsupportedError(f"{' and '.join(_PAIR_KEYS)} disagree, in config.json or its RoPE parameters")
    theta = number({"rope_theta": raw.get("rope_theta"), **rope}, "rope_theta", 10000.0)
    return RopeConfig(theta, scaling, None if dim == head_dim else dim, adjacent_pairs=False in styles), longest


def _divisors(rope: Raw, kind: str, pairs: int) -> RopeDivisors:
    """Return what the frequencies of all pairs are divided by. Raises UnsupportedError."""
    if kind == "linear":
        return RopeDivisors((number(rope, "factor"),) * pairs)
    given = rope.get("divisors")
    if not isinstance(given, list) or len(given) != pairs:
        raise UnsupportedError(f"RoPE parameter divisors must be {pairs} numbers, found {given!r:.200}")
    return RopeDivisors(tuple(number({f"divisors[{i}]": value}, f"divisors[{i}]") for i, value in enumerate(given)))


def _refuse_variants(raw: Raw, experts: bool, quantised: tuple[str, ...]) -> None:
    if raw.get("use_sliding_window") is not False:
        only(raw, use_sliding_window=(), sliding_window=())
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}:
        only(raw, layer_types=())
    if (method := raw.get("quantization_config")) is not None:
        check_method(method, quantised)
    only(raw, mlp_bias=(False,), final_logit_softcapping=(), attn_logit_softcapping=(), **_WHOLE_HEAD)
    only(raw, hidden_act=("silu",), **({} if experts else dict.fromkeys(_NUM_EXPERTS, (0,))))


def _experts(raw: Raw, known: Mapping[str, Any]) -> MoeConfig | None:
    """Return the mixture of experts, or None without one. Raises UnsupportedError for sizes that do not fit."""
    if not (given := {name: raw[name] for name in _NUM_EXPERTS if raw.get(name)}):
        return None
    if len(given) > 1 and raw["num_experts"] != raw["num_local_experts"]:
        raise UnsupportedError(" and ".join(f"{name} = {value!r}" for name, value in given.items()) + " disagree")
    count, chosen = positive(given, next(iter(given))), positive(raw, "num_experts_per_tok")
    if chosen > count:
        raise UnsupportedError(f"num_experts_per_tok {chosen} of {count} experts")
    dense, every = raw.get("mlp_only_layers") or [], positive(raw, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise UnsupportedError(f"mlp_only_layers must be a list of numbers, found {dense!r}")
    size_field = "moe_intermediate_size" if "moe_intermediate_size" in raw else "intermediate_size"
    for field in ("hidden_size", size_field):
        if positive(raw, field) % EXPERTS_ALIGNMENT:
            raise UnsupportedError(f"{field} {raw[field]} is no multiple of {EXPERTS_ALIGNMENT}")
    named = set(dense)
    layers = tuple(i for i in range(raw["num_hidden_layers"]) if i in named or (i + 1) % every)
    traits: dict[str, Any] = {"norm_topk_prob": bool(flag(raw, "norm_topk_prob")), **known}
    return MoeConfig(count, chosen, positive(raw, size_field), dense_layers=layers, **traits)
