"""The shape of a DFlash draft: its config.json in the published dialects, checked against the target's shape.

A key is honoured, refused as another variant's, known to change nothing, or named in a warning.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from app.engine.checkpoint.decoder import decoder_config, layer_masks
from app.engine.checkpoint.fields import Raw, fields, flag, naming, number, only, positive, without
from app.engine.checkpoint.shapes import AttentionMask, DecoderConfig, DFlashConfig, PathConfig
from app.engine.errors import UnsupportedError

_SLIDING_KEYS = {"layer_types", "sliding_window", "use_sliding_window", "use_swa", "swa_window_size"}
_LOGIT_KEYS = {"logit_scale", "output_multiplier", "final_logit_softcapping"}
"""Keys that keep the order of logits, so the best token stays the best. A path head adds scores after them."""
_INNER_KEYS = {
    *_SLIDING_KEYS,
    *_LOGIT_KEYS,
    *"""is_causal causal causal_head block_size target_layer_ids mask_token_id mask_token num_target_layers
    target_hidden_size draft_vocab_size sample_from_anchor dspark_bonus_anchor input_embedding_scale conv_kernel_size
    conv_group_size selector_rank selector_top_k projector_type attention_mode markov_rank markov_head_type
    dspark_backbone_conv_enabled""".split(),
}
"""Keys that are read inside `dflash_config` or at the top level."""
_DEEPSPEC_KEYS = {"target_layer_ids", "mask_token_id", "block_size"}
"""Keys that stand at the top level in DeepSpec's layout, which has no `dflash_config`."""
_OUTER_KEYS = """
    architectures model_type dtype torch_dtype hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim vocab_size rms_norm_eps hidden_act attention_bias mlp_bias tie_word_embeddings
    rope_theta rope_scaling rope_parameters is_neox_style rope_is_neox_style max_position_embeddings
    original_max_position_embeddings quantization_config attn_logit_softcapping
""".split()
_INERT = re.compile(
    r"_.*|transformers_version|auto_map|(bos|eos|pad)_token_id|initializer_range|use_cache|attention_dropout|use_return_dict"
    r"|return_dict|output_(attentions|hidden_states)|id2label|label2id|problem_type|is_encoder_decoder|pretraining_tp"
    r"|chunk_size_feed_forward|max_window_layers|(num|max)_anchors|has_no_defaults_at_init|speculators_version|speculators_config"
    r"|(enable_)?confidence_\w+|use_aux_hidden_state"
    # Copied from the config of a target. A draft's layers are dense Qwen3's: tensors of experts are refused.
    r"|partial_rotary_factor|mrope_\w+|attn_output_gate|linear_\w+|full_attention_interval|mamba_ssm_dtype|mtp_\w+"
    r"|decoder_sparse_step|mlp_only_layers|norm_topk_prob|(num|n)_\w*experts\w*|experts_per_token|moe_\w+"
    r"|shared_expert\w*|router_\w+|output_router_logits"
)
_FOREIGN = re.compile(
    r"conv\w*|\w+_conv\w*|\w*selector\w*|\w*codebook\w*|markov\w*|dspark\w*|logit_head\w*|shift_label|\w*gru\w*|domino\w*"
    r"|jetspec\w*|draft_shift|lilicorr\w*|xpress\w*|hcache\w*|down_[hg]|layer_fusion_weights|\w+_proj_target"
    r"|(q|kv)_([ab]_\w+|lora_rank)|\w*sinks?|\w*sink_\w+|attention_value_scale|aux_hidden_norms?\w*|g_proj|gating"
    r"|encoder\w*|experts"
)
"""Keys that turn on what is not run here, unless their value is false or empty."""
_RUN = "give a draft of DFlash, DFlash2 or DSpark"
_MODEL_TYPES = ("qwen3", "dflash", "dspark", "qwen3_moe", "qwen3_5_text")
"""Types of drafts, and of targets whose config a draft was made from."""
_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel")
_TENSOR = re.compile(
    r"(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|t2d"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.weight"
)
_CONFIDENCE_TENSOR = re.compile(r"confidence_head\.proj\.(weight|bias)")
_BIAS = re.compile(r"layers\.\d+\.self_attn\.[qkvo]_proj\.bias")


@naming("draft")
def draft_config(
    raw: Raw,
    target: DecoderConfig,
    block_size: int | None = None,
    token_id: Callable[[str], int | None] = lambda text: None,
) -> DFlashConfig:
    """Return the shape of a draft. A smaller `block_size` than the trained one may be given; None takes that one.

    `token_id` finds a mask token by its text. Raises UnsupportedError for what would be run wrongly, or does not fit.
    """
    keys, warnings = _flattened(raw)
    only(keys, model_type=_MODEL_TYPES, architectures=tuple([name] for name in _ARCHITECTURES))
    layers = without(keys, _SLIDING_KEYS | _LOGIT_KEYS)
    traits: dict[str, Any] = {"quantised": (), "qk_norm": True, "masks": _masks(keys)}
    decoder = decoder_config({"vocab_size": target.vocab_size, **layers}, **traits)
    target_hidden_size = positive(keys, "target_hidden_size", decoder.hidden_size)
    draft_vocab_size = positive(keys, "draft_vocab_size", decoder.vocab_size)
    hidden_field = "target_hidden_size" if keys.get("target_hidden_size") else "hidden_size"
    for field, given, wanted in (
        ("vocab_size", decoder.vocab_size, target.vocab_size),
        ("num_target_layers", positive(keys, "num_target_layers", target.num_layers), target.num_layers),
        (hidden_field, target_hidden_size, target.hidden_size),
        ("draft_vocab_size", max(draft_vocab_size, target.vocab_size), target.vocab_size),
    ):
        if given != wanted:
            both = f"{field} is {given}, but this target has {wanted}"
            raise UnsupportedError(f"{both}; give the draft that was made for this target")
    first_draft_row = _first_draft_row(keys)
    return DFlashConfig(
        decoder=decoder,
        block_size=_block_size(keys, block_size, first_draft_row),
        target_layer_ids=_target_layer_ids(keys.get("target_layer_ids"), decoder.num_layers, target.num_layers),
        mask_token_id=_mask_token_id(keys, target.vocab_size, token_id),
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        first_draft_row=first_draft_row,
        path=_path(keys, draft_vocab_size),
        conv_group=_conv_group(keys, decoder.hidden_size),
        embedding_scale=number(keys, "input_embedding_scale", 1.0),
        warnings=tuple(warnings),
    )


def windowed(draft: DFlashConfig, window: int) -> DFlashConfig:
    """Return the draft with `window` in layers without one. Raises UnsupportedError if a block does not fit into it."""
    if window < draft.block_size:
        raise UnsupportedError(f"--draft-window {window} is less than a block of {draft.block_size} rows")
    masks = tuple(mask if mask.window else mask._replace(window=window) for mask in draft.decoder.masks)
    return replace(draft, decoder=replace(draft.decoder, masks=masks))


def refuse_foreign_tensors(names: Iterable[str], draft: DFlashConfig) -> None:
    """Raise UnsupportedError for a draft's tensor that is not run, which would cost acceptance silently, or for one of
    its head that is missing."""
    is_dspark = draft.first_draft_row == 0 or (draft.path is not None and draft.path.kind != "selector")
    known = [_TENSOR, *[_BIAS] * draft.decoder.qkv_bias, *[_CONFIDENCE_TENSOR] * is_dspark]
    others = {name for name in names if not any(pattern.fullmatch(name) for pattern in known)}
    if missing := sorted(draft.extra_tensors.keys() - others):
        raise UnsupportedError(f"draft: tensor {missing[0]} is missing, and config.json asks for it")
    if not (unknown := sorted(others - draft.extra_tensors.keys())):
        return
    if all(map(_BIAS.fullmatch, unknown)):
        raise UnsupportedError(f"draft: tensor {unknown[0]} is a bias, but attention_bias in config.json is not true")
    which, has = f"tensor {unknown[0]} is", "has it"
    if len(unknown) > 1:
        which, has = f"{len(unknown)} tensors, such as {unknown[0]}, are", "has them"
    raise UnsupportedError(f"draft: {which} not DFlash's, and no head of config.json {has}; {_RUN}")


def _flattened(raw: Raw) -> tuple[dict[str, Any], list[str]]:
    """Return the keys that mean something here, and warnings. Those in `dflash_config` override the top level."""
    raw = _without_prefix(raw)
    if also := fields(raw, "dspark_config"):
        nested = also | fields(raw, "dflash_config")
        raw = {"projector_type": "dspark", **without(raw, ("dspark_config",)), "dflash_config": nested}
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        raw = _from_speculators(raw)
    elif "dflash_config" not in raw and raw.keys() >= _DEEPSPEC_KEYS:
        raw = _from_deepspec(raw)
    inner = raw.get("dflash_config")
    if not isinstance(inner, dict):
        made = f"(architectures: {raw.get('architectures')})"
        raise UnsupportedError(f"config.json has no dflash_config, so this is no DFlash draft {made}")
    inner = _without_prefix(inner)
    given = {name: value for name, value in _meaningful(inner).items() if value is not None}
    if foreign := sorted(given.keys() - _INNER_KEYS - set(_OUTER_KEYS)):
        found = f"{foreign[0]} = {given[foreign[0]]!r}"
        raise UnsupportedError(f"dflash_config has {found}, whose meaning is not known here")
    warnings = [
        f"{name} is {raw[name]!r} in config.json and {value!r} in its dflash_config, which is used"
        for name, value in given.items()
        if raw.get(name) not in (None, value)
    ]
    keys = _meaningful(without(raw, ("dflash_config",)) | given)
    for name in ("rope_scaling", "rope_parameters"):
        keys[name] = {key: value for key, value in fields(keys, name).items() if not _INERT.fullmatch(key)}
    if unknown := [name for name in keys if name not in _INNER_KEYS and name not in _OUTER_KEYS]:
        warnings.append(f"config.json has keys that are unknown here and ignored: {', '.join(unknown)}")
    return keys, warnings


def _without_prefix(keys: Raw) -> dict[str, Any]:
    """Return keys with the prefix of DSpark by their names without it. Raises UnsupportedError if both differ."""
    plain_keys = dict(keys)
    for name in [name for name in keys if name.startswith("dspark_") and name[7:] in _INNER_KEYS]:
        value, plain = plain_keys.pop(name), plain_keys.get(name[7:])
        if plain not in (None, value):
            raise UnsupportedError(f"{name} is {value!r}, and {name[7:]} is {plain!r}")
        plain_keys[name[7:]] = value
    return plain_keys


def _from_speculators(raw: Raw) -> dict[str, Any]:
    """Return a config of the speculators library in z-lab's layout. Its layer k is our layer k - 1."""
    kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind not in ("dflash", "dflash2", "dspark") or not isinstance(layer, dict):
        found = f"speculators_model_type {kind!r} with transformer_layer_config {type(layer).__name__}"
        raise UnsupportedError(f"{found} is not supported yet; supported: dflash, dflash2 and dspark with an object")
    own = without(raw, ("speculators_model_type", "transformer_layer_config", "model_type", "architectures"))
    ids = own.pop("aux_hidden_state_layer_ids", None)
    if not isinstance(ids, list) or not all(type(i) is int and i > 0 for i in ids):
        raise UnsupportedError(f"aux_hidden_state_layer_ids must be a list of layer numbers from 1 on, found {ids!r}")
    if own.pop("sliding_window_non_causal", kind == "dflash2"):
        own["is_causal"] = False
    if kind == "dflash2" and (own.get("sample_from_anchor") or own.get("draft_vocab_size")):
        only(own, sample_from_anchor=(False,), draft_vocab_size=(layer.get("vocab_size"),))
    if kind == "dspark":
        methods = fields(own, "speculators_config").get("proposal_methods")
        method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
        if type(count := method.get("speculative_tokens")) is int and own.get("sample_from_anchor") is None:
            own["sample_from_anchor"] = count >= positive(own, "block_size")
        own = {"projector_type": kind, **own}
    inner = fields(own, "dflash_config") | {"target_layer_ids": [i - 1 for i in ids]}
    return {**without(layer, ("architectures",)), **own, "dflash_config": inner}


def _from_deepspec(raw: Raw) -> dict[str, Any]:
    """Return a config of DeepSpec in z-lab's layout. Raises UnsupportedError if nothing tells which rows predict."""
    told = raw.get("markov_rank") or raw.get("architectures") == ["Qwen3DSparkModel"]
    if not told and raw.get("sample_from_anchor") is None and raw.get("dspark_bonus_anchor") is None:
        raise UnsupportedError(
            "its keys stand at the top level as in DeepSpec, but nothing tells whether row 0 of a block predicts: "
            "architectures is not Qwen3DSparkModel, and there is no markov_rank and no sample_from_anchor"
        )
    return {"projector_type": "dspark", **raw, "dflash_config": {}}


def _meaningful(keys: Raw) -> dict[str, Any]:
    """Return the keys that change something. Raises UnsupportedError for keys of another variant."""
    rest = {name: value for name, value in keys.items() if not _INERT.fullmatch(name)}
    foreign = {name for name in rest.keys() - _INNER_KEYS if _FOREIGN.fullmatch(name)}
    if found := [f"{name} = {rest[name]!r}" for name in sorted(foreign) if rest[name]]:
        listed = f"keys {', '.join(found)} are" if len(found) > 1 else f"key {found[0]} is"
        raise UnsupportedError(f"{listed} not DFlash's; {_RUN}")
    return without(rest, foreign)


def _masks(keys: Raw) -> tuple[AttentionMask, ...]:
    """Return the mask of each layer. Inside a block a layer is causal if the checkpoint says so, else if it slides."""
    num_layers = positive(keys, "num_hidden_layers")
    kinds, use_swa = keys.get("layer_types"), flag(keys, "use_swa")
    window = keys.get("swa_window_size") or keys.get("sliding_window")
    slides = isinstance(kinds, list) and "sliding_attention" in kinds
    if use_swa and not slides:
        kinds = ["sliding_attention"] * num_layers
    elif use_swa is False and slides:
        raise UnsupportedError("use_swa is false, but layer_types has sliding_attention")
    elif flag(keys, "use_sliding_window") and not slides:
        raise UnsupportedError("use_sliding_window is true, but layer_types has no sliding_attention")
    elif kinds is None:
        if keys.get("swa_window_size") or (window and keys.get("use_sliding_window") is None):
            raise UnsupportedError(f"sliding_window is {window!r}, but neither layer_types nor use_swa says where")
        kinds = ["full_attention"] * num_layers
    is_causal, causal = flag(keys, "is_causal"), flag(keys, "causal")
    is_causal = causal if is_causal is None else is_causal
    if flag(keys, "causal_head"):
        if is_causal is False:
            raise UnsupportedError("causal_head is true, and is_causal or causal is false, which contradicts")
        is_causal = True
    return layer_masks(kinds, window, num_layers, is_causal)


def _first_draft_row(keys: Raw) -> int:
    """Return 0 if row 0 of a block predicts. In DSpark's layouts it does, unless a key says that it is the anchor."""
    samples, anchor = flag(keys, "sample_from_anchor"), flag(keys, "dspark_bonus_anchor")
    if samples is not None and samples is anchor:
        raise UnsupportedError(f"sample_from_anchor and dspark_bonus_anchor are both {samples}, which contradicts")
    is_dspark = keys.get("projector_type") == "dspark" or bool(keys.get("markov_rank"))
    if samples is None:
        samples = is_dspark if anchor is None else not anchor
    return 0 if samples else 1


def _path(keys: Raw, vocab_size: int) -> PathConfig | None:
    """Return the head that chooses among the best tokens of each row, or None. Raises UnsupportedError."""
    only(keys, projector_type=("dspark", "dflash", "dflash2"), attention_mode=("gqa", "mha"))
    only(keys, dspark_backbone_conv_enabled=(False,))
    scale = number(keys, "logit_scale", 1.0) * number(keys, "output_multiplier", 1.0)
    cap = number(keys, "final_logit_softcapping") if keys.get("final_logit_softcapping") is not None else None
    if any(keys.get(name) is not None for name in ("selector_rank", "selector_top_k")):
        only(keys, markov_rank=(0,))
        path = PathConfig("selector", positive(keys, "selector_rank"), positive(keys, "selector_top_k", 16), scale, cap)
    elif keys.get("markov_rank"):
        only(keys, markov_head_type=("vanilla", "gated", "rnn"))
        path = PathConfig(keys.get("markov_head_type") or "vanilla", positive(keys, "markov_rank"), 16, scale, cap)
    else:
        return None
    if path.top_k > vocab_size:
        raise UnsupportedError(f"a path through {path.top_k} candidates needs as many tokens, found {vocab_size}")
    return path


def _conv_group(keys: Raw, hidden_size: int) -> int:
    """Return the channels of a group of DFlash2's convolutions, or 0 without them. Raises UnsupportedError."""
    if all(keys.get(name) is None for name in ("conv_group_size", "conv_kernel_size")):
        return 0
    only(keys, conv_kernel_size=(2,))
    if hidden_size % (group := positive(keys, "conv_group_size")):
        raise UnsupportedError(f"hidden_size {hidden_size} is no multiple of conv_group_size {group}")
    return group


def _block_size(keys: Raw, wanted: int | None, first_draft_row: int) -> int:
    """Return the anchor and the drafts, one from each row of the trained block from `first_draft_row` on."""
    if keys.get("block_size") is None:
        if wanted is None or wanted < 2:
            raise UnsupportedError("config.json names no block_size; give --num-speculative-tokens, at least 1")
        return wanted
    trained = positive(keys, "block_size")
    most = trained - first_draft_row
    if trained < 2:
        raise UnsupportedError(f"block_size must be at least 2, found {trained}")
    if wanted is not None and not 2 <= wanted <= most + 1:
        outside = f"num_speculative_tokens {wanted - 1} is outside 1..{most}: the draft was trained with block_size"
        raise UnsupportedError(f"{outside} {trained}, and a larger block than that does not draft well")
    # Of 16 rows that all predict the last is left out by default: GPUs and NPUs verify 16 rows at most.
    return wanted or (most if (most, first_draft_row) == (16, 0) else most + 1)


def _target_layer_ids(ids: Any, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Return the taps, by default the middle layer, or one for each of the draft's layers, evenly from 1 to N - 3."""
    last, why = num_target_layers - 2, ""
    if ids is None:
        why = ", the default, because config.json names none"
        steps = [i / (num_layers - 1) for i in range(num_layers)] if num_layers > 1 else []
        ids = [round(1 + (num_target_layers - 4) * step) for step in steps] or [num_target_layers // 2]
    are_layers = isinstance(ids, list) and ids and all(type(i) is int and 0 <= i <= last for i in ids)
    if not are_layers or ids != sorted(set(ids)):
        wanted = f"a list of layer numbers that ascend without repeats in 0..{last}, the last layer excluded"
        raise UnsupportedError(f"target_layer_ids must be {wanted}, found {ids!r}{why}")
    return tuple(ids)


def _mask_token_id(keys: Raw, vocab_size: int, token_id: Callable[[str], int | None]) -> int:
    field = "mask_token_id" if keys.get("mask_token_id") is not None else "mask_token"
    token = keys.get(field)
    if token is None:
        raise UnsupportedError("config.json names no mask_token_id, and no mask_token")
    if isinstance(token, str) and (token := token_id(text := token)) is None:
        raise UnsupportedError(f"{field} {text!r} is in no tokenizer.json of the draft or its target; give its number")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise UnsupportedError(f"{field} must be a token of the target's vocabulary of {vocab_size}, found {token!r}")
    return token
