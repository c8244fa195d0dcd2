"""Files that the engine cannot load are refused by name before the server listens, and all that it loads pass."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app import cli
from app.config.engine import EngineConfig
from app.engine.checkpoint.files import DEMO, Checkpoint
from app.engine.checkpoint.read import check_checkpoints, read_checkpoints
from app.engine.errors import UnsupportedError
from app.engine.load.loader import CheckpointWeights
from tests.fast.engine.pairs import GPT_OSS, Pair, make_pair

PAIRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "biases": {"biases": True},
    "shards": {"shards": 2},
    "prefix": {"draft_prefix": "model."},
    "taps by default": {"name_taps": False, "taps": (1,), "num_layers": 4, "draft_layers": 1},
    "own embedding and head": {"own_embedding": True, "own_head": True},
    "experts": {"experts": 4},
    "fused experts": {"experts": 4, "fused_experts": True, "dense_layers": (1,)},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "gpt_oss": GPT_OSS,
}
Change = Callable[[dict[str, Any]], object]


def made(folder: Path, **shape: Any) -> Pair:
    pair = make_pair(folder, **shape)
    (pair.target / "tokenizer.json").write_text("{}")
    return pair


def check(pair: Pair, **wishes: Any) -> None:
    check_checkpoints(EngineConfig(pair.target, pair.draft, **wishes))


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def narrow(name: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_the_engine_loads_passes(tmp_path: Path, name: str) -> None:
    check(made(tmp_path, **PAIRS[name]))


def test_the_demo_pair_passes() -> None:
    check_checkpoints(EngineConfig(DEMO / "target", DEMO / "draft"))


def test_a_target_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"{pair.target}: no tokenizer; looked for tokenizer\.json"):
        check(pair)


@pytest.mark.parametrize("layout", [{"dflash_config": {}}, {"speculators_model_type": "dflash"}])
def test_a_model_and_a_draft_that_are_confused_are_told_apart(tmp_path: Path, layout: dict[str, Any]) -> None:
    pair = made(tmp_path)
    with pytest.raises(UnsupportedError, match=r"draft: config\.json has no dflash_config, so this is no DFlash draft"):
        read_checkpoints(EngineConfig(pair.target, pair.target))
    edit(pair.target, **layout)
    with pytest.raises(UnsupportedError, match="is a DFlash draft: give it as --draft-model"):
        read_checkpoints(EngineConfig(pair.target))


@pytest.mark.parametrize("model_type", ["mixtral", None, 5, ["qwen3"]])
def test_a_family_that_is_not_supported_is_refused_before_anything_is_loaded(tmp_path: Path, model_type: Any) -> None:
    pair = made(tmp_path)
    edit(pair.target, model_type=model_type)
    refused = rf"target: model_type {re.escape(repr(model_type))} is not supported yet; .*'qwen3' \(dense Qwen3\)"
    with pytest.raises(UnsupportedError, match=refused):
        check(pair)


@pytest.mark.parametrize(
    ("length", "rope", "longest"),
    [
        (None, {}, 512),
        (2, {}, 512),
        (512, {}, 512),
        (1, {}, 512),
        (513, {"rope_type": "default", "rope_theta": 1e6}, 512),  # Transformers 5 writes it into every config.json
        (2048, {"rope_type": "yarn", "factor": 4.0}, 2048),
        (2049, {"rope_type": "yarn", "factor": 4.0}, 2048),
    ],
)
def test_a_length_that_the_model_does_not_have_is_refused(
    tmp_path: Path, length: int | None, rope: dict[str, Any], longest: int
) -> None:
    pair = made(tmp_path)
    edit(pair.target, rope_parameters=rope)
    if length is None or 2 <= length <= longest:
        check(pair, max_model_len=length)
        return
    told = rf"--max-model-len {length} is outside 2\.\.{longest}: max_position_embeddings in .* rope_scaling"
    with pytest.raises(UnsupportedError, match=told):
        check(pair, max_model_len=length)


def test_a_draft_in_the_speculators_format_passes_and_is_compared(tmp_path: Path) -> None:
    pair = made(tmp_path)
    file = pair.draft / "config.json"
    config = json.loads(file.read_text())
    ids = [tap + 1 for tap in config.pop("dflash_config")["target_layer_ids"]]
    block = {"block_size": config.pop("block_size"), "mask_token_id": 96}
    layer = {name: value for name, value in config.items() if name not in ("architectures", "num_target_layers")}
    own = block | {"speculators_model_type": "dflash", "transformer_layer_config": layer}
    file.write_text(json.dumps(own | {"aux_hidden_state_layer_ids": ids}))
    check(pair)
    file.write_text(json.dumps(own | {"aux_hidden_state_layer_ids": [*ids, 4][-3:]}))
    with pytest.raises(UnsupportedError, match=r"target_layer_ids .*the last layer excluded|fc\.weight has shape"):
        check(pair)
    file.write_text(json.dumps(own | {"aux_hidden_state_layer_ids": ids[:1]}))
    with pytest.raises(UnsupportedError, match=r"tensor fc\.weight has shape"):
        check(pair)


def test_a_mask_token_that_is_named_by_its_text_is_looked_up(tmp_path: Path) -> None:
    pair = made(tmp_path)
    config = json.loads((pair.draft / "config.json").read_text())["dflash_config"]
    edit(pair.draft, dflash_config={**config, "mask_token_id": None, "mask_token": "<|mask|>"})
    with pytest.raises(UnsupportedError, match=r"draft: mask_token '<\|mask\|>' is in no tokenizer\.json"):
        read_checkpoints(EngineConfig(pair.target, pair.draft))
    (pair.target / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|mask|>", "id": 95}]}')
    draft = read_checkpoints(EngineConfig(pair.target, pair.draft)).draft
    assert draft is not None and draft.mask_token_id == 95


@pytest.mark.parametrize(
    ("role", "change", "why"),
    [
        ("target", lambda t: t.pop("model.layers.3.mlp.up_proj.weight"), "layers.3.mlp.up_proj.weight is missing"),
        ("target", lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        ("target", lambda t: t.pop("model.norm.weight"), "norm.weight is missing"),
        ("target", narrow("model.embed_tokens.weight"), "embed_tokens.weight has shape [96, 32]"),
        ("target", narrow("model.layers.2.self_attn.k_proj.weight"), "self_attn.k_proj.weight has shape [31, 32]"),
        ("target", narrow("model.layers.0.mlp.down_proj.weight"), "down_proj.weight has shape [31, 64]"),
        ("draft", lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        ("draft", narrow("hidden_norm.weight"), "hidden_norm.weight has shape [31]"),
        ("draft", narrow("layers.1.self_attn.o_proj.weight"), "o_proj.weight has shape [31, 64]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_is_named_with_both_shapes(tmp_path: Path, role: str, change: Change, why: str) -> None:
    pair = made(tmp_path)
    edit(pair.draft, num_experts=128, num_experts_per_tok=8)  # copied from a target's config: it changes nothing
    change_tensors(tmp_path / role, change)
    with pytest.raises(UnsupportedError) as caught:
        check(pair)
    assert why in str(caught.value) and str(tmp_path / role) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("vocab_size", {"vocab_size": 101}),
        ("num_target_layers", {"num_layers": 6}),
        ("hidden_size", {"hidden_size": 64}),
    ],
)
def test_a_draft_of_another_target_is_told_in_a_line_by_the_field(
    tmp_path: Path, field: str, sizes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    pair, other = made(tmp_path / "own"), make_pair(tmp_path / "other", **sizes)
    assert cli.main(["serve", str(pair.target), "--draft-model", str(other.draft), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == said.count("\n") == 1
    assert f"draft: {field} is {next(iter(sizes.values()))}, but this target has" in said


QUANTISED = {
    "GPTQ": ("qweight", "qzeros", "scales", "g_idx"),
    "AWQ or GPTQ": ("qweight", "qzeros", "scales"),
    "compressed-tensors of 4 bits": ("weight_packed", "weight_scale", "weight_shape"),
    "bitsandbytes": ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "NVFP4": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "a quantised KV cache": ("weight", "kv_cache_scale"),
    "online transforms": ("weight", "clip_ratio"),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("quantisation", QUANTISED)
def test_quantised_weights_are_named_if_the_config_does_not_name_them(
    tmp_path: Path, quantisation: str, role: str
) -> None:
    pair, name = made(tmp_path), "layers.0.mlp.down_proj"
    folder = pair.target if role == "target" else pair.draft
    stored = load_file(folder / "model.safetensors")
    prefix = "model." if f"model.{name}.weight" in stored else ""

    def quantise(tensors: dict[str, Any]) -> None:
        weight = tensors.pop(f"{prefix}{name}.weight")
        tensors.update({f"{prefix}{name}.{part}": weight.clone() for part in QUANTISED[quantisation]})

    change_tensors(folder, quantise)
    told = rf"tensor {re.escape(name)}\.\S+ is of weights that are quantised \({quantisation}\)"
    with pytest.raises(UnsupportedError, match=told):
        check(pair)
    with pytest.raises(UnsupportedError, match=told):
        CheckpointWeights(Checkpoint(folder), torch.device("cpu"), torch.float32)
