"""The reader of checkpoints: folders by name, and the shapes of both models, checked against their files' headers."""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from app.config.engine import EngineConfig
from app.config.pairs import PAIRS, draft_name
from app.engine.checkpoint.draft import draft_config, refuse_foreign_tensors, windowed
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import (
    TOKENIZER_FILES,
    TOKENIZER_HUB_FILES,
    Checkpoint,
    find_folder,
    find_tensor,
    token_id,
)
from app.engine.checkpoint.gguf_folder import notes_of, weights_of
from app.engine.checkpoint.quantised import DTYPES, rotation_file
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.errors import UnsupportedError


class Models(NamedTuple):
    """The shapes of target and draft, and the checkpoints that have them."""

    target: DecoderConfig
    draft: DFlashConfig | None
    target_files: Checkpoint
    draft_files: Checkpoint | None


class Folders(NamedTuple):
    """The folders of target and draft, and of a tokenizer that is not the target's."""

    target: Path
    draft: Path | None
    tokenizer: Path | None


def find_models(
    model: str,
    draft_model: str | None,
    *,
    speculation: bool,
    revision: str | None = None,
    draft_revision: str | None = None,
    tokenizer: str | None = None,
) -> Folders:
    """Return the folders of models, downloaded if need be. Raises UnsupportedError."""
    target = find_folder(model, "target", revision=revision, has_tokenizer=tokenizer is None)
    draft = draft_name(model, draft_model)
    text = find_folder(tokenizer, "tokenizer", TOKENIZER_HUB_FILES) if tokenizer else None
    notes = notes_of(target) if model not in PAIRS else []  # a pair is described by app/config/pairs.py
    if notes:
        notes[0] += f"; its draft is {draft if speculation and draft else 'none'}"
    for note in notes:
        print(f"{model}: {note}", file=sys.stderr)
    if speculation and draft:
        return Folders(target, find_folder(draft, "draft", revision=draft_revision), text)
    reason = "no --draft-model" if speculation else "--no-speculation"
    print(f"{model} decodes plainly, without drafts: {reason}", file=sys.stderr)
    return Folders(target, None, text)


def read_checkpoints(config: EngineConfig) -> Models:
    """Read the config.json of both models. Raises UnsupportedError for what would run wrongly, --max-model-len too."""
    target_files, draft_files = Checkpoint(config.target), Checkpoint(config.draft) if config.draft else None
    raw = target_files.config
    if raw.keys() & {"dflash_config", "speculators_model_type", "markov_rank"}:
        raise UnsupportedError(f"{config.target} is a DFlash draft: give it as --draft-model, and its target as MODEL")
    target, draft = target_config(raw), None
    if config.draft and draft_files:
        find_token = partial(token_id, folders=(config.draft, config.target))
        draft = draft_config(draft_files.config, target, config.block_size, find_token)
        draft = windowed(draft, config.draft_window) if config.draft_window else draft
    if config.draft_window and not config.draft:
        raise UnsupportedError("--draft-window: it is for a draft, and there is none; leave it out")
    is_rotated = config.draft and rotation_file(config.target, target_files.description)
    if config.draft_head_from and not is_rotated:
        raise UnsupportedError("--draft-head-from: it is for drafts of a target that is rotated (QuaRot); leave it out")
    limit = target.max_position_embeddings
    if config.max_model_len and not 2 <= config.max_model_len <= limit:
        where = f"max_position_embeddings in {config.target / 'config.json'} allows {limit}"
        longer = "a longer context needs rope_scaling of type yarn there"
        if target_files.gguf:
            where = f"the context_length of {weights_of(config.target)} allows {limit}"
            longer = "a longer context needs a file that was converted with YaRN"
        raise UnsupportedError(f"--max-model-len {config.max_model_len} is outside 2..{limit}: {where}; {longer}")
    return Models(target, draft, target_files, draft_files)


def check_checkpoints(config: EngineConfig, tokenizer: Path | None = None) -> Models:
    """Read the config.json and the headers of both models. Raises UnsupportedError for those that the engine cannot
    load, and without a tokenizer, in the target's folder or that of `tokenizer`."""
    models = read_checkpoints(config)
    target, draft = models.target, models.draft
    folder = tokenizer or config.target
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        looked = f"no tokenizer; looked for {', '.join(TOKENIZER_FILES)}"
        raise UnsupportedError(f"{folder}: {looked}; copy the model's next to its weights, or give --tokenizer FOLDER")
    ends = ["embed_tokens"] if target.tie_word_embeddings else ["embed_tokens", "lm_head"]
    wanted = _layers(target) | {name: [target.vocab_size, target.hidden_size] for name in ends}
    stored = models.target_files.tensors
    for name, shape in wanted.items():
        find_tensor(stored, config.target, f"{name}.weight", shape)
    if config.quantization not in ("auto", "int8") and not {*DTYPES, "U8"} & {
        tensor.dtype for tensor in stored.values()
    }:
        reason = f"no tensor of {config.target} is quantised; give int8 to round them, or a checkpoint that is"
        raise UnsupportedError(f"--quantization {config.quantization}: {reason}")
    if draft and models.draft_files:
        stored, hidden = models.draft_files.tensors, draft.decoder.hidden_size
        refuse_foreign_tensors(stored, draft)
        taps = len(draft.target_layer_ids) * draft.target_hidden_size
        for name, shape in (_layers(draft.decoder) | {"hidden_norm": [hidden], "fc": [hidden, taps]}).items():
            find_tensor(stored, models.draft_files.folder, f"{name}.weight", shape)
        for name, sizes in draft.extra_tensors.items():
            find_tensor(stored, models.draft_files.folder, name, list(sizes))
    return models


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
