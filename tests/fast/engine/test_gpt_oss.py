"""gpt-oss: experts in mxfp4, its own keys, and its text with DFlash, which is its text without.

tests/exhaustive/test_families.py compares it with Transformers.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint, read_config
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.load.loader import CheckpointWeights, target_class
from app.engine.models.experts import load_experts
from app.engine.models.weights import ExpertLayout, LayerSource, shard
from app.engine.quantised import PackedFp4, QuantisedWeight, packed_fp4
from tests import ROOT
from tests.fast.engine.feeder import Feeder, assert_logits_close, random_checkpoint
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import GPT_OSS, GPT_OSS_WINDOW, Pair, make_pair
from tests.fast.engine.quantised import bytes_of
from tests.fast.engine.thread_ranks import on_ranks
from tools.lab.random_weights import TARGETS

torch.set_num_threads(1)
CPU = torch.device("cpu")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), **LUCKY | GPT_OSS)


def by_hand(block: list[int], scale: int) -> list[float]:
    """Return the 32 numbers of a block, one at a time."""
    numbers = []
    for byte in block:
        for half in (byte % 16, byte // 16):
            sign = -1 if half >= 8 else 1
            numbers.append(sign * E2M1[half % 8] * 2.0 ** (scale - 127))
    return numbers


def test_a_block_of_mxfp4_is_32_numbers_low_half_first() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.tensor([[1, 100, 120, 126, 127, 128, 140, 250]] * 2, dtype=torch.uint8)
    wanted = [
        [number for block, scale in zip(row, powers, strict=True) for number in by_hand(block, scale)]
        for row, powers in zip(blocks.tolist(), scales.tolist(), strict=True)
    ]
    weight = PackedFp4(packed_fp4(blocks)[None], scales.mT[None], torch.float32, 0, 256)
    assert weight.dequantised()[0].tolist() == wanted


def test_experts_in_mxfp4_are_those_of_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    packed = random_checkpoint(tmp_path / "packed", **GPT_OSS | {"mxfp4": True})
    plain = random_checkpoint(tmp_path / "plain", **GPT_OSS)
    tensors, wanted = (load_file(each.folder / "model.safetensors") for each in (packed, plain))
    for name in wanted:
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
            rows = [by_hand(*at) for at in zip(blocks.view(-1, 16).tolist(), scales.flatten().tolist(), strict=True)]
            numbers = torch.tensor(rows).view(*blocks.shape[:2], -1)
            tensors[name] = numbers.transpose(1, 2).contiguous()
    save_file(tensors, plain.folder / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        feeder.logits(feeder.feed_whole(packed.prompts[2], 7))
        for feeder in (Feeder(packed.engine()), Feeder(plain.engine()))
    )
    assert_logits_close(found, expected)


def test_the_config_is_read_with_its_own_keys(pair: Pair) -> None:
    raw = read_config(pair.target)
    config = target_config(raw)
    assert [mask.window for mask in config.masks] == [GPT_OSS_WINDOW, None] * 2
    assert target_config({key: value for key, value in raw.items() if key != "layer_types"}) == config
    assert config.moe is not None and (config.moe.num_experts_per_tok, config.moe.swiglu_limit) == (3, 2.0)
    assert config.sinks and config.qkv_bias and config.o_bias and config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config\.quant_method = 'awq'"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
        ({"swiglu_limit": "7"}, "swiglu_limit must be a positive number, from .* found '7'"),
        ({"swiglu_limit": 0}, "swiglu_limit must be .* found 0"),
        ({"quantization_config": "mxfp8"}, r"quantization_config\.quant_method = 'mxfp8'"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"attention_bias": None}, "attention_bias is missing"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
    ids=str,
)
def test_what_would_run_wrongly_is_refused_by_name(pair: Pair, changes: dict[str, Any], names: str) -> None:
    with pytest.raises(UnsupportedError, match=f"target: {names}"):
        target_config(read_config(pair.target) | changes)


def test_a_limit_of_null_clips_nothing_and_a_missing_one_is_the_published_one(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path, **GPT_OSS)
    file, text = checkpoint.folder / "config.json", checkpoint.prompts[2]
    raw = read_config(checkpoint.folder)
    found = {}
    for limit in (None, 1e9, raw["swiglu_limit"]):
        file.write_text(json.dumps(raw | {"swiglu_limit": limit}))
        feeder = Feeder(checkpoint.engine())
        found[limit] = feeder.logits(feeder.feed_whole(text, 7))
    assert torch.equal(found[None], found[1e9])
    assert not torch.allclose(found[None], found[raw["swiglu_limit"]], atol=1e-3)
    without = target_config({name: value for name, value in raw.items() if name != "swiglu_limit"})
    assert without.moe is not None and without.moe.swiglu_limit == 7.0


def test_sinks_left_out_are_a_missing_tensor(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, **GPT_OSS)
    file = pair.target / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if "layers.1.self_attn.sinks" not in name}, file)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.sinks is missing"):
        make_engine(pair.target, max_model_len=64)


PACKED = "layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, rf"{PACKED}_scales is missing, and {PACKED}_blocks is U8; download it again"),
        ({"blocks": None}, rf"{PACKED}_blocks is missing, and {PACKED}_scales is U8; download it again"),
        ({"scales": torch.zeros(8, 32, 3, dtype=torch.uint8)}, r"down_proj_scales .*\[8, 32, 3\].*\[8, 32, 2\]"),
        (
            {"blocks": torch.zeros(8, 32, 2, 8, dtype=torch.uint8)},
            r"down_proj_blocks .*\[8, 32, 2, 8\].*\[8, 32, 2, 16\]",
        ),
        ({"scales": torch.ones(8, 32, 2)}, r"down_proj_scales is float32, not bytes"),
    ],
    ids=["no scales", "no blocks", "scales", "blocks", "dtype"],
)
def test_packed_experts_that_are_not_whole_are_refused(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    pair = make_pair(tmp_path, **GPT_OSS | {"mxfp4": True})
    file = pair.target / "model.safetensors"
    tensors = load_file(file) | {f"model.{PACKED}_{part}": tensor for part, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(UnsupportedError, match=message) as error:
        make_engine(pair.target, max_model_len=64)
    assert "\n" not in str(error.value)


class KeepsPacked(TorchBackend):
    def multiplies(self, weight: QuantisedWeight | PackedFp4) -> bool:
        return isinstance(weight, PackedFp4)


def packed_experts(folder: Path, comm: Comm = ALONE) -> list[PackedFp4]:
    """Return gate and up, and down, of the first layer that a rank reads."""
    backend, config = KeepsPacked(CPU), shard(target_config(read_config(folder)), comm.size)
    weights = CheckpointWeights(Checkpoint(folder), backend.device, torch.bfloat16)
    assert config.moe is not None
    layout = ExpertLayout("router", interleaved=True, input_first=True)
    own = load_experts(LayerSource(0, config, weights, backend, layout, comm), config.moe)
    assert isinstance(own.gate_up, PackedFp4) and isinstance(own.down, PackedFp4)
    return [own.gate_up, own.down]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_have_slices_of_packed_experts(tmp_path: Path, size: int) -> None:
    """Columns of eight ranks begin inside of a block of 32, which is read whole. No bit of a number changes."""
    folder = make_pair(tmp_path, **GPT_OSS | {"mxfp4": True}).target
    gate_up, down = (weight.dequantised() for weight in packed_experts(folder))
    parts = on_ranks(size, lambda comm: packed_experts(folder, comm))
    gates, ups = zip(*(part[0].dequantised().chunk(2, dim=1) for part in parts), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), dim=1), gate_up)
    assert torch.equal(torch.cat([part[1].dequantised() for part in parts], dim=2), down)
    assert {part[1].skipped for part in parts} == ({0, 8, 16, 24} if size == 8 else {0, 16} if size == 4 else {0})


@pytest.mark.parametrize("size", [1, 4])
def test_packed_experts_lie_in_memory_as_kernels_read_them(tmp_path: Path, size: int) -> None:
    folder = make_pair(tmp_path, **GPT_OSS | {"mxfp4": True}).target
    for of_rank in on_ranks(size, lambda comm: packed_experts(folder, comm)):
        assert all(weight.data.is_contiguous() and weight.scales.is_contiguous() for weight in of_rank)


def test_the_memory_that_is_checked_is_that_of_packed_experts(tmp_path: Path) -> None:
    folder = make_pair(tmp_path, **GPT_OSS | {"mxfp4": True}).target
    weights, backend = CheckpointWeights(Checkpoint(folder), CPU, torch.float32), KeepsPacked(CPU)
    target = target_class("gpt_oss")(target_config(read_config(folder)), weights, backend)
    tensors = load_file(folder / "model.safetensors")
    kept = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith(("_blocks", "_scales")))
    assert (backend.quantised_bytes, backend.widened_bytes) == (kept, 0)
    assert weights.num_bytes(backend.multiplies, to=None) == bytes_of(target)


class Named:
    """Weights without numbers, which keep the names, shapes and dtypes that a model asks for."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def __contains__(self, name: str) -> bool:
        return name.endswith("_blocks")

    def get(self, name: str, *shape: int, part: object = None, dtype: torch.dtype | None = None) -> Tensor:
        self.stored[name] = shape, dtype or torch.bfloat16
        return torch.empty(shape, dtype=dtype or torch.bfloat16, device="meta")

    get_linear = get

    def write(self, folder: Path, shards: int) -> None:
        """Write files of safetensors that have headers, and holes where the numbers would be."""
        for i in range(shards):
            header, end = dict[str, Any](), 0
            for name in sorted(self.stored)[i::shards]:
                shape, dtype = self.stored[name]
                start, end = end, end + math.prod(shape) * dtype.itemsize
                kind = "U8" if dtype == torch.uint8 else "BF16"
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
            text = json.dumps(header).encode()
            file = folder / f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            file.write_bytes(len(text).to_bytes(8, "little") + text)
            os.truncate(file, 8 + len(text) + end)


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
def test_the_page_says_what_the_published_models_take(tmp_path: Path, name: str, layers: int, experts: int) -> None:
    raw = TARGETS["gpt-oss-20b"] | {"num_hidden_layers": 1, "num_local_experts": experts, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    named, backend = Named(), KeepsPacked(torch.device("meta"))
    target_class("gpt_oss")(target_config(raw), named, backend)
    names = dict(named.stored)
    for i in range(1, layers):
        named.stored |= {name.replace("layers.0.", f"layers.{i}."): stored for name, stored in names.items()}
    named.write(tmp_path, shards=15)
    weights = CheckpointWeights(Checkpoint(tmp_path), CPU, torch.bfloat16)
    packed, wide = (weights.num_bytes(keeps, to=None) for keeps in (backend.multiplies, lambda weight: False))
    plain = sum(math.prod(shape) * 2 for shape, dtype in named.stored.values() if dtype == torch.bfloat16)
    assert packed == plain + layers * backend.quantised_bytes
    page = " ".join((ROOT / "docs" / "cuda.md").read_text().split())
    assert f"{name} takes {packed / 2**30:.1f} GiB, and {wide / 2**30:.1f} in 16 bits" in page
