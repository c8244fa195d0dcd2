"""Sizes of a dense decoder. `build/decoder_config.py` reads them from a config.json."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a target or a draft. `dtype` is the checkpoint's own name of it, like "bfloat16"."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
