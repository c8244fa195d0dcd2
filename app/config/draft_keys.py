"""Keys of a draft's config.json and names of its tensors, by what they mean to us.

A key is honoured, refused with the name of its dialect, known to change nothing, or told in a warning.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from app.config.error import ConfigError

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
    original_max_position_embeddings quantization_config attn_logit_softcapping dflash_config
    """.split()
)
_INERT = re.compile(
    r"_.*|transformers_version|auto_map|(bos|eos|pad)_token_id|initializer_range|use_cache|attention_dropout|use_return_dict"
    r"|return_dict|output_(attentions|hidden_states)|id2label|label2id|problem_type|is_encoder_decoder|pretraining_tp"
    r"|chunk_size_feed_forward|max_window_layers|(num|max)_anchors|has_no_defaults_at_init|speculators_version|speculators_config"
    # Copied from the config of a target. A draft's layers are dense Qwen3's: tensors of experts are refused.
    r"|partial_rotary_factor|mrope_\w+|attn_output_gate|linear_\w+|full_attention_interval|mamba_ssm_dtype|mtp_\w+"
    r"|decoder_sparse_step|mlp_only_layers|norm_topk_prob|(num|n)_\w*experts\w*|experts_per_token|moe_\w+"
    r"|shared_expert\w*|router_\w+|output_router_logits"
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
    (re.compile(r"experts|shared_expert\w*"), "a draft with experts"),
)
_TENSOR = re.compile(
    r"(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|t2d"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.weight"
)
_BIAS = re.compile(r"layers\.\d+\.self_attn\.[qkvo]_proj\.bias")


class DraftKeys:
    """Keys of a draft's config.json in z-lab's layout, without those that change nothing here.

    `outer` are the keys at the top level. `warnings` name those that are unknown, or that differ in both places.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """Raises ConfigError for a config of no DFlash draft, or for a key of a dialect that is not supported."""
        if "speculators_model_type" in raw or "transformer_layer_config" in raw:
            raw = _from_speculators(raw)
        inner = raw.get("dflash_config")
        if not isinstance(inner, Mapping):
            raise ConfigError(
                f"config.json has no dflash_config, so this is no DFlash draft (architectures: "
                f"{raw.get('architectures')})"
            )
        unknown = [name for name in raw if name not in _AT_THE_TOP and not _is_noise(name, raw[name])]
        unknown += [
            f"dflash_config.{name}"
            for name in inner
            if name not in _IN_EITHER_PLACE and not _is_noise(name, inner[name])
        ]
        self.outer = {name: value for name, value in raw.items() if not _INERT.fullmatch(name)}
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(rope := self.outer.get(name), Mapping):
                self.outer[name] = {key: value for key, value in rope.items() if not _ROPE_NOISE.fullmatch(key)}
        self._inner = {name: inner[name] for name in inner if name in _IN_EITHER_PLACE and inner[name] is not None}
        self.warnings = [
            f"{name} is {self.outer[name]!r} in config.json and {value!r} in its dflash_config, which is used"
            for name, value in self._inner.items()
            if self.outer.get(name) not in (None, value)
        ]
        if unknown:
            self.warnings.append(f"config.json has keys that are unknown here and ignored: {', '.join(unknown)}")

    def get(self, name: str) -> Any:
        """Return the value of a key, or None. Those inside `dflash_config` come before those at the top level."""
        return self._inner.get(name, self.outer.get(name))


def foreign_tensor(names: Iterable[str], *, biases: bool) -> str | None:
    """Return the reason why one of a draft's tensors is not run, or None.

    The tensor is of another variant of DFlash, which is named, or a bias while the config names no `biases`. A draft
    without it would lose its acceptance silently.
    """
    known = (_TENSOR, _BIAS) if biases else (_TENSOR,)
    unknown = sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in known))
    if not unknown:
        return None
    for name in unknown:
        for part in name.split("."):
            if dialect := _dialect(part):
                return f"tensor {name} is of {dialect}, which is not supported yet"
    if _BIAS.fullmatch(unknown[0]):
        return f"tensor {unknown[0]} is a bias, but attention_bias in config.json is not true"
    return f"tensor {unknown[0]} (one of {len(unknown)}) is of a variant of DFlash that is not supported yet"


def _is_noise(name: str, value: Any) -> bool:
    """Return True for a key that changes nothing. Raises ConfigError for one of a dialect."""
    if _INERT.fullmatch(name):
        return True
    dialect = _dialect(name)
    if dialect and value:
        raise ConfigError(f"{name} = {value!r} is of {dialect}, which is not supported yet")
    return dialect is not None


def _dialect(name: str) -> str | None:
    return next((dialect for pattern, dialect in _DIALECTS if pattern.fullmatch(name)), None)


def _from_speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the speculators library in z-lab's layout.

    The library counts the layers that have run, so its id k is the residual stream after our layer k - 1.
    """
    kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind != "dflash" or not isinstance(layer, Mapping):
        raise ConfigError(
            f"speculators_model_type {kind!r} with transformer_layer_config {type(layer).__name__} is not "
            "supported yet; supported: 'dflash' with an object"
        )
    own = dict(raw)
    for name in ("speculators_model_type", "transformer_layer_config", "model_type", "architectures"):
        own.pop(name, None)
    ids = own.pop("aux_hidden_state_layer_ids", None)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ConfigError(f"aux_hidden_state_layer_ids must be a list of layer numbers, found {ids!r}")
    if own.pop("sliding_window_non_causal", False):
        own["is_causal"] = False
    layer = {name: value for name, value in layer.items() if name != "architectures"}
    return {**layer, **own, "dflash_config": {"target_layer_ids": [i - 1 for i in ids]}}
