"""Drafts of the published dialects: random checkpoints whose config and tensors are rewritten."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fast.engine.pairs import Pair, make_pair

Json = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 11
"""Less than two blocks of 8, and no multiple of a page."""


@dataclass(frozen=True)
class Dialect:
    """A draft's layout: changes of its config, where None leaves a key out, and of its tensors."""

    config: Json = field(default_factory=dict)
    rewrite: Callable[[Json, dict[str, Tensor]], None] = lambda config, tensors: None
    pair: Json = field(default_factory=dict)

    def make(self, folder: Path, **pair: Any) -> Pair:
        made = make_pair(folder, **({"seed": 4, "taps": (0, 1, 2)} | self.pair | pair))
        rewrite_draft(made, self.config, self.rewrite)
        return made


def rewrite_draft(pair: Pair, changes: Json, rewrite: Callable[[Json, dict[str, Tensor]], None]) -> None:
    """Change keys of a draft's config.json, "dflash_config.x" inside it, then config and tensors by `rewrite`."""
    file, weights = pair.draft / "config.json", pair.draft / "model.safetensors"
    config, tensors = json.loads(file.read_text()), load_file(weights)
    config, tensors = deepcopy(config), dict(tensors)
    for path, value in changes.items():
        *outer, name = path.split(".")
        inner = config
        for part in outer:
            inner = inner[part]
        if value is None:
            inner.pop(name, None)
        else:
            inner[name] = value
    rewrite(config, tensors)
    file.write_text(json.dumps(config))
    save_file(tensors, weights)


def with_reduced_vocabulary(config: Json, tensors: dict[str, Tensor]) -> None:
    """Keep every third token, and offsets to the target's."""
    kept = torch.arange(1, 97, 3)
    noise = torch.Generator().manual_seed(9)
    config["draft_vocab_size"] = len(kept)
    tensors["lm_head.weight"] = torch.randn(len(kept), 32, generator=noise) * 2 * 32**-0.5
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill_(0, kept, True)


def in_speculators_layout(config: Json, tensors: dict[str, Tensor]) -> None:
    """Nest the layers' config, count layers from one, and bring an embedding."""
    dflash = config.pop("dflash_config")
    own = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "a target"}},
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "block_size": config.pop("block_size"),
        "tie_word_embeddings": False,
    }
    with_reduced_vocabulary(own, tensors)
    tensors["embed_tokens.weight"] = torch.randn(97, 32, generator=torch.Generator().manual_seed(8)) * 0.35
    layer = {name: value for name, value in config.items() if name not in ("architectures", "num_target_layers")}
    config.clear()
    config |= own | {"transformer_layer_config": layer}


def with_a_tied_head(config: Json, tensors: dict[str, Tensor]) -> None:
    """Bring an embedding that is the lm_head too."""
    config["tie_word_embeddings"] = True
    tensors["embed_tokens.weight"] = torch.randn(97, 32, generator=torch.Generator().manual_seed(8)) * 0.35


def with_own_width(config: Json, tensors: dict[str, Tensor]) -> None:
    """Be half as wide as the target: the layers' rows and columns are cut, and the ends are the draft's own."""
    config |= {"hidden_size": 16, "target_hidden_size": 32}
    rows = ("layernorm.weight", "hidden_norm.weight", "o_proj.weight", "down_proj.weight")
    for name, tensor in tensors.items():
        if name in ("norm.weight", "fc.weight") or name.endswith(rows):
            tensors[name] = tensor[:16].contiguous()
        elif ("self_attn" in name and "norm" not in name) or ".mlp." in name:
            tensors[name] = tensor[:, :16].contiguous() * 2**0.5
    noise = torch.Generator().manual_seed(8)
    tensors["embed_tokens.weight"] = torch.randn(97, 16, generator=noise) * 0.35
    tensors["lm_head.weight"] = torch.randn(97, 16, generator=noise) * 0.5


SLIDES = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
DIALECTS: dict[str, Dialect] = {
    "one sliding layer, causal inside the block": Dialect(SLIDES),
    "sliding and not causal, by is_causal": Dialect(SLIDES | {"is_causal": False, "dflash_config.causal": True}),
    "causal in full layers too, by dflash_config": Dialect(SLIDES | {"dflash_config.causal": True}),
    "use_swa": Dialect({"layer_types": None, "dflash_config.use_swa": True, "dflash_config.swa_window_size": WINDOW}),
    "a window of one block and a window of its own": Dialect(
        {"layer_types": [SLIDING] * 2, "sliding_window": 64, "dflash_config.swa_window_size": 3, "is_causal": False}
    ),
    "biases, sliding": Dialect(SLIDES, pair={"biases": True}),
    "yarn with noise of a hybrid target": Dialect(
        {
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 2],
            },
            "partial_rotary_factor": 0.25,
            "attn_output_gate": True,
        }
    ),
    "reduced vocabulary": Dialect(rewrite=with_reduced_vocabulary),
    "speculators": Dialect(SLIDES, rewrite=in_speculators_layout),
    "sample from anchor": Dialect({"sample_from_anchor": True}),
    "half the target's width": Dialect(rewrite=with_own_width),
    "lm_head tied to its own embedding": Dialect(rewrite=with_a_tied_head),
}
