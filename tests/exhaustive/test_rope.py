"""Every type of RoPE turns by the frequencies, and is as large, as in Transformers' modeling_rope_utils."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.engine.checkpoint.decoder import rope_config
from app.engine.device.torch import TorchBackend
from app.engine.models.rope import RotaryTable, frequencies

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "Llama 3.1": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Llama 3.2, rope_parameters": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 5e5,
        },
    },
    "Qwen3 yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn of the whole length": {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    "gpt-oss": {
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
    },
    "yarn, all parameters": {
        "rope_theta": 1e5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 20.0,
            "beta_slow": 2.0, "attention_factor": 0.7,
        },
    },
    "yarn whose slow bound lies past the last pair": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072},
    },
    "yarn without a ramp": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 1.0,
            "beta_slow": 1.0, "truncate": False,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_factor_are_transformers(case: str, head_dim: int) -> None:
    raw = {"head_dim": head_dim, "max_position_embeddings": 40960} | CASES[case]
    rope, _ = rope_config(raw, head_dim)
    config = LlamaConfig(**raw, hidden_size=256, num_attention_heads=4)
    theirs = LlamaRotaryEmbedding(config)
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        wanted, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        torch.testing.assert_close(frequencies(rope, head_dim), wanted, atol=0, rtol=1e-6)
    positions = torch.arange(0, 300, 7)
    cos, sin = RotaryTable(rope, head_dim, 300, torch.float32, TorchBackend(torch.device("cpu"))).at(positions)
    wanted_cos, wanted_sin = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos[:, 0], wanted_cos[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sin[:, 0], wanted_sin[0], atol=1e-4, rtol=1e-4)
