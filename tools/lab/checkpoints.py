"""Checkpoints of random weights on a disk, as others read them: configs, safetensors and a tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import DEMO
from app.engine.device.factory import make_backend
from app.engine.dflash.model import DFlashModel
from app.engine.load.loader import target_class
from app.engine.models.weights import Part
from tools.lab.random_weights import RandomWeights, write_configs


class Kept(RandomWeights):
    """Random weights of which each tensor becomes a file in `to`."""

    def __init__(self, folder: Path, to: Path) -> None:
        super().__init__(folder, torch.device("cpu"), torch.bfloat16, lambda *_: None)
        self._to, self._homes = to, dict[str, str]()

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = super().get(name, *shape, part=part)
        self._homes[name] = f"model-{name}.safetensors"
        save_file({name: tensor}, self._to / self._homes[name])
        return tensor if dtype is None else tensor.to(dtype)

    def close(self) -> None:
        (self._to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": self._homes}))


def write_checkpoints(wanted: str, folder: Path) -> tuple[Path, Path]:
    """Write a target and a draft in bfloat16, and return their folders. `wanted` is like in `write_configs`."""
    target, draft = write_configs(wanted, folder)
    raw, backend = _config(target), make_backend("cpu")
    config, kept = target_config(raw), Kept(target, target)
    model = target_class(raw["model_type"])(config, kept, backend)
    kept.close()
    kept = Kept(draft, draft)
    DFlashModel(draft_config(_config(draft), config), kept, backend, model.embedding, model.lm_head)
    kept.close()
    write_tokenizer(target, raw["vocab_size"])
    return target, draft


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the demo's tokenizer with more tokens, each of a text of its own, so that texts tell what was answered."""
    tokenizer = json.loads((DEMO / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġ{token}": token for token in range(len(vocab), vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(DEMO / "target" / "tokenizer_config.json", folder)


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
