"""The files of a draft: written in the layouts that the server reads, and read back to train on."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.config.error import ConfigError
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.files import Checkpoint
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from tools.train_draft.model import Draft
from tools.train_draft.shape import TOP_K, Head, Shape, sizes_of

_ARCHITECTURES: dict[Head, str] = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}


class Stored(NamedTuple):
    """A draft that was read: its state dict in fp32, and for a reduced vocabulary the target's token of each draft
    token, [Vd] int64, else None."""

    shape: Shape
    state: dict[str, Tensor]
    target_ids: Tensor | None


def write(draft: Draft, folder: Path, target_ids: Tensor | None, head_rows: Tensor | None) -> None:
    """Write config.json and model.safetensors in bf16. A kill leaves the files of before, or those of now.

    For a reduced vocabulary `target_ids` [Vd] are the target's tokens, and `head_rows` [Vd, H] their rows of its
    lm_head. Raises ConfigError if the folder cannot be written.
    """
    shape = draft.shape
    tensors = {name: _stored(tensor, torch.bfloat16) for name, tensor in draft.state_dict().items()}
    if target_ids is not None and head_rows is not None:
        ids = target_ids.cpu()
        tensors["d2t"] = _stored(ids - torch.arange(len(ids)), torch.int64)
        tensors["lm_head.weight"] = _stored(head_rows, torch.bfloat16)
    assert ("d2t" in tensors) == (shape.draft_vocab < shape.vocab)
    config = json.dumps(config_of(shape), indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Weights first: a folder becomes a checkpoint by its config.json.
        _replace(folder / "model.safetensors", lambda file: save_file(tensors, file, metadata={"format": "pt"}))
        _replace(folder / "config.json", lambda file: file.write_text(config, encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be written: {error}; free room on its disk, or give another --out"
        ) from None


def read(folder: Path, target: DecoderConfig) -> Stored:
    """Read a draft for a target as this tool writes it. Raises ConfigError that says what differs."""
    checkpoint = Checkpoint(folder)
    found = draft_config(checkpoint.config, target)
    shape = _shape(found, target)
    wanted = draft_config(config_of(shape), target)
    if difference := "; ".join([*found.warnings, *_differences(found, wanted)]):
        raise _refused(folder, difference)
    if (folder / "mask_embedding.pt").exists():
        raise _refused(folder, "it has mask_embedding.pt, and the mask's row is the target's here")
    with torch.device("meta"):
        sizes = {name: list(tensor.shape) for name, tensor in Draft(shape).state_dict().items()}
    if shape.draft_vocab < shape.vocab:
        sizes |= {"d2t": [shape.draft_vocab], "lm_head.weight": [shape.draft_vocab, shape.hidden]}
    stored = {tensor.name: tensor.shape for tensor in checkpoint.tensors.values()}
    for name in sorted(sizes.keys() | stored.keys()):
        if (has := stored.get(name)) != (needed := sizes.get(name)):
            raise _refused(folder, f"tensor {name} is {has or 'missing'}, and here {needed or 'there is none'}")
    state: dict[str, Tensor] = {}
    for file in {tensor.file for tensor in checkpoint.tensors.values()}:
        state |= load_file(file)
    distances, _ = state.pop("d2t", None), state.pop("lm_head.weight", None)
    ids = None if distances is None else distances.long() + torch.arange(len(distances))
    if ids is not None and not (ids.min() >= 0 and ids.max() < shape.vocab and len(ids.unique()) == len(ids)):
        raise _refused(folder, f"its d2t does not lead to {len(ids)} different tokens of {shape.vocab}")
    return Stored(shape, {name: tensor.float() for name, tensor in state.items()}, ids)


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the config.json of a draft, in z-lab's layout, with the keys of DFlash2's and DSpark's heads."""
    dflash: dict[str, Any] = {"target_layer_ids": list(shape.taps), "mask_token_id": shape.mask_token_id}
    if shape.head == "dflash2":
        dflash |= {"conv_kernel_size": 2, "conv_group_size": shape.conv_group}
        dflash |= {"selector_rank": shape.rank, "selector_top_k": TOP_K}
    elif shape.head == "dspark":
        dflash |= {"projector_type": "dspark", "markov_rank": shape.rank, "markov_head_type": "gated"}
        dflash |= {"dspark_bonus_anchor": True}
    reduced = {"draft_vocab_size": shape.draft_vocab} if shape.draft_vocab < shape.vocab else {}
    return {
        "architectures": [_ARCHITECTURES[shape.head]],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        **reduced,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
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
        "block_size": shape.block,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": dflash,
    }


def _shape(draft: DFlashConfig, target: DecoderConfig) -> Shape:
    """Return the nearest shape of this tool."""
    decoder, path = draft.decoder, draft.path
    head: Head = "dflash" if path is None else "dflash2" if draft.conv_group else "dspark"
    return Shape(
        **sizes_of(decoder),
        draft_vocab=draft.draft_vocab_size,
        layers=decoder.num_layers,
        block=draft.block_size,
        taps=draft.target_layer_ids,
        num_target_layers=target.num_layers,
        mask_token_id=draft.mask_token_id,
        head=head,
        rank=path.rank if path else 0,
        conv_group=draft.conv_group or Shape.conv_group,
    )


def _differences(found: Any, wanted: Any) -> list[str]:
    """Return what differs between two dataclasses of one type, field by field."""
    differing: list[str] = []
    for name in (field.name for field in fields(found) if field.compare):
        has, needed = getattr(found, name), getattr(wanted, name)
        if isinstance(has, DecoderConfig):
            differing += _differences(has, needed)
        elif has != needed:
            differing.append(f"{name} is {has}, and here {needed}")
    return differing


def _refused(folder: Path, difference: str) -> ConfigError:
    return ConfigError(f"--start-from {folder}: {difference}; give a draft that this tool wrote, or leave it out")


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype).contiguous()


def _replace(file: Path, save: Callable[[Path], object]) -> None:
    partial = file.with_name(f"{file.name}.partial")
    save(partial)
    partial.replace(file)
