"""Writes and reads the pair in the published formats: bf16 safetensors and Transformers-style configs."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.demo_pair.model import Draft, Shape, Target
from tools.demo_pair.tokenizer import IM_END, PAD, save_tokenizer

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
CHECKPOINT = Path(__file__).parents[2] / "app" / "demo" / "checkpoint"


def qwen3_config(shape: Shape, layers: int) -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.kv_heads * shape.groups,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }


def save_target(target: Target, tokenizer: Tokenizer, folder: Path) -> None:
    shape = target.shape
    save_tokenizer(tokenizer, folder, shape.max_positions)
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(PAD)]
    special = {"bos_token_id": None, "eos_token_id": ends[0], "pad_token_id": ends[1]}
    config = {"architectures": ["Qwen3ForCausalLM"], **qwen3_config(shape, shape.layers), **special}
    generation = {"do_sample": False, "temperature": 0.0, "eos_token_id": ends, "pad_token_id": ends[1]}
    generation["max_new_tokens"] = 256  # a model of this size may else write on to the end of its context
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", generation)
    _save(target, folder)


def save_draft(draft: Draft, mask_token_id: int, folder: Path) -> None:
    shape = draft.shape
    folder.mkdir(parents=True, exist_ok=True)
    dflash: dict[str, object] = {"target_layer_ids": list(shape.taps), "mask_token_id": mask_token_id}
    if shape.head == "dflash2":
        dflash |= {"conv_kernel_size": 2, "conv_group_size": shape.conv_group}
        dflash |= {"selector_rank": shape.rank, "selector_top_k": 16}
    elif shape.head == "dspark":
        dflash |= {"projector_type": "dspark", "markov_rank": shape.rank, "dspark_bonus_anchor": True}
    config = {
        "architectures": [_ARCHITECTURES[shape.head]],
        **qwen3_config(shape, shape.draft_layers),
        "block_size": shape.block,
        "num_target_layers": shape.layers,
        "dflash_config": dflash,
    }
    _write(folder / "config.json", config)
    _save(draft, folder)


def load_target(folder: Path) -> Target:
    """Return the saved target, with bf16 weights in fp32."""
    target = Target(Shape())
    target.load_state_dict(load_file(folder / "target" / "model.safetensors"))
    return target.eval().requires_grad_(False)


def is_new(name: str) -> bool:
    """Return True for a parameter that a draft of kind "dflash" has not."""
    return any(part in name for part in ("_conv.", "candidate_selector.", "markov_head."))


def load_draft(folder: Path, head: str = "dflash") -> Draft:
    """Return the saved draft, with bf16 weights in fp32. What a draft of kind `head` has besides is new."""
    draft = Draft(Shape(head=head))
    found = draft.load_state_dict(load_file(folder / "draft" / "model.safetensors"), strict=False)
    missing = [name for name in found.missing_keys if not is_new(name)]
    assert not missing and not found.unexpected_keys, f"{folder}: {missing}, {found.unexpected_keys}"
    return draft.eval().requires_grad_(False)


def _save(model: torch.nn.Module, folder: Path) -> None:
    weights = {name: tensor.detach().bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
