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


def noise(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, std=1.0: torch.randn(*shape, generator=generator) * std


def with_convolutions(config: Json, tensors: dict[str, Tensor]) -> None:
    """Convolve groups of 8 channels, of kernels that are far from the identity's."""
    config["dflash_config"] |= {"conv_kernel_size": 2, "conv_group_size": 8}
    draw, dtype, hidden = noise(11), tensors["norm.weight"].dtype, config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        for part in ("attention", "mlp"):
            base = draw(2, 2, hidden, std=0.4)
            base[:, 0] += 1
            rows = draw(4 * hidden // 8, hidden, std=0.3 * hidden**-0.5)
            tensors[f"layers.{layer}.{part}_conv.base_kernel"] = base.to(dtype)
            tensors[f"layers.{layer}.{part}_conv.kernel_projection.weight"] = rows.to(dtype)


def with_a_selector(config: Json, tensors: dict[str, Tensor]) -> None:
    """Choose among 6 candidates by pairs whose scores are as large as the logits."""
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {"selector_rank": 5, "selector_top_k": 6}
    draw, vocab, hidden = noise(12), config["vocab_size"], config["hidden_size"]
    tensors["candidate_selector.predecessor_codebook"] = draw(vocab, 5)
    tensors["candidate_selector.successor_codebook"] = draw(vocab, 5)
    tensors["candidate_selector.hidden_projection.weight"] = draw(5, hidden, std=hidden**-0.5)


def as_dflash2(config: Json, tensors: dict[str, Tensor]) -> None:
    with_convolutions(config, tensors)
    with_a_selector(config, tensors)


def with_capped_logits(config: Json, tensors: dict[str, Tensor]) -> None:
    """Make logits large, so that the cap leaves little between candidates, and pairs decide."""
    as_dflash2(config, tensors)
    config["dflash_config"] |= {"output_multiplier": 3.0, "final_logit_softcapping": 4.0}


def in_speculators_dflash2(config: Json, tensors: dict[str, Tensor]) -> None:
    as_dflash2(config, tensors)
    inner = dict(config["dflash_config"])
    in_speculators_layout(config, tensors)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    tensors["lm_head.weight"] = noise(10)(97, 32, std=2 * 32**-0.5)
    config["draft_vocab_size"] = 97
    config |= {name: value for name, value in inner.items() if name.startswith(("conv", "selector"))}
    config |= {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}


def with_a_markov_head(kind: str, rows: int | None = None) -> Callable[[Json, dict[str, Tensor]], None]:
    """Bring DSpark's tables of rank 5, for a draft's vocabulary of `rows`, and a confidence head, which is not used."""

    def rewrite(config: Json, tensors: dict[str, Tensor]) -> None:
        draw, vocab = noise(13), config.get("vocab_size", 97)
        keys = {"markov_rank": 5, "markov_head_type": kind, "enable_confidence_head": True}
        config.get("dflash_config", config).update(keys | {"confidence_head_with_markov": True})
        tensors["markov_head.markov_w1.weight"] = draw(vocab, 5)
        tensors["markov_head.markov_w2.weight"] = draw(rows or vocab, 5)
        sizes = {"gated": ("gate_proj", 5, 37), "rnn": ("joint_proj", 15, 42)}
        if kind in sizes:
            name, out, width = sizes[kind]
            tensors[f"markov_head.{name}.weight"] = draw(out, width, std=2 * width**-0.5)
            tensors[f"markov_head.{name}.bias"] = draw(out, std=0.5)
        tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"] = draw(1, 37), draw(1)

    return rewrite


def in_deepspec_layout(config: Json, tensors: dict[str, Tensor]) -> None:
    """Put all keys at the top level, without a Markov head, and bring both ends."""
    config |= config.pop("dflash_config") | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}
    config |= {"num_anchors": 4, "markov_head_type": "vanilla"}
    draw, vocab, hidden = noise(14), config["vocab_size"], config["hidden_size"]
    tensors["embed_tokens.weight"] = draw(vocab, hidden, std=0.35)
    tensors["lm_head.weight"] = draw(vocab, hidden, std=2 * hidden**-0.5)


def in_deepspec_layout_with(kind: str) -> Callable[[Json, dict[str, Tensor]], None]:
    def rewrite(config: Json, tensors: dict[str, Tensor]) -> None:
        in_deepspec_layout(config, tensors)
        with_a_markov_head(kind)(config, tensors)

    return rewrite


def in_specforge_layout(config: Json, tensors: dict[str, Tensor]) -> None:
    config["architectures"] = ["DSparkDraftModel"]
    config["dflash_config"] |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    with_a_markov_head("vanilla")(config, tensors)


def with_a_config_of_its_own(config: Json, tensors: dict[str, Tensor]) -> None:
    """Nest DSpark's keys as SGLang does, beside those of the same meaning at the top level."""
    in_specforge_layout(config, tensors)
    config["dspark_config"] = config.pop("dflash_config")
    config |= {"dspark_block_size": config["block_size"], "target_layer_ids": [0, 1, 2]}


def in_speculators_dspark(config: Json, tensors: dict[str, Tensor]) -> None:
    """Have a reduced vocabulary: the table of what comes before has the target's ids."""
    in_speculators_layout(config, tensors)
    config["speculators_model_type"] = "dspark"
    with_a_markov_head("vanilla", len(tensors["lm_head.weight"]))(config, tensors)


def with_an_anchors_row(config: Json, tensors: dict[str, Tensor]) -> None:
    """Say by the number of drafts alone that row 0 does not predict."""
    in_speculators_dspark(config, tensors)
    config["speculators_config"]["proposal_methods"] = [{"speculative_tokens": config["block_size"] - 1}]


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
    "DFlash2, sliding": Dialect(SLIDES | {"is_causal": False}, as_dflash2),
    "DFlash2 with a cap": Dialect({"dflash_config.input_embedding_scale": 1.5}, with_capped_logits),
    "DFlash2, speculators": Dialect(SLIDES, in_speculators_dflash2),
    "convolutions alone": Dialect(rewrite=with_convolutions),
    "a selector alone": Dialect(rewrite=with_a_selector),
    "DeepSpec, rank 0": Dialect(rewrite=in_deepspec_layout),
    "DSpark, vanilla": Dialect(rewrite=in_deepspec_layout_with("vanilla")),
    "DSpark, gated": Dialect(rewrite=in_deepspec_layout_with("gated")),
    "DSpark, rnn": Dialect(rewrite=in_deepspec_layout_with("rnn")),
    "DSpark, SpecForge": Dialect(rewrite=in_specforge_layout),
    "DSpark, dspark_config": Dialect(rewrite=with_a_config_of_its_own),
    "DSpark, row 0 is the anchor": Dialect({"dflash_config.dspark_bonus_anchor": True}, in_specforge_layout),
    "DSpark, speculators, reduced vocabulary": Dialect(rewrite=in_speculators_dspark),
    "DSpark, speculators, 7 drafts": Dialect(rewrite=with_an_anchors_row),
    "JetSpec's causal head": Dialect({"dflash_config.causal_head": True}),
}
