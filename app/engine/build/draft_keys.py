"""Keys of a draft's config.json and names of its tensors, by what they mean to us.

A key is honoured, refused with the name of its dialect, known to change nothing, or told in a warning.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from app.engine.errors import UnsupportedError

logger = logging.getLogger(__name__)

_IN_EITHER_PLACE = set(
    """
    layer_types sliding_window use_sliding_window use_swa swa_window_size is_causal causal block_size target_layer_ids
    mask_token_id num_target_layers target_hidden_size draft_vocab_size sample_from_anchor logit_scale
    final_logit_softcapping
    """.split()
)
_AT_THE_TOP = _IN_EITHER_PLACE | set(
    """
    architectures model_type dtype torch_dtype hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim vocab_size rms_norm_eps hidden_act attention_bias mlp_bias tie_word_embeddings
    rope_theta rope_scaling rope_parameters is_neox_style rope_is_neox_style max_position_embeddings
    original_max_position_embeddings quantization_config num_experts num_local_experts attn_logit_softcapping
    dflash_config
    """.split()
)
_INERT = re.compile(
    r"_.*|transformers_version|auto_map|(bos|eos|pad)_token_id|initializer_range|use_cache|attention_dropout|use_return_dict"
    r"|return_dict|output_(attentions|hidden_states)|id2label|label2id|problem_type|is_encoder_decoder|pretraining_tp"
    r"|chunk_size_feed_forward|max_window_layers|(num|max)_anchors|has_no_defaults_at_init|speculators_version|speculators_config"
    # Copied from the config of a hybrid or multimodal target. A draft's layers are Qwen3's, which have none of these.
    r"|partial_rotary_factor|mrope_\w+|attn_output_gate|linear_\w+|full_attention_interval|mamba_ssm_dtype|mtp_\w+"
    r"|decoder_sparse_step|mlp_only_layers|norm_topk_prob|num_experts_per_tok|moe_intermediate_size"
    r"|shared_expert_intermediate_size|router_aux_loss_coef|output_router_logits"
)
_ROPE_NOISE = re.compile(r"partial_rotary_factor|mrope_\w+")
_DIALECTS = (
    (re.compile(r"conv\w*|\w+_conv\w*|\w*selector\w*|\w*codebook\w*|output_multiplier"), "DFlash2"),
    (re.compile(r"markov\w*|\w*confidence\w*|dspark\w*|logit_head\w*"), "DSpark"),
    (re.compile(r"shift_label|\w*gru\w*|domino\w*"), "Domino"),
    (re.compile(r"jetspec\w*"), "JetSpec"),
    (re.compile(r"\w*sinks?|\w*sink_\w+|attention_value_scale"), "a draft with attention sinks"),
    (re.compile(r"aux_hidden_norms?\w*|g_proj|gating"), "Laguna, with a norm for each tap"),
    (re.compile(r"encoder\w*"), "Muse-Glimmer"),
)
_TENSOR = re.compile(
    r"(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|t2d"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.weight"
)
_BIAS = re.compile(r"layers\.\d+\.self_attn\.[qkvo]_proj\.bias")


def plain_config(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a draft's config.json in z-lab's layout, without the keys that change nothing here.

    Raises UnsupportedError for a key of a dialect that is not supported, with the dialect's name.
    """
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        raw = _from_speculators(raw, where)
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, Mapping):
        raise UnsupportedError(
            f"{where}: config.json has no dflash_config, so this is no DFlash draft (architectures: "
            f"{raw.get('architectures')})"
        )
    unknown = [name for name in raw if name not in _AT_THE_TOP and not _is_noise(name, raw[name], where)]
    inner = (name for name in dflash if name not in _IN_EITHER_PLACE and not _is_noise(name, dflash[name], where))
    unknown += [f"dflash_config.{name}" for name in inner]
    if unknown:
        logger.warning("%s: config.json has keys that are unknown here and ignored: %s", where, ", ".join(unknown))
    plain = {name: value for name, value in raw.items() if not _INERT.fullmatch(name)}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := plain.get(name), Mapping):
            plain[name] = {key: value for key, value in rope.items() if not _ROPE_NOISE.fullmatch(key)}
    return plain


def check_tensor_names(names: Iterable[str], *, biases: bool) -> None:
    """Raise UnsupportedError for a tensor of another variant of DFlash, with the variant's name, or for `biases` that
    the config does not name. Without it the draft would lose its acceptance silently."""
    known = (_TENSOR, _BIAS) if biases else (_TENSOR,)
    unknown = sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in known))
    if not unknown:
        return
    for name in unknown:
        for part in name.split("."):
            if dialect := _dialect(part):
                raise UnsupportedError(f"draft: tensor {name} is of {dialect}, which is not supported yet")
    if _BIAS.fullmatch(unknown[0]):
        raise UnsupportedError(f"draft: tensor {unknown[0]} is a bias, but attention_bias in config.json is not true")
    raise UnsupportedError(
        f"draft: tensor {unknown[0]} (one of {len(unknown)}) is of a variant of DFlash that is not supported yet"
    )


def _is_noise(name: str, value: Any, where: str) -> bool:
    """Return True for a key that changes nothing. Raises UnsupportedError for one of a dialect."""
    if _INERT.fullmatch(name):
        return True
    dialect = _dialect(name)
    if dialect and value:
        raise UnsupportedError(f"{where}: {name} = {value!r} is of {dialect}, which is not supported yet")
    return dialect is not None


def _dialect(name: str) -> str | None:
    return next((dialect for pattern, dialect in _DIALECTS if pattern.fullmatch(name)), None)


def _from_speculators(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config of the speculators library in z-lab's layout.

    The library counts the layers that have run, so its id k is the residual stream after our layer k - 1.
    """
    kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind != "dflash" or not isinstance(layer, Mapping):
        raise UnsupportedError(
            f"{where}: speculators_model_type {kind!r} with transformer_layer_config {type(layer).__name__} is not "
            "supported yet; supported: 'dflash' with an object"
        )
    own = dict(raw)
    for name in ("speculators_model_type", "transformer_layer_config", "model_type", "architectures"):
        own.pop(name, None)
    ids = own.pop("aux_hidden_state_layer_ids", None)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UnsupportedError(f"{where}: aux_hidden_state_layer_ids must be a list of layer numbers, found {ids!r}")
    if own.pop("sliding_window_non_causal", False):
        own["is_causal"] = False
    layer = {name: value for name, value in layer.items() if name != "architectures"}
    return {**layer, **own, "dflash_config": {"target_layer_ids": [i - 1 for i in ids]}}
