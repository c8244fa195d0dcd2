"""Shapes of tensors against config.json, told before the server listens, from headers alone.

The engine checks every tensor again when it reads it. The tensors here are those that all families share. A config.json
without plain sizes, of quantised weights or of another kind of draft is left to the engine, which refuses it by name.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from app.config.checkpoint import CheckpointError, plain_name, quantised_tensor, read_json, tensor_shapes
from app.config.draft_keys import DraftKeys, foreign_tensor
from app.config.error import ConfigError

_OWN_MLP = ("num_experts", "num_local_experts")
"""Keys of families whose layers have no dense MLP, or not all of them."""


def check_target_tensors(target: Path) -> None:
    """Raise CheckpointError for a tensor of the target that is missing or has another shape than its config wants."""
    config = read_json(target / "config.json")
    shapes = _shapes(target)
    vocab, hidden = _size(config, "vocab_size"), _size(config, "hidden_size")
    if config.get("quantization_config"):
        return
    _refuse_quantised(target, shapes)
    if not vocab or not hidden:
        return
    wanted = dict(_decoder(config))
    wanted["embed_tokens.weight"] = [vocab, hidden]
    if not config.get("tie_word_embeddings"):
        wanted["lm_head.weight"] = [vocab, hidden]
    _compare(target, shapes, wanted)


def check_draft_tensors(draft: Path, target: Path) -> None:
    """Raise CheckpointError for a draft of another target or dialect, or for a tensor as in `check_target_tensors`."""
    of_target, shapes = read_json(target / "config.json"), _shapes(draft)
    try:
        keys = DraftKeys(read_json(draft / "config.json"))
    except ConfigError as error:
        raise CheckpointError(f"{draft}: {error}") from None

    def stated(name: str) -> int | None:
        return _size({name: keys.get(name)}, name)

    target_hidden = stated("target_hidden_size") or stated("hidden_size")
    fits = {
        "vocab_size": (stated("vocab_size"), _size(of_target, "vocab_size")),
        "num_target_layers": (stated("num_target_layers"), _size(of_target, "num_hidden_layers")),
        "target_hidden_size": (target_hidden, _size(of_target, "hidden_size")),
    }
    for field, (found, wanted) in fits.items():
        if found and wanted and found != wanted:
            field = field if stated(field) else "hidden_size"
            raise CheckpointError(
                f"{draft}: {field} is {found}, but the target {target} has {wanted}; give the draft that was made for "
                "this target"
            )
    hidden, is_v1 = stated("hidden_size"), keys.outer.get("architectures") in (None, ["DFlashDraftModel"])
    if keys.outer.get("quantization_config"):
        return
    _refuse_quantised(draft, shapes)
    if not hidden or not target_hidden or not is_v1:
        return
    if reason := foreign_tensor(shapes, biases=bool(keys.outer.get("attention_bias"))):
        raise CheckpointError(f"{draft}: {reason}")
    wanted_shapes = {**dict(_decoder(keys.outer)), "hidden_norm.weight": [hidden]}
    if isinstance(taps := keys.get("target_layer_ids"), list):
        wanted_shapes["fc.weight"] = [hidden, len(taps) * target_hidden]
    _compare(draft, shapes, wanted_shapes)


def _decoder(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Yield the tensors of layers and the last norm with their shapes, none if the config lacks a size."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    hidden, num_layers, heads, inner = (_size(config, name) for name in names)
    if not hidden or not num_layers or not heads or not inner:
        return
    kv_heads = _size(config, "num_key_value_heads") or heads
    head_dim = _size(config, "head_dim") or hidden // heads
    attention, kv = heads * head_dim, kv_heads * head_dim
    layer = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [attention, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, attention],
    }
    if not any(config.get(name) for name in _OWN_MLP):
        layer |= {"mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner]}
    if "linear_num_value_heads" in config:  # a hybrid: few layers have attention, and its queries are twice as wide
        layer = {name: shape for name, shape in layer.items() if not name.startswith("self_attn.")}
    for number in range(num_layers):
        for name, shape in layer.items():
            yield f"layers.{number}.{name}.weight", shape
    yield "norm.weight", [hidden]


def _shapes(folder: Path) -> dict[str, list[int]]:
    return {plain_name(name): shape for name, shape in tensor_shapes(folder).items()}


def _refuse_quantised(folder: Path, names: Iterable[str]) -> None:
    if reason := quantised_tensor(names):
        raise CheckpointError(f"{folder}: {reason}")


def _compare(folder: Path, shapes: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> None:
    if missing := [name for name in wanted if name not in shapes]:
        raise CheckpointError(
            f"{folder}: tensor {missing[0]} is missing, one of {len(missing)} that config.json wants; download it again"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {shapes[name]}, but config.json wants {shape}; config.json and "
                "weights are of different models"
            )


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """Return a positive number of the config, or None."""
    value = config.get(name)
    return value if type(value) is int and value > 0 else None
