"""Sizes of a decoder. `build/decoder_config.py` reads them from a config.json."""

from dataclasses import dataclass, replace

from app.engine.device.base import AttentionMask
from app.engine.device.moe import MoeConfig


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1, by wavelength: long waves turn `factor` times slower, short ones as they were."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). Waves of fewer than `beta_slow` turns in `original_length` are `factor` times slower.

    Cos and sin are multiplied by `attention_factor`. With `truncate` the range between both betas is whole dims.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE of a decoder: the first `dim` dims of a head turn, all of them if None.

    Dims (i, dim / 2 + i) turn together, or (2i, 2i + 1) with `adjacent_pairs`.
    """

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    dim: int | None = None
    adjacent_pairs: bool = False


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Sizes of the Gated DeltaNet layers, whose numbers are `layers`. Each head of q and k serves several of v."""

    layers: tuple[int, ...]
    conv_kernel: int
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: those of q, k and v."""
        return 2 * self.num_k_heads * self.k_head_dim + self.num_v_heads * self.v_head_dim

    @property
    def input_width(self) -> int:
        """Return the numbers that a row puts into the recurrence: the channels, and two gates a head."""
        return self.channels + 2 * self.num_v_heads


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a target or a draft. `dtype` is the checkpoint's own name of it, like "bfloat16".

    `masks` are of each layer's attention. With `sinks` each head has a logit without a value in its softmax. With
    `qk_norm` each head of q and k is normed.
    `max_position_embeddings` is the longest context, after RoPE scaling. `moe` is None if every layer has a dense MLP.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    masks: tuple[AttentionMask, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    moe: MoeConfig | None = None
    gated_delta: GatedDeltaConfig | None = None

    def shard(self, size: int) -> "DecoderConfig":
        """Return the sizes of each of `size` ranks, which share heads and the MLPs. `size` divides these."""
        moe = self.moe and replace(
            self.moe,
            intermediate_size=self.moe.intermediate_size // size,
            shared_size=self.moe.shared_size // size,
        )
        gated_delta = self.gated_delta and replace(
            self.gated_delta,
            num_k_heads=self.gated_delta.num_k_heads // size,
            num_v_heads=self.gated_delta.num_v_heads // size,
        )
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=self.num_kv_heads // size,
            intermediate_size=self.intermediate_size // size,
            moe=moe,
            gated_delta=gated_delta,
        )

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Return the experts of a layer, or None if it has a dense MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def num_kv_layers(self) -> int:
        """Return the number of layers with attention. The others keep a recurrent state in place of KV."""
        return self.num_layers - (len(self.gated_delta.layers) if self.gated_delta else 0)
