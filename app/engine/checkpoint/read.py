"""The reader of checkpoints: folders by name, and the shapes of both models, checked against their files' headers."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from app.config.engine import EngineConfig
from app.engine.checkpoint.draft import draft_config, is_draft, refuse_foreign_tensors
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import TOKENIZER_FILES, StoredTensor, find_folder, read_config, read_tensors, token_id
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Shapes of a target, whose family is `model_type`, and of its draft if there is one."""

    target: DecoderConfig
    model_type: str
    draft: DFlashConfig | None


def find_models(model: str, draft_model: str | None, *, speculation: bool) -> tuple[Path, Path | None]:
    """Return the folders of target and draft, downloaded if need be. Raises UnsupportedError."""
    target, draft = find_folder(model, "target"), draft_model or ("demo" if model == "demo" else None)
    if speculation and draft:
        return target, find_folder(draft, "draft")
    reason = "no --draft-model" if speculation else "--no-speculation"
    print(f"{model} decodes plainly, without drafts: {reason}", file=sys.stderr)
    return target, None


def read_checkpoints(config: EngineConfig) -> Checkpoints:
    """Return the shapes of both models. Raises UnsupportedError for what would be run wrongly, --max-model-len too."""
    raw = read_config(config.target)
    if is_draft(raw):
        raise UnsupportedError(f"{config.target} is a DFlash draft: give it as --draft-model, and its target as MODEL")
    target, draft = target_config(raw), None
    if config.draft:
        if (config.draft / "mask_embedding.pt").exists():
            raise UnsupportedError(f"{config.draft}: mask_embedding.pt, an embedding of the mask, is not supported yet")
        find_token = partial(token_id, folders=(config.draft, config.target))
        draft = draft_config(read_config(config.draft), target, config.block_size, find_token)
    limit = target.max_position_embeddings
    if config.max_model_len and not 2 <= config.max_model_len <= limit:
        raise UnsupportedError(
            f"--max-model-len {config.max_model_len} is outside 2..{limit}: max_position_embeddings in "
            f"{config.target / 'config.json'} allows {limit}; a longer context needs rope_scaling of type yarn there"
        )
    return Checkpoints(target, raw["model_type"], draft)


def check_checkpoints(config: EngineConfig) -> None:
    """Raise UnsupportedError for configs, headers of weights or a tokenizer that the engine cannot load."""
    models = read_checkpoints(config)
    target = models.target
    if not any((config.target / name).is_file() for name in TOKENIZER_FILES):
        looked = f"no tokenizer; looked for {', '.join(TOKENIZER_FILES)}"
        raise UnsupportedError(f"{config.target}: {looked}; copy the tokenizer files of the model next to its weights")
    ends = ["embed_tokens"] if target.tie_word_embeddings else ["embed_tokens", "lm_head"]
    wanted = _layers(target) | {name: [target.vocab_size, target.hidden_size] for name in ends}
    _compare(config.target, read_tensors(config.target), wanted)
    if config.draft and models.draft:
        decoder, stored = models.draft.decoder, read_tensors(config.draft)
        refuse_foreign_tensors(stored, biases=decoder.qkv_bias)
        hidden, taps = decoder.hidden_size, len(models.draft.target_layer_ids) * models.draft.target_hidden_size
        _compare(config.draft, stored, _layers(decoder) | {"hidden_norm": [hidden], "fc": [hidden, taps]})


def _layers(config: DecoderConfig) -> dict[str, list[int]]:
    """Return the shapes of the weights that layers of all families share, and of the last norm."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv, attention = config.num_kv_heads * config.head_dim, config.num_heads * config.head_dim
    gated = 2 if config.gated_delta else 1  # a hybrid's q_proj has a gate for each head
    wanted = {"norm": [hidden]}
    for i in range(config.num_layers):
        shapes = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
        if i not in config.recurrent_layers:
            shapes |= {"self_attn.q_proj": [gated * attention, hidden], "self_attn.o_proj": [hidden, attention]}
            shapes |= {"self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden]}
        if not config.moe_of(i):
            shapes |= {"mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden]}
            shapes["mlp.down_proj"] = [hidden, inner]
        wanted |= {f"layers.{i}.{name}": shape for name, shape in shapes.items()}
    return wanted


def _compare(folder: Path, stored: Mapping[str, StoredTensor], wanted: Mapping[str, list[int]]) -> None:
    """Raise UnsupportedError unless each weight that is wanted is stored, in its shape."""
    if missing := [name for name in wanted if f"{name}.weight" not in stored]:
        which = f"{missing[0]}.weight is missing, one of {len(missing)} that config.json wants"
        raise UnsupportedError(f"{folder}: tensor {which}; download it again")
    for name, shape in ((f"{name}.weight", shape) for name, shape in wanted.items()):
        if stored[name].shape != shape:
            both = f"{name} has shape {stored[name].shape}, but config.json wants {shape}"
            raise UnsupportedError(f"{folder}: tensor {both}; config.json and weights are of different models")
