"""A GGUF file's metadata becomes a config.json, and what would be run wrongly is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint, read_config
from app.engine.checkpoint.gguf import GGUF_FILE
from app.engine.checkpoint.gguf_config import _rounded
from app.engine.errors import UnsupportedError
from tests.fast.engine.gguf_models import as_type, to_gguf
from tests.fast.engine.pairs import FAMILIES, make_pair

Json = dict[str, Any]


@pytest.mark.parametrize("shape", FAMILIES)
def test_the_shape_is_that_of_the_original(tmp_path: Path, shape: str) -> None:
    """But for what is another way to say the same: whose dims turn together, and Llama 3's scaling as divisors."""
    pair = make_pair(tmp_path, **FAMILIES[shape])
    found = target_config(Checkpoint(to_gguf(pair.target, tmp_path / "gguf")).config)
    wanted = target_config(read_config(pair.target))
    assert found.rope.theta == wanted.rope.theta and found.rope.adjacent_pairs == shape.startswith("Llama")
    if not shape.startswith("Llama 3"):
        assert found.rope.scaling == wanted.rope.scaling
    for name in wanted.__dataclass_fields__.keys() - {"rope"}:
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_the_dtype_is_bfloat16_unless_the_file_is_in_float32(tmp_path: Path, kind: str, dtype: str) -> None:
    pair = make_pair(tmp_path)
    assert Checkpoint(to_gguf(pair.target, tmp_path / "gguf", as_type(kind))).config["dtype"] == dtype


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 5e5, 1e6, 0.1, 3.14159274, 32.0, 1.0693147182464600])
def test_numbers_are_as_short_as_float32_has_them(value: float) -> None:
    single = torch.tensor(value).item()
    assert len(repr(_rounded(single))) <= len(repr(value)) and torch.tensor(_rounded(single)).item() == single


def rope_of(tmp_path: Path, keys: Json, drop: str = "\0") -> Json:
    pair = make_pair(tmp_path, family="llama", rope_theta=5e5)
    return dict(Checkpoint(to_gguf(pair.target, tmp_path / "gguf", keys=keys, drop=drop)).config["rope_parameters"])


def test_scaling_is_read_by_its_old_keys_too(tmp_path: Path) -> None:
    linear = {"rope_theta": 5e5, "is_neox_style": False, "rope_type": "linear", "factor": 4.0}
    assert rope_of(tmp_path, {"llama.rope.scaling.factor": 4.0}) == linear
    assert rope_of(tmp_path, {"llama.rope.scale_linear": 4.0}) == linear
    named = {"llama.rope.scaling.type": "none", "llama.rope.scaling.finetuned": True}
    assert rope_of(tmp_path, named) == {"rope_theta": 5e5, "is_neox_style": False}
    assert rope_of(tmp_path, {}, drop=".*freq_base")["rope_theta"] == 10000.0


def test_what_is_missing_has_llama_cpps_default(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, family="llama", num_kv_heads=4)
    without = r"llama\.(attention\.(head_count_kv|.*_length)|vocab_size)"
    config = Checkpoint(to_gguf(pair.target, tmp_path / "gguf", drop=without)).config
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (4, 16, 97)


def test_keys_that_change_nothing_pass(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, family="llama")
    keys = {
        "llama.attention.causal": True,
        "llama.expert_count": 0,
        "llama.expert_used_count": 0,
        "general.type": "model",
        "general.sampling.temp": 0.6,
        "split.count": 1,
        "mradermacher.quantized_by": "someone",
    }
    plain = Checkpoint(to_gguf(pair.target, tmp_path / "plain")).config
    assert Checkpoint(to_gguf(pair.target, tmp_path / "gguf", keys=keys)).config == plain


REFUSED: list[tuple[str, Json, str]] = [
    ("split", {"keys": {"split.count": 3, "split.no": 0}}, "one of 3 parts of a model; merge them with `llama-"),
    ("later part", {"keys": {"split.count": 3}, "drop": r"llama\..*|general\..*"}, "one of 3 parts of a model"),
    ("adapter", {"keys": {"general.type": "adapter", "adapter.type": "lora"}}, "is a LoRA adapter; merge it"),
    ("old adapter", {"keys": {"adapter.type": "lora"}}, "is a LoRA adapter"),
    ("mmproj", {"keys": {"general.type": "mmproj", "general.architecture": "clip"}}, "the image or audio part"),
    ("old mmproj", {"keys": {"general.architecture": "clip", "clip.has_vision_encoder": True}}, "the image or audio"),
    ("imatrix", {"keys": {"general.type": "imatrix"}}, "is statistics for a quantiser"),
    ("other type", {"keys": {"general.type": ["a"]}}, r"is of general\.type \['a'\]; give the file of a model"),
    ("draft", {"keys": {"general.architecture": "dflash"}}, "a draft in llama.cpp's format; .* as --draft-model"),
    ("eagle", {"keys": {"general.architecture": "eagle3"}}, "a draft in llama.cpp's format"),
    ("family", {"keys": {"general.architecture": "gemma3"}}, "'gemma3' is not .*; supported: llama, qwen2, qwen3;"),
    ("no family", {"drop": r"general\.architecture"}, r"general\.architecture None is not supported"),
    ("vocabulary", {"drop": r"(blk\.|output|token_embd).*"}, "has a vocabulary only, and no weights"),
    ("no embedding", {"drop": "token_embd.*"}, r"tensor token_embd\.weight is missing"),
    ("experts", {"keys": {"llama.expert_count": 8, "llama.expert_used_count": 2}}, "has 8 experts, and of GGUF dense"),
    ("missing", {"drop": r"blk\.2\.ffn_up\.weight"}, r"tensor blk\.2\.ffn_up\.weight is missing"),
    ("more layers", {"keys": {"llama.block_count": 2**32 - 1}}, "block_count must be a positive whole number, at most"),
    ("layer too many", {"keys": {"llama.block_count": 5}}, r"tensor blk\.4\.attn_norm\.weight is missing"),
    ("layer too few", {"keys": {"llama.block_count": 3}}, r"tensor 'blk\.3\.attn_k\.weight' is none of llama"),
    ("other width", {"keys": {"llama.feed_forward_length": 96}}, r"ffn_gate.weight has shape \[64, 32\], .*\[96, 32\]"),
    ("no key", {"drop": r"llama\.embedding_length"}, r"llama\.embedding_length is missing"),
    ("no eps", {"drop": r".*epsilon"}, r"llama\.attention\.layer_norm_rms_epsilon is missing"),
    ("heads by layer", {"keys": {"llama.attention.head_count_kv": [2, 2, 2, 1]}}, r"head_count_kv must be a positive"),
    ("part of a head", {"keys": {"llama.rope.dimension_count": 8}}, "dimension_count is 8, and heads have 16 dims"),
    ("values", {"keys": {"llama.attention.value_length": 32}}, "attention.value_length is 32, and heads have 16 dims"),
    ("tokens", {"keys": {"tokenizer.ggml.tokens": ["a"] * 96}}, "tokens is 96, and token_embd.weight has 97 rows"),
    ("vocab_size", {"keys": {"llama.vocab_size": 98}}, "llama.vocab_size is 98, and token_embd.weight has 97 rows"),
    ("longrope", {"keys": {"llama.rope.scaling.type": "longrope"}}, "type = 'longrope' .*; supported: 'none', 'lin"),
    ("no factor", {"keys": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.factor is missing"),
    ("factor 0", {"keys": {"llama.rope.scaling.factor": 0.0}}, "factor must be a positive number"),
    ("not causal", {"keys": {"llama.attention.causal": False}}, r"llama\.attention\.causal = False is not"),
    ("embeddings", {"keys": {"llama.pooling_type": 1}}, r"llama\.pooling_type = 1 is not supported yet"),
    ("scale", {"keys": {"llama.attention.scale": 0.5}}, r"llama\.attention\.scale = 0\.5 is not"),
    ("logits", {"keys": {"llama.logit_scale": 0.5}}, r"llama\.logit_scale = 0\.5 is not"),
    ("window", {"keys": {"llama.attention.sliding_window": 4096}}, r"sliding_window = 4096 is not"),
    ("unheard of", {"keys": {"llama.frobnication": [1]}}, r"llama\.frobnication = \[1\] is not supported yet"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "told"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_what_would_be_run_wrongly_is_refused_by_name(tmp_path: Path, given: Json, told: str) -> None:
    folder = to_gguf(make_pair(tmp_path, family="llama").target, tmp_path / "gguf", **given)
    with pytest.raises(UnsupportedError, match=f"^{folder / GGUF_FILE}: .*{told}"):
        Checkpoint(folder).config  # noqa: B018


FOREIGN = {
    "blk.0.ffn_gate_exps.weight": "is of a mixture of experts",
    "blk.3.ffn_gate_inp.weight": "is of a mixture of experts",
    "blk.0.attn_qkv.weight": "is q, k and v in one, .* without --fuse-qkv",
    "blk.0.attn_q.scale": "is a factor of NVFP4",
    "blk.0.ffn_up.bias": "is none of llama",
    "blk.0.attn_output.bias": "is none of llama",
    "blk.0.attn_q.bias": r"tensor blk\.0\.attn_k\.bias is missing",
    "blk.1.attn_q.bias": "is none of llama",
    "blk.0.attn_q_norm.weight": "is none of llama",
    "blk.00.attn_norm.weight": "is none of llama",
    "rope_factors_long.weight": "is none of llama",
    "model.layers.0.mlp.up_proj.weight": "is none of llama",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_tensor_that_would_be_left_out_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = to_gguf(make_pair(tmp_path, family="llama").target, tmp_path / "gguf", more={name: torch.ones(64)})
    with pytest.raises(UnsupportedError, match=FOREIGN[name]):
        Checkpoint(folder).config  # noqa: B018


@pytest.mark.parametrize(
    ("divisors", "keys", "told"),
    [
        (torch.ones(7), {}, "RoPE parameter divisors must be 8 numbers"),
        (torch.zeros(8), {}, r"divisors\[0\] must be a positive number"),
        (torch.ones(2, 4), {}, r"rope_freqs.weight is F32 of shape \[2, 4\]"),
        (torch.ones(8192), {}, "rope_freqs.weight is F32 of shape"),
        (
            torch.ones(8),
            {"llama.rope.scaling.factor": 2.0},
            "'linear' together with rope_freqs.weight is not supported",
        ),
    ],
)
def test_divisors_of_rope_are_refused_if_they_do_not_fit(
    tmp_path: Path, divisors: torch.Tensor, keys: Json, told: str
) -> None:
    target = make_pair(tmp_path, family="llama").target
    folder = to_gguf(target, tmp_path / "gguf", keys=keys, more={"rope_freqs.weight": divisors})
    with pytest.raises(UnsupportedError, match=told):
        target_config(Checkpoint(folder).config)
