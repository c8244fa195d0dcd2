"""A GGUF file's metadata as a config.json, and its tensors by Transformers' names. Metadata and tensors that would be
left out are refused by name, because texts would change without a word."""

import os
import re
import struct
from collections.abc import Iterable
from typing import Any

from app.engine.checkpoint.fields import naming, number, only, positive
from app.engine.checkpoint.gguf import GgufHeader, GgufTensor
from app.engine.errors import UnsupportedError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_KEYS = {
    *"vocab_size context_length embedding_length block_count feed_forward_length".split(),
    *(f"attention.{key}" for key in "head_count head_count_kv key_length value_length layer_norm_rms_epsilon".split()),
    *(f"rope.{key}" for key in "dimension_count freq_base scale_linear".split()),
    *(f"rope.scaling.{key}" for key in "type factor original_context_length finetuned".split()),
    *(f"rope.scaling.yarn_{key}" for key in "attn_factor beta_fast beta_slow".split()),
}
"""Keys of an architecture that are read. `rope.scaling.finetuned` changes nothing."""
_NEUTRAL = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "rope.scaling.yarn_ext_factor": 1.0}
"""Other keys, and the value with which they change nothing."""
_OUTER = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
"""Tensors outside and inside of layers, and their names in Transformers."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"
_FOREIGN = {
    r"(.+_exps|ffn_gate_inp)\..*": "of a mixture of experts, and of GGUF dense models only are supported",
    r"attn_qkv\..*": "q, k and v in one, which is not supported yet; convert the model again without --fuse-qkv",
    r".*\.(input_)?scale": "a factor of NVFP4, which is not supported yet; give another quantisation of the model",
}
"""What tensors are that no dense model of these architectures has."""
_KINDS = {
    "adapter": "a LoRA adapter; merge it into its model",
    "mmproj": "the image or audio part of a model; give the file of the model",
    "imatrix": "statistics for a quantiser; give the file of a model",
}
"""What a file is, by its `general.type`."""


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return what the header says as a config.json. Raises UnsupportedError for a file that is not the whole of a dense
    model of ARCHITECTURES, or would be run wrongly."""
    with naming(str(header.file)):
        metadata, tensors = header.metadata, header.tensors
        architecture = _architecture(header)
        own = {key.removeprefix(f"{architecture}."): key for key in metadata if key.startswith(f"{architecture}.")}
        _refuse_keys({name: metadata[key] for name, key in own.items()}, architecture)

        def size(name: str, default: int | None = None) -> int:
            return positive(metadata, f"{architecture}.{name}", default)

        hidden, heads = size("embedding_length"), size("attention.head_count")
        usual = size("rope.dimension_count", hidden // heads) if architecture == "llama" else hidden // heads
        head_dim = size("attention.key_length", usual)
        for name in ("attention.value_length", "rope.dimension_count"):
            if (given := size(name, head_dim)) != head_dim:
                both = f"{architecture}.{name} is {given}, and heads have {head_dim} dims"
                raise UnsupportedError(f"{both}, which is not supported yet")
        config: dict[str, Any] = {
            "model_type": architecture,
            "hidden_size": hidden,
            "intermediate_size": size("feed_forward_length"),
            "num_hidden_layers": size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": _vocab_size(header, architecture),
            "max_position_embeddings": size("context_length"),
            "rms_norm_eps": _rounded(number(metadata, f"{architecture}.attention.layer_norm_rms_epsilon")),
            "rope_parameters": _rope(header, architecture, head_dim),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
            "dtype": "float32" if tensors["token_embd.weight"].type == "F32" else "bfloat16",
        }
        _check_tensors(header, config)
        return config


def plain_name(name: str) -> str | None:
    """Return the name that Transformers gives a tensor of a GGUF file, or None for one that is part of the config."""
    if name == _ROPE_DIVISORS:
        return None
    if not (parts := _NAME.fullmatch(name)):
        return name
    layer, stem, end = parts.groups()
    if layer is None:
        return f"{_OUTER.get(stem, stem)}.{end}"
    return f"layers.{layer}.{_OF_LAYER.get(stem, stem)}.{end}"


def _architecture(header: GgufHeader) -> str:
    """Return the architecture. Raises UnsupportedError unless the file is the whole of a model of ARCHITECTURES."""
    metadata = header.metadata
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        merge = "`llama-gguf-split --merge FIRST-PART MERGED.gguf`, and give MERGED.gguf"
        raise UnsupportedError(f"it is one of {parts} parts of a model; merge them with {merge}")
    architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind == "model" and any(key.startswith("adapter.") for key in metadata):
        kind = "adapter"
    if kind != "model":
        what = _KINDS.get(str(kind), f"of general.type {kind!r:.200}; give the file of a model")
        raise UnsupportedError(f"it is {what}")
    if architecture == "clip" or any(key.startswith("clip.") for key in metadata):
        raise UnsupportedError(f"it is {_KINDS['mmproj']}")
    if architecture in ("dflash", "eagle3"):
        draft = "a draft in llama.cpp's format; give a draft's folder of safetensors as --draft-model, and its target"
        raise UnsupportedError(f"it is {draft} as MODEL")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        others = "; others are read from safetensors: give the model's folder or its Hugging Face id"
        raise UnsupportedError(
            f"general.architecture {architecture!r} is not supported in GGUF; supported: {known}{others}"
        )
    if not header.tensors:
        raise UnsupportedError("it has a vocabulary only, and no weights; give the file of the whole model")
    return str(architecture)


def _refuse_keys(keys: dict[str, Any], architecture: str) -> None:
    if keys.get("expert_count"):
        raise UnsupportedError(f"it has {keys['expert_count']} experts, and of GGUF dense models only are supported")
    for name, value in keys.items():
        if name not in _KEYS and not (name in _NEUTRAL and value == _NEUTRAL[name]):
            raise UnsupportedError(f"{architecture}.{name} = {value!r:.200} is not supported yet")


def _vocab_size(header: GgufHeader, architecture: str) -> int:
    """Return the rows of the embedding, which the vocabulary has too."""
    if (embedding := header.tensors.get("token_embd.weight")) is None:
        raise UnsupportedError("tensor token_embd.weight is missing; download it again")
    rows, tokens = embedding.shape[0], header.metadata.get("tokenizer.ggml.tokens")
    told = {f"{architecture}.vocab_size": positive(header.metadata, f"{architecture}.vocab_size", rows)}
    if isinstance(tokens, list):
        told["the length of tokenizer.ggml.tokens"] = len(tokens)
    for what, count in told.items():
        if count != rows:
            raise UnsupportedError(f"{what} is {count}, and token_embd.weight has {rows} rows; convert the model again")
    return rows


def _rope(header: GgufHeader, architecture: str, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters`. Rows of llama's q and k are left as converters write them, with dims that turn together
    side by side, and Llama 3's scaling is a tensor of divisors."""
    metadata = header.metadata
    of = f"{architecture}.rope"
    rope: dict[str, Any] = {"rope_theta": _rounded(number(metadata, f"{of}.freq_base", 10000.0))}
    if architecture == "llama":
        rope["is_neox_style"] = False
    scaling = f"{of}.scaling"
    factor = f"{of}.scale_linear" if f"{of}.scale_linear" in metadata else f"{scaling}.factor"
    kind = metadata.get(f"{scaling}.type", "linear" if factor in metadata else "none")
    only({f"{scaling}.type": kind}, **{f"{scaling}.type": ("none", "linear", "yarn")})
    divisors = header.tensors.get(_ROPE_DIVISORS)
    if kind == "none":
        return rope | ({"rope_type": "divisors", "divisors": _floats(header, divisors)} if divisors else {})
    if divisors:
        raise UnsupportedError(f"{scaling}.type {kind!r} together with {_ROPE_DIVISORS} is not supported yet")
    rope |= {"rope_type": kind, "factor": _rounded(number(metadata, factor))}
    if kind == "yarn":
        names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        given = {name: f"{scaling}.yarn_{key}" for name, key in names.items() if f"{scaling}.yarn_{key}" in metadata}
        rope |= {name: _rounded(number(metadata, key)) for name, key in given.items()}
        if (original := f"{scaling}.original_context_length") in metadata:
            rope["original_max_position_embeddings"] = positive(metadata, original)
    return rope


def _check_tensors(header: GgufHeader, config: dict[str, Any]) -> None:
    """Raise UnsupportedError for a tensor that is missing, unknown, or of another shape than the metadata says."""
    for name in header.tensors:
        for pattern, what in _FOREIGN.items():
            if re.fullmatch(rf"(blk\.\d+\.)?{pattern}", name):
                raise UnsupportedError(f"tensor {name} is {what}")
    left = dict(header.tensors)
    for name, shape in _shapes(config):
        if (tensor := left.pop(name, None)) is None:
            raise UnsupportedError(f"tensor {name} is missing; download it again, or convert the model again")
        if tensor.shape != shape:
            raise UnsupportedError(f"tensor {name} has shape {tensor.shape}, and the metadata says {shape}")
    left.pop(_ROPE_DIVISORS, None)
    if left:
        which = f"tensor {min(left)!r:.200} is none of {config['model_type']} as it is run here"
        raise UnsupportedError(f"{which}, and texts would be wrong without it")


def _shapes(config: dict[str, Any]) -> Iterable[tuple[str, list[int]]]:
    """Yield the name and shape of each tensor that a model of this config has."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim, heads, kv_heads = (config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    yield "token_embd.weight", [vocab, hidden]
    yield "output_norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "output.weight", [vocab, hidden]
    rows = {"attn_q": heads * head_dim, "attn_k": kv_heads * head_dim, "attn_v": kv_heads * head_dim}
    biases = rows if config["attention_bias"] or config["model_type"] == "qwen2" else {}
    biases = biases | {"attn_output": hidden} if config["attention_bias"] else biases
    of_layer = {f"{name}.weight": [hidden] for name in ("attn_norm", "ffn_norm")}
    of_layer |= {f"{name}.weight": [size, hidden] for name, size in rows.items()}
    of_layer |= {f"{name}.bias": [size] for name, size in biases.items()}
    of_layer["attn_output.weight"] = [hidden, heads * head_dim]
    if config["model_type"] == "qwen3":
        of_layer |= {f"attn_{part}_norm.weight": [head_dim] for part in "qk"}
    of_layer |= {
        "ffn_gate.weight": [inner, hidden],
        "ffn_up.weight": [inner, hidden],
        "ffn_down.weight": [hidden, inner],
    }
    for i in range(config["num_hidden_layers"]):
        for name, shape in of_layer.items():
            yield f"blk.{i}.{name}", shape


def _floats(header: GgufHeader, tensor: GgufTensor) -> list[float]:
    """Return the numbers of a small tensor."""
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 512:
        raise UnsupportedError(f"tensor {tensor.name} is {tensor.type} of shape {tensor.shape}, not half a head in F32")
    with header.file.open("rb") as stream:
        content = os.pread(stream.fileno(), tensor.nbytes, tensor.offset)
    if len(content) < tensor.nbytes:
        raise UnsupportedError("it was cut off while it was read; download it again")
    return list(struct.unpack(f"<{tensor.shape[0]}f", content))


def _rounded(value: float) -> float:
    """Return the shortest number that is the same in float32, which the file has: 1e-05 for 9.99999974e-06."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    shortest = (float(f"{single:.{digits}g}") for digits in range(1, 10))
    return next(short for short in shortest if struct.pack("<f", short) == struct.pack("<f", single))
