"""Transformers itself, which no fast test loads."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar


def load_transformers(folder: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The target through Transformers, with its eager attention."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()
