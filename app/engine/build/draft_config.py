"""A DFlash draft's config.json in its dialects, checked against the target it is to serve."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from app.engine.backend.base import AttentionMask
from app.engine.build.decoder_config import decoder_config
from app.engine.dflash.config import DFlashConfig
from app.engine.errors import UnsupportedError
from app.engine.models.config import DecoderConfig

_WHERE = "draft"
_KINDS = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}
_TENSOR_NAME = re.compile(
    r"(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.weight"
)

_BIAS_NAME = re.compile(r"layers\.\d+\.self_attn\.[qkvo]_proj\.bias")


def draft_config(raw: Mapping[str, Any], target: DecoderConfig, block_size: int | None = None) -> DFlashConfig:
    """Return the shape of a draft. A smaller `block_size` than the trained one may be given; None takes that one.

    Raises UnsupportedError naming the field that we would run wrongly or that does not fit the target.
    """
    _refuse_variants(raw)
    decoder = decoder_config({"vocab_size": target.vocab_size, **raw}, _WHERE)
    decoder = replace(decoder, masks=(AttentionMask(causal=False),) * decoder.num_layers)
    _check_widths(raw, decoder, target)
    dflash = raw["dflash_config"]
    trained = raw.get("block_size", dflash.get("block_size"))
    if dflash.get("block_size", trained) != trained:
        raise UnsupportedError(
            f"{_WHERE}: block_size is {trained} in config.json and {dflash['block_size']} in its dflash_config"
        )
    layer_ids = dflash.get("target_layer_ids") or _default_layer_ids(decoder.num_layers, target.num_layers)
    return DFlashConfig(
        decoder=decoder,
        block_size=_block_size(trained, block_size),
        target_layer_ids=_target_layer_ids(layer_ids, target.num_layers),
        mask_token_id=_mask_token_id(dflash.get("mask_token_id", raw.get("mask_token_id")), target.vocab_size),
    )


def check_tensor_names(names: Iterable[str], *, biases: bool) -> None:
    """Raises UnsupportedError for a tensor of another variant of DFlash: a reduced vocabulary (d2t), an in-block
    convolution, a candidate selector, `biases` that the config does not name. Without it the draft would lose its
    acceptance silently."""
    known = (_TENSOR_NAME, _BIAS_NAME) if biases else (_TENSOR_NAME,)
    unknown = sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in known))
    if unknown:
        raise UnsupportedError(
            f"draft: tensor {unknown[0]} (one of {len(unknown)}) is of a variant of DFlash that is not supported yet"
        )


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, Mapping):
        raise UnsupportedError(
            f"{_WHERE}: config.json has no dflash_config, so this is no DFlash draft (architectures: "
            f"{raw.get('architectures')})"
        )
    known = {"target_layer_ids", "mask_token_id", "block_size"}
    if unknown := sorted(set(dflash) - known):
        raise UnsupportedError(f"{_WHERE}: dflash_config.{unknown[0]} is of a variant that is not supported yet")
    if raw.get("is_causal") is not None:
        raise UnsupportedError(f"{_WHERE}: is_causal = {raw['is_causal']!r} is not supported yet")
    for field, supported in _KINDS.items():
        if raw.get(field) not in (None, supported):
            raise UnsupportedError(f"{_WHERE}: {field} {raw[field]} is not supported yet; supported: {supported}")


def _check_widths(raw: Mapping[str, Any], decoder: DecoderConfig, target: DecoderConfig) -> None:
    expected = {
        "hidden_size": (decoder.hidden_size, target.hidden_size),
        "target_hidden_size": (raw.get("target_hidden_size", target.hidden_size), target.hidden_size),
        "num_target_layers": (raw.get("num_target_layers", target.num_layers), target.num_layers),
        "vocab_size": (decoder.vocab_size, target.vocab_size),
        "draft_vocab_size": (raw.get("draft_vocab_size", target.vocab_size), target.vocab_size),
    }
    for field, (found, wanted) in expected.items():
        if found != wanted:
            raise UnsupportedError(f"{_WHERE}: {field} is {found}, but this target has {wanted}; is the draft for it?")


def _block_size(trained: Any, wanted: int | None) -> int:
    if trained is None:
        if wanted is None:
            raise UnsupportedError(f"{_WHERE}: config.json names no block_size; give --num-speculative-tokens")
        if wanted < 2:
            raise UnsupportedError(f"{_WHERE}: a block of {wanted} holds no draft; give --num-speculative-tokens >= 1")
        return wanted
    if type(trained) is not int or trained < 2:
        raise UnsupportedError(f"{_WHERE}: block_size must be a number of at least 2, found {trained!r}")
    if wanted is not None and not 2 <= wanted <= trained:
        raise UnsupportedError(
            f"{_WHERE}: num_speculative_tokens {wanted - 1} is outside 1..{trained - 1}: the draft was trained with "
            f"block_size {trained}, and a larger block than that does not draft well"
        )
    return wanted or trained


def _target_layer_ids(ids: Any, num_target_layers: int) -> tuple[int, ...]:
    field = f"{_WHERE}: dflash_config.target_layer_ids"
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UnsupportedError(f"{field} must be a list of layer numbers, found {ids!r}")
    if ids != sorted(set(ids)):
        raise UnsupportedError(f"{field} {ids} must ascend without repeats")
    if ids[0] < 0 or ids[-1] > num_target_layers - 2:
        raise UnsupportedError(f"{field} {ids} must lie in 0..{num_target_layers - 2}, the last layer excluded")
    return tuple(ids)


def _default_layer_ids(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """Return the method's default: the middle layer, or one per draft layer, evenly from 1 to N - 3."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + span * i / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def _mask_token_id(value: Any, vocab_size: int) -> int:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise UnsupportedError(
            f"{_WHERE}: dflash_config.mask_token_id must be a token of the target's vocabulary of {vocab_size}, "
            f"found {value!r}"
        )
    return value
