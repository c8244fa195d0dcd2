"""A DFlash draft's config.json in its dialects, checked against the target it is to serve."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.config.draft_keys import DraftKeys
from app.config.error import ConfigError
from app.engine.device.base import AttentionMask
from app.engine.dflash.config import DFlashConfig
from app.engine.errors import UnsupportedError
from app.engine.load.decoder_config import decoder_config, layer_windows
from app.engine.load.fields import number, positive
from app.engine.models.config import DecoderConfig

logger = logging.getLogger(__name__)

_WHERE = "draft"
_KINDS = {"model_type": ("qwen3", "dflash"), "architectures": (["DFlashDraftModel"],)}
_SLIDING_KEYS = ("layer_types", "sliding_window", "use_sliding_window")


def draft_config(raw: Mapping[str, Any], target: DecoderConfig, block_size: int | None = None) -> DFlashConfig:
    """Return the shape of a draft. A smaller `block_size` than the trained one may be given; None takes that one.

    Raises UnsupportedError naming the field that we would run wrongly or that does not fit the target.
    """
    keys = _read_keys(raw)
    _refuse_variants(keys)
    layers = {name: value for name, value in keys.outer.items() if name not in _SLIDING_KEYS}
    layers["final_logit_softcapping"] = None  # it keeps the order of logits, so the best stays the best
    decoder = decoder_config({"vocab_size": target.vocab_size, **layers}, _WHERE)
    decoder = replace(decoder, masks=_masks(keys, decoder.num_layers), qk_norm=True)
    taps = keys.get("target_layer_ids")
    first_draft_row = 0 if _flag(keys, "sample_from_anchor") else 1
    config = DFlashConfig(
        decoder=decoder,
        block_size=_block_size(keys.get("block_size"), block_size, first_draft_row),
        target_layer_ids=_target_layer_ids(
            _default_layer_ids(decoder.num_layers, target.num_layers) if taps is None else taps, target.num_layers
        ),
        mask_token_id=_mask_token_id(keys.get("mask_token_id"), target.vocab_size),
        target_hidden_size=_positive(keys, "target_hidden_size", decoder.hidden_size),
        draft_vocab_size=_positive(keys, "draft_vocab_size", decoder.vocab_size),
        first_draft_row=first_draft_row,
    )
    _check_fit(config, target, _positive(keys, "num_target_layers", target.num_layers))
    return config


def _read_keys(raw: Mapping[str, Any]) -> DraftKeys:
    try:
        keys = DraftKeys(raw)
    except ConfigError as error:
        raise UnsupportedError(f"{_WHERE}: {error}") from None
    for warning in keys.warnings:
        logger.warning("%s: %s", _WHERE, warning)
    return keys


def _positive(keys: DraftKeys, name: str, default: int) -> int:
    return positive({name: keys.get(name)}, name, _WHERE, default)


def _flag(keys: DraftKeys, name: str) -> bool | None:
    """Return a key that must be true, false or missing."""
    value = keys.get(name)
    if value is not None and type(value) is not bool:
        raise UnsupportedError(f"{_WHERE}: {name} must be true or false, found {value!r}")
    return value


def _refuse_variants(keys: DraftKeys) -> None:
    for field, supported in _KINDS.items():
        found = keys.outer.get(field)
        if found is not None and found not in supported:
            raise UnsupportedError(f"{_WHERE}: {field} {found} is not supported yet; supported: {supported[0]}")
    for field in ("logit_scale", "final_logit_softcapping"):
        number({field: keys.get(field)}, field, 1.0, _WHERE)


def _masks(keys: DraftKeys, num_layers: int) -> tuple[AttentionMask, ...]:
    """Return the mask of each layer. Inside a block a layer is causal if the checkpoint says so, else if it slides."""
    window = keys.get("swa_window_size") or keys.get("sliding_window")
    kinds, use_swa = keys.get("layer_types"), _flag(keys, "use_swa")
    slides = isinstance(kinds, list) and "sliding_attention" in kinds
    if use_swa and not slides:
        kinds = ["sliding_attention"] * num_layers
    elif use_swa is False and slides:
        raise UnsupportedError(f"{_WHERE}: use_swa is false, but layer_types has sliding_attention")
    elif _flag(keys, "use_sliding_window") and not slides:
        raise UnsupportedError(f"{_WHERE}: use_sliding_window is true, but layer_types has no sliding_attention")
    elif kinds is None:
        if keys.get("swa_window_size") or (window and keys.get("use_sliding_window") is None):
            raise UnsupportedError(
                f"{_WHERE}: sliding_window is {window!r}, but neither layer_types nor use_swa says where"
            )
        kinds = ["full_attention"] * num_layers
    windows = layer_windows(kinds, window, num_layers, _WHERE)
    stated = _flag(keys, "is_causal")
    if stated is None:
        stated = _flag(keys, "causal")
    return tuple(AttentionMask(window is not None if stated is None else stated, window) for window in windows)


def _check_fit(config: DFlashConfig, target: DecoderConfig, num_target_layers: int) -> None:
    decoder = config.decoder
    if decoder.hidden_size != target.hidden_size and config.target_hidden_size == decoder.hidden_size:
        raise _misfit("hidden_size", decoder.hidden_size, target.hidden_size)
    expected = {
        "target_hidden_size": (config.target_hidden_size, target.hidden_size),
        "num_target_layers": (num_target_layers, target.num_layers),
        "vocab_size": (decoder.vocab_size, target.vocab_size),
    }
    for field, (found, wanted) in expected.items():
        if found != wanted:
            raise _misfit(field, found, wanted)
    if config.draft_vocab_size > target.vocab_size:
        raise _misfit("draft_vocab_size", config.draft_vocab_size, target.vocab_size)


def _misfit(field: str, found: int, wanted: int) -> UnsupportedError:
    return UnsupportedError(f"{_WHERE}: {field} is {found}, but this target has {wanted}; is the draft for it?")


def _block_size(trained: Any, wanted: int | None, first_draft_row: int) -> int:
    """Return the anchor and the drafts, one from each row of the trained block from `first_draft_row` on."""
    if trained is None:
        if wanted is None:
            raise UnsupportedError(f"{_WHERE}: config.json names no block_size; give --num-speculative-tokens")
        if wanted < 2:
            raise UnsupportedError(f"{_WHERE}: a block of {wanted} holds no draft; give --num-speculative-tokens >= 1")
        return wanted
    if type(trained) is not int or trained < 2:
        raise UnsupportedError(f"{_WHERE}: block_size must be a number of at least 2, found {trained!r}")
    most = trained - first_draft_row
    if wanted is not None and not 2 <= wanted <= most + 1:
        raise UnsupportedError(
            f"{_WHERE}: num_speculative_tokens {wanted - 1} is outside 1..{most}: the draft was trained with "
            f"block_size {trained}, and a larger block than that does not draft well"
        )
    return wanted or most + 1


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
