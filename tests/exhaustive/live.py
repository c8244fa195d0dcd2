"""Transformers itself, which no fast test loads."""

from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar


def load_transformers(folder: Path | str, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The target through Transformers, with its eager attention."""
    disable_progress_bar()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", local_files_only=True)
    return model.eval()
