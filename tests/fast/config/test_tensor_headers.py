"""A tensor that is missing or of another width, and a draft of another target, are told before the server listens."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app import cli
from app.config.checkpoint import DEMO, CheckpointError
from app.config.tensor_headers import check_draft_tensors, check_target_tensors
from app.engine.errors import UnsupportedError
from app.engine.load.loader import SafetensorsWeights
from tests.fast.engine.pairs import make_pair

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
    "gpt_oss": {"family": "gpt_oss", "experts": 4},
}
Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_the_engine_loads_passes(tmp_path: Path, name: str) -> None:
    pair = make_pair(tmp_path, **PAIRS[name])
    check_target_tensors(pair.target)
    check_draft_tensors(pair.draft, pair.target)


def test_the_demo_pair_passes() -> None:
    check_target_tensors(DEMO / "target")
    check_draft_tensors(DEMO / "draft", DEMO / "target")


def test_a_draft_in_the_speculators_format_passes_and_is_compared(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    file = pair.draft / "config.json"
    config = json.loads(file.read_text())
    ids = [tap + 1 for tap in config.pop("dflash_config")["target_layer_ids"]]
    own = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": ids, "transformer_layer_config": config}
    file.write_text(json.dumps(own))
    check_draft_tensors(pair.draft, pair.target)
    file.write_text(json.dumps(own | {"aux_hidden_state_layer_ids": [*ids, 4]}))
    with pytest.raises(CheckpointError, match=r"tensor fc\.weight has shape"):
        check_draft_tensors(pair.draft, pair.target)


def test_a_draft_of_a_dialect_that_is_not_run_is_told_by_name(tmp_path: Path) -> None:
    """Its keys and tensors are read as by the engine."""
    pair = make_pair(tmp_path)
    change_tensors(pair.draft, lambda tensors: tensors.update({"markov_head.w1": tensors["norm.weight"].clone()}))
    with pytest.raises(CheckpointError, match=r"draft: tensor markov_head\.w1 is of DSpark"):
        check_draft_tensors(pair.draft, pair.target)
    file = pair.draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_multiplier": 0.2}))
    with pytest.raises(CheckpointError, match=r"draft: output_multiplier = 0\.2 is of DFlash2"):
        check_draft_tensors(pair.draft, pair.target)


def test_experts_of_a_targets_config_are_noise_and_the_dense_tensors_are_compared(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    file = pair.draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 128, "num_experts_per_tok": 8}))
    check_draft_tensors(pair.draft, pair.target)
    change_tensors(pair.draft, narrow("layers.0.mlp.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has shape"):
        check_draft_tensors(pair.draft, pair.target)


def change_tensors(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def narrow(name: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


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
    pair = make_pair(tmp_path)
    change_tensors(tmp_path / role, change)
    with pytest.raises(CheckpointError) as caught:
        check_target_tensors(pair.target)
        check_draft_tensors(pair.draft, pair.target)
    assert why in str(caught.value) and str(tmp_path / role) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("vocab_size", {"vocab_size": 101}),
        ("num_target_layers", {"num_layers": 6}),
        ("hidden_size", {"hidden_size": 64}),
    ],
)
def test_a_draft_of_another_target_is_told_by_the_field(
    tmp_path: Path, field: str, sizes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    pair, other = make_pair(tmp_path / "own"), make_pair(tmp_path / "other", **sizes)
    (pair.target / "tokenizer.json").write_text("{}")
    assert cli.main(["serve", str(pair.target), "--draft-model", str(other.draft), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == said.count("\n") == 1
    assert f"{field} is {next(iter(sizes.values()))}, but the target" in said


@pytest.mark.parametrize(
    ("role", "field", "value", "tensor"),
    [
        ("target", "quantization_config", {"quant_method": "awq"}, "model.layers.0.mlp.up_proj.weight"),
        ("draft", "quantization_config", {"quant_method": "awq"}, "layers.0.mlp.up_proj.weight"),
        ("draft", "architectures", ["MuseGlimmerAssistantModel"], "hidden_norm.weight"),
    ],
    ids=str,
)
def test_what_the_engine_refuses_by_name_is_not_called_a_missing_tensor(
    tmp_path: Path, role: str, field: str, value: Any, tensor: str
) -> None:
    """Quantised weights and other kinds of drafts have tensors of other names and shapes."""
    pair = make_pair(tmp_path)
    change_tensors(tmp_path / role, lambda tensors: tensors.pop(tensor))
    file = tmp_path / role / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    check_target_tensors(pair.target)
    check_draft_tensors(pair.draft, pair.target)


def test_a_config_without_sizes_is_left_to_the_engine(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    (pair.target / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": "32"}))
    check_target_tensors(pair.target)
    check_draft_tensors(pair.draft, pair.target)


QUANTISED = {
    "GPTQ": ("qweight", "qzeros", "scales", "g_idx"),
    "AWQ or GPTQ": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
    "bitsandbytes": ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "msModelSlim": ("weight", "weight_scale", "weight_offset"),
    "fp8 in blocks": ("weight", "weight_scale_inv"),
    "NVFP4": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "fp8 or int8 with scales": ("weight", "weight_scale"),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("quantisation", QUANTISED)
def test_quantised_weights_are_named_if_the_config_does_not_name_them(
    tmp_path: Path, quantisation: str, role: str
) -> None:
    pair, name = make_pair(tmp_path), "layers.0.mlp.down_proj"
    folder = pair.target if role == "target" else pair.draft
    stored = load_file(folder / "model.safetensors")
    prefix = "model." if f"model.{name}.weight" in stored else ""

    def quantise(tensors: dict[str, Any]) -> None:
        weight = tensors.pop(f"{prefix}{name}.weight")
        tensors.update({f"{prefix}{name}.{part}": weight.clone() for part in QUANTISED[quantisation]})

    change_tensors(folder, quantise)
    told = rf"tensor {re.escape(name)}\.\S+ is of weights that are quantised \({quantisation}\)"
    with pytest.raises(CheckpointError, match=told):
        check_target_tensors(folder) if role == "target" else check_draft_tensors(folder, pair.target)
    with pytest.raises(UnsupportedError, match=told):
        SafetensorsWeights(folder, torch.device("cpu"), torch.float32)
