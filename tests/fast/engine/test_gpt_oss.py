"""gpt-oss: experts in mxfp4, its own keys, and its text with DFlash, which is its text without.

tests/exhaustive/test_families.py compares it with Transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import read_config
from app.engine.errors import UnsupportedError
from app.engine.models.experts import dequantised
from tests.fast.engine.feeder import Feeder, assert_logits_close, random_checkpoint
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import GPT_OSS, GPT_OSS_WINDOW, Pair, make_pair

torch.set_num_threads(1)
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
    assert dequantised(blocks, scales, torch.float32).tolist() == wanted


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
