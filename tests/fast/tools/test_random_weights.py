"""Random weights stand for real models: their sizes are the published ones, and no file is made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.error import ConfigError
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import DEMO, Checkpoint
from app.engine.device.torch import TorchBackend
from app.engine.dflash.model import DFlashModel
from app.engine.load.loader import target_class
from app.engine.models.weights import Part
from app.engine.quantised import PackedFp4, QuantisedWeight, packed_fp4
from app.messages import Request
from tests.fast.tools.tiny import TINY, tiny_engine
from tools.lab.random_weights import TARGETS, RandomWeights, draft_for, write_configs


class Counted:
    """Weights that take no memory, but are counted once."""

    names = ()

    def __init__(self) -> None:
        self.sizes = dict[str, int]()

    @property
    def billions(self) -> float:
        return sum(self.sizes.values()) / 1e9

    def __contains__(self, name: str) -> bool:
        return False

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = torch.empty(shape, device="meta")
        self.sizes[name] = tensor.numel()
        return tensor

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        return self.get(name, *shape, part=part)

    def skip(self, name: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "billions", "draft_billions"),
    [
        ("qwen3-8b", 8.191, 1.049),
        ("qwen3-4b", 4.022, None),
        ("qwen3-0.6b", 0.596, None),
        ("qwen3.5-0.8b", 0.752, None),
        ("qwen3.8-27b-fp8", 26.896, None),
        ("qwen3-30b-a3b-fp8", 30.532, None),
        ("gpt-oss-20b", 20.908, None),  # without biases of experts, which stand beside fused ones only
    ],
)
def test_each_has_as_many_parameters_as_the_published_model(
    name: str, billions: float, draft_billions: float | None
) -> None:
    backend, counted = TorchBackend(torch.device("cpu")), Counted()
    config = target_config(TARGETS[name])
    target = target_class(TARGETS[name]["model_type"])(config, counted, backend)
    assert counted.billions == pytest.approx(billions, abs=0.001)
    if draft_billions:
        counted.sizes.clear()
        draft = draft_config(draft_for(TARGETS[name]), config)
        DFlashModel(draft, counted, backend, target.embedding, target.lm_head)
        assert counted.billions == pytest.approx(draft_billions, abs=0.001)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-4b"])
def test_the_draft_is_like_the_published_one(name: str) -> None:
    draft = draft_config(draft_for(TARGETS[name]), target_config(TARGETS[name]))
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (16, 151669, (1, 9, 17, 25, 33))
    assert draft.decoder.num_layers == 5


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 7, 8, 28, 64])
def test_a_target_of_any_depth_gets_a_draft_that_fits_it(num_layers: int) -> None:
    config = TINY | {"num_hidden_layers": num_layers}
    draft = draft_config(draft_for(config), target_config(config))
    assert len(draft.target_layer_ids) == draft.decoder.num_layers == max(1, min(5, num_layers - 3))


def test_an_engine_runs_on_them_and_only_configs_are_written(tmp_path: Path) -> None:
    core = tiny_engine(tmp_path).core
    tokens = core.run([Request("a", (1, 2, 3), max_tokens=40)])["a"]
    assert len(tokens) == 40
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"config.json"}
    assert core.runner.forward.target.lm_head is core.runner.forward.target.embedding


def weights_of(folder: Path, told: list[int], **config: Any) -> RandomWeights:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return RandomWeights(Checkpoint(folder), torch.device("cpu"), torch.bfloat16, lambda done, total: told.append(done))


def test_the_same_weights_come_every_time_and_differ_from_tensor_to_tensor(tmp_path: Path) -> None:
    def made(folder: str, name: str) -> torch.Tensor:
        told: list[int] = []
        weights = weights_of(tmp_path / folder, told)
        weights.get("before.weight", 4, 4)
        tensor = weights.get(name, 256, 64)
        assert told == [32, 32 + tensor.nbytes]
        return tensor

    there = made("target", "a.weight")
    assert there.dtype == torch.bfloat16 and there.float().std() == pytest.approx(1 / 8, rel=0.05)
    assert there.equal(made("target", "a.weight"))
    assert not there.equal(made("target", "b.weight")) and not there.equal(made("draft", "a.weight"))


FP8 = TARGETS["qwen3-8b-fp8"]["quantization_config"]
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}


@pytest.mark.parametrize(
    ("method", "kind", "scales"), [(FP8, torch.float8_e4m3fn, (300, 3)), (INT8, torch.int8, (300, 1))]
)
def test_weights_of_products_are_quantised_as_the_config_says(
    method: dict[str, Any], kind: torch.dtype, scales: tuple[int, int], tmp_path: Path
) -> None:
    weights = weights_of(tmp_path, [], quantization_config=method)
    weight = weights.get_linear("a.weight", 300, 384)
    assert isinstance(weight, QuantisedWeight) and weight.data.dtype == kind and weight.scales.shape == scales
    assert weight.dequantised().float().std() == pytest.approx(384**-0.5, rel=0.1)
    if method is FP8:  # a block has one scale
        assert weight.scales[:128].unique(dim=0).shape[0] == 1 and weight.scales.unique().numel() == 9
    part = weights.get_linear("a.weight", 300, 384, part=Part(0, (range(128, 256),)))
    assert isinstance(part, QuantisedWeight) and part.dequantised().equal(weight.dequantised()[128:256])
    assert isinstance(weights.get("norm.weight", 384), torch.Tensor)


def test_experts_in_mxfp4_are_bytes_of_the_size_of_a_projection(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, [], quantization_config={"quant_method": "mxfp4"})
    assert "layers.0.mlp.experts.gate_up_proj_blocks" in weights and "layers.0.mlp.gate.weight" not in weights
    assert isinstance(weights.get_linear("q_proj.weight", 8, 8), torch.Tensor)
    blocks = weights.get("down_proj_blocks", 2, 64, 90, 16, dtype=torch.uint8)
    scales = weights.get("down_proj_scales", 2, 64, 90, dtype=torch.uint8)
    packed = PackedFp4(packed_fp4(blocks), scales.mT, torch.float32, skipped=0, columns=2880)
    assert packed.dequantised().std() == pytest.approx(2880**-0.5, rel=0.3)


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"num_hidden_layers": "4", "vocab_size": 8}'])
def test_what_is_no_config_is_refused_with_the_names_there_are(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for given in (str(path), "qwen3-9b"):
        with pytest.raises(ConfigError) as raised:
            write_configs(given, tmp_path)
        assert given in str(raised.value) and "demo, qwen3-8b, qwen3-4b, qwen3-0.6b" in raised.value.hint


def test_the_demos_shape_is_the_demos_but_for_more_positions(tmp_path: Path) -> None:
    for folder in write_configs("demo", tmp_path):
        real = json.loads((DEMO / folder.name / "config.json").read_text())
        made = json.loads((folder / "config.json").read_text())
        assert {key for key in real if real[key] != made[key]} == {"max_position_embeddings"}
        assert real.keys() == made.keys() and made["max_position_embeddings"] == 16384
