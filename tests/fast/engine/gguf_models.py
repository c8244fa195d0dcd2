"""A target's folder as one GGUF file, with the tensors and metadata that llama.cpp's converter writes.

tests/golden/gguf has files that the converter itself wrote, of originals that are made again here.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from app.engine.checkpoint.gguf import GGUF_FILE
from tests import GOLDEN
from tests.fast.engine.pairs import LLAMA3, make_pair

Json = dict[str, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Quantise = Callable[[Tensor], tuple[GGMLQuantizationType, np.ndarray[Any, Any]]]
"""Returns the type and the stored form of a matrix [rows, columns] fp32."""
CONVERTED = GOLDEN / "gguf"
QUANTISED = CONVERTED / "blocks.json"
YARN: Json = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3,
}  # fmt: skip
TINY: Json = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "taps": (0,),
}
ORIGINALS: dict[str, tuple[Json, str]] = {
    "llama": ({"rope_theta": 5e5, "rope_scaling": LLAMA3, "biases": True}, "bf16"),
    "qwen2": ({"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "tied": True}, "q8_0"),
    "qwen3": ({"rope_scaling": YARN, "biases": True}, "f16"),
}
"""Arguments of `make_pair` for each family, and the converter's outtype."""
NAMES = {
    r"model\.embed_tokens": "token_embd",
    r"model\.norm": "output_norm",
    r"lm_head": "output",
    r"input_layernorm": "attn_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"self_attn\.([qkv])_proj": r"attn_\1",
    r"self_attn\.o_proj": "attn_output",
    r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"mlp\.(gate|up|down)_proj": r"ffn_\1",
}


def write_original(folder: Path, family: str, *, tokenizer: bool = False) -> Path:
    """Write a target of ORIGINALS with weights that are exact in 16 bits and alike on every machine. Return its folder.
    The `tokenizer` has a token for each of a few bytes."""
    target = make_pair(folder, family=family, **TINY | ORIGINALS[family][0]).target
    tensors = load_file(target / "model.safetensors")
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        numbers = (torch.arange(tensor.numel()) + 1009 * i) * 40503 % 65521 % 255 - 127
        tensors[name] = numbers.view(tensor.shape) / 256.0
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: TINY["vocab_size"] - 8]  # Transformers adds some
        Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, [])).save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return target


def as_type(kind: str) -> Quantise:
    """Return a function that quantises to a type whose quantiser the package `gguf` has."""
    stored = GGMLQuantizationType[kind]
    return lambda weight: (stored, quantize(weight.numpy(), stored))


def to_gguf(
    folder: Path,
    to: Path,
    quantise: Quantise | None = None,
    *,
    keys: Json | None = None,
    more: dict[str, Tensor] | None = None,
    drop: str = "\0",
) -> Path:
    """Write `to/GGUF_FILE` from a target of llama, qwen2 or qwen3, with matrices in F32 by default, and return `to`.

    `keys` are added to the metadata or replace it, `more` are further tensors, and metadata and tensors whose names
    `drop` matches are left out.
    """
    config: Json = json.loads((folder / "config.json").read_text())
    to.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(to / GGUF_FILE, config["model_type"])
    writer.kv_data[0].clear()  # the architecture, which `metadata_of` has too
    for key, value in (metadata_of(config) | (keys or {})).items():
        if not re.fullmatch(drop, key):
            _add(writer, key, value)
    for name, tensor in (_tensors(folder, config) | (more or {})).items():
        if re.fullmatch(drop, name):
            continue
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.numpy())
        else:
            kind, stored = (quantise or as_type("F32"))(tensor)
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def metadata_of(config: Json) -> Json:
    """Return the architecture's metadata, and a vocabulary of as many tokens as the model has."""
    arch, heads = config["model_type"], config["num_attention_heads"]
    rope = {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or config.get("rope_parameters") or {}),
    }
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if "head_dim" in config or arch == "llama":
        keys |= {f"attention.{kind}_length": head_dim for kind in ("key", "value")}
    if (kind := rope.get("rope_type")) in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        renamed = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        keys |= {f"rope.scaling.yarn_{key}": float(rope[name]) for name, key in renamed.items() if name in rope}
    if arch == "llama":
        keys |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    tokens = [f"<{i}>" for i in range(config["vocab_size"])]
    named = {f"{arch}.{key}": value for key, value in keys.items()}
    return {"general.architecture": arch} | named | {"tokenizer.ggml.tokens": tokens}


def dequantised(folder: Path, to: Path, quantise: Quantise) -> Path:
    """Write the target in `folder` as safetensors fp32 with the values that `quantise` leaves, and return `to`."""

    def values(matrix: Tensor) -> Tensor:
        kind, stored = quantise(matrix)
        return torch.from_numpy(dequantize(np.ascontiguousarray(stored), kind).copy()).view(matrix.shape)

    config: Json = json.loads((folder / "config.json").read_text())
    heads = _heads(config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor.float()
        if tensor.ndim > 1:
            count = heads.get(name.split(".")[-2], 0)
            tensors[name] = _in_halves(values(_side_by_side(tensors[name], count)), count)
    to.mkdir(parents=True, exist_ok=True)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return to


def _tensors(folder: Path, config: Json) -> dict[str, Tensor]:
    heads = _heads(config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, end = name.rpartition(".")
        layer = re.match(r"model\.layers\.(\d+)\.", stem)
        plain = stem[layer.end() :] if layer else stem
        renamed = next(re.sub(old, new, plain) for old, new in NAMES.items() if re.fullmatch(old, plain))
        full = f"blk.{layer[1]}.{renamed}.{end}" if layer else f"{renamed}.{end}"
        tensors[full] = _side_by_side(tensor.float(), heads.get(plain.rpartition(".")[2], 0))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(config, rope)
    return tensors


def _heads(config: Json) -> dict[str, int]:
    """Return the heads of the projections whose dims that turn together are stored side by side."""
    if config["model_type"] != "llama":
        return {}
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


def _side_by_side(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous() if heads else tensor


def _in_halves(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous() if heads else tensor


def _llama3_divisors(config: Json, rope: Json) -> Tensor:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = rope.get("rope_theta") or config["rope_theta"]
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    divisors = []
    for wave in 2 * math.pi / frequencies:
        if wave < length / high:
            divisors.append(1.0)
        elif wave > length / low:
            divisors.append(rope["factor"])
        else:
            smooth = (length / wave - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(divisors, dtype=torch.float32)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
