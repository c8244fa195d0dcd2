"""Checkpoints of the settings: found, downloaded if need be, and checked before anything is loaded."""

import sys
from pathlib import Path

from app.config.checkpoint import check_files, check_length, resolve
from app.config.settings import Config
from app.config.tensor_headers import check_draft_tensors, check_target_tensors
from app.config.torch_build import check_torch_build


def find_models(config: Config) -> tuple[Path, Path | None]:
    """Return the folders of target and draft. Raises ConfigError for settings or files that cannot be used."""
    check_torch_build(config.device)
    config.api_keys()
    target = resolve(config.model, "target")
    check_files(target, need_tokenizer=True)
    check_length(target, config.max_model_len)
    check_target_tensors(target)
    draft_name = config.draft_model or ("demo" if config.model == "demo" else None)
    if not (config.speculation and draft_name):
        reason = "no --draft-model" if config.speculation else "--no-speculation"
        print(f"{config.model} decodes plainly, without drafts: {reason}", file=sys.stderr)
        return target, None
    draft = resolve(draft_name, "draft")
    check_files(draft, need_tokenizer=False)
    check_draft_tensors(draft, target)
    return target, draft
