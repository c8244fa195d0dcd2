"""A target in a GGUF file computes what its original computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fast.engine.feeder import Checkpoint, Feeder, random_checkpoint
from tests.fast.engine.gguf_models import to_gguf
from tests.fast.engine.pairs import LLAMA3

torch.set_num_threads(1)

Json = dict[str, Any]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, Json] = {
    "default": {"rope_theta": 1e6},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn, all keys": {"rope_scaling": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
}
SHAPES: dict[str, Json] = {
    **{f"llama, {name}": {"family": "llama", **rope} for name, rope in ROPES.items()},
    **{
        f"{family}, {name}": {"family": family, **ROPES[name]}
        for family in ("qwen2", "qwen3")
        for name in ("default", "linear", "yarn, all keys")
    },
    "llama, biases": {"family": "llama", "biases": True},
    "qwen3, biases": {"biases": True},
    **{f"{family}, tied": {"family": family, "tied": True} for family in ("llama", "qwen2", "qwen3")},
    "llama, no key_length": {"family": "llama", "head_dim": 8, "num_kv_heads": 4},
    "qwen2, no key_length": {"family": "qwen2", "head_dim": 8},
}


def logits(checkpoint: Checkpoint, folder: Path) -> torch.Tensor:
    feeder = Feeder(Checkpoint(folder, checkpoint.taps, checkpoint.prompts).engine())
    return feeder.logits(feeder.feed_whole(checkpoint.prompts[1], 7))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_original_to_the_bit(tmp_path: Path, shape: str) -> None:
    checkpoint = random_checkpoint(tmp_path, **SHAPES[shape])
    folder = to_gguf(checkpoint.folder, tmp_path / "gguf")
    assert torch.equal(logits(checkpoint, folder), logits(checkpoint, checkpoint.folder))
