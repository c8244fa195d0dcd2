"""An engine with random weights, as small as can be."""

import json
from pathlib import Path
from typing import Any

from app.config.engine import EngineConfig
from app.engine.load.engine import Engine, build_engine
from tests import UNTIMED
from tools.lab.random_weights import TARGETS, RandomWeights, write_configs

TINY: dict[str, Any] = TARGETS["qwen3-0.6b"] | {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def tiny_engine(folder: Path, **config: Any) -> Engine:
    """Return an engine of TINY. Its config.json stays in the folder."""
    (folder / "config.json").write_text(json.dumps(TINY))
    target, draft = write_configs(str(folder / "config.json"), folder)
    wishes: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_cache_memory": 8 << 20}
    return build_engine(EngineConfig(target, draft, **UNTIMED | wishes | config), open_weights=RandomWeights)
