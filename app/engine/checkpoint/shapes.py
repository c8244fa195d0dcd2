"""Shapes of targets and drafts, as read from a config.json."""

from dataclasses import dataclass, field
from typing import NamedTuple

SWIGLU_ALPHA = 1.702
"""Factor inside the sigmoid of the clipped SwiGLU of gpt-oss."""


class AttentionMask(NamedTuple):
    """Tokens that a row of a layer sees, by position: with `causal` all up to itself, else its whole sequence. A
    `window` of W leaves the last W of them, including the row itself: q - W < k <= q if causal, else |q - k| < W."""

    causal: bool
    window: int | None = None

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        return kind if self.window is None else f"{kind}, window {self.window}"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1, by wavelength: long waves turn `factor` times slower, short ones are unchanged."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). Waves of fewer than `beta_slow` turns in `original_length` are `factor` times slower.
    Cos and sin are multiplied by `attention_factor`. With `truncate` the range between both betas is whole dims."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeDivisors:
    """RoPE scaling by a table: pair i turns `divisors[i]` times slower. Linear scaling has the same one for all."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE of a decoder: the first `dim` dims of a head turn, all of them if None. Dims (i, dim / 2 + i) turn together,
    or (2i, 2i + 1) with `adjacent_pairs`."""

    theta: float
    scaling: Llama3Scaling | YarnScaling | RopeDivisors | None = None
    dim: int | None = None
    adjacent_pairs: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts that replaces a layer's MLP. E is `num_experts`, k `num_experts_per_tok`.

    A row's weights are the k largest of a softmax over all E; `norm_topk_prob` divides them by their sum. With
    `swiglu_limit` L an expert computes (u + 1) g sigmoid(1.702 g), with g = min(gate, L) and u = clamp(up, -L, L),
    instead of silu(gate) up. L may be infinite.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()  # layers that keep a dense MLP
    has_bias: bool = False  # of router and experts
    swiglu_limit: float | None = None
    shared_size: int = 0  # inner size of the shared expert, whose output has a separate gate; 0 without one


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Sizes of the Gated DeltaNet layers, whose numbers are `layers`. Each head of q and k serves several of v.

    `k_copies` consecutive ranks have the same heads of q and k.
    """

    layers: tuple[int, ...]
    conv_kernel: int
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    k_copies: int = 1

    @property
    def channels(self) -> int:
        """Channels of the convolution: of q, k and v together."""
        return 2 * self.num_k_heads * self.k_head_dim + self.num_v_heads * self.v_head_dim

    @property
    def input_width(self) -> int:
        """Return the numbers that a row puts into the recurrence: the channels, and two gates a head."""
        return self.channels + 2 * self.num_v_heads


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a target or of a draft's layers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # the longest context, after RoPE scaling
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint, by its name: "bfloat16"
    masks: tuple[AttentionMask, ...]  # of each layer
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False  # each head has a logit without a value in its softmax
    qk_norm: bool = False  # each head of q and k is normed
    moe: MoeConfig | None = None  # None if every layer has a dense MLP
    gated_delta: GatedDeltaConfig | None = None  # None if every layer has attention
    model_type: str = ""  # a target's family
    kv_copies: int = 1  # consecutive ranks that have the same K and V heads

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Return the experts of a layer, or None if it has a dense MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the layers that keep a recurrent state instead of KV."""
        return self.gated_delta.layers if self.gated_delta else ()

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers - len(self.recurrent_layers)


@dataclass(frozen=True, slots=True)
class PathConfig:
    """Head of a draft that walks through the `top_k` best tokens of each row. Its tables are `rank` wide.

    `kind` is "selector" (DFlash2), or one of DSpark's Markov heads: "vanilla", "gated" or "rnn". Logits are multiplied
    by `scale` and capped at `softcap` before the scores of pairs are added.
    """

    kind: str
    rank: int
    top_k: int = 16
    scale: float = 1.0
    softcap: float | None = None

    def tensors(self, draft: "DFlashConfig") -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors by name: tables of the previous token and of the candidate, and then a
        projection with its bias, which some kinds have."""
        vocab, draft_vocab = draft.decoder.vocab_size, draft.draft_vocab_size
        hidden, rank = draft.decoder.hidden_size, self.rank
        shapes: dict[str, tuple[int, ...]] = {}
        if self.kind == "selector":
            shapes["candidate_selector.predecessor_codebook"] = (vocab, rank)
            shapes["candidate_selector.successor_codebook"] = (draft_vocab, rank)
            shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
            return shapes
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, rank)
        if self.kind != "vanilla":
            name, rows, states = ("gate", rank, 1) if self.kind == "gated" else ("joint", 3 * rank, 2)
            shapes[f"markov_head.{name}_proj.weight"] = (rows, hidden + states * rank)
            shapes[f"markov_head.{name}_proj.bias"] = (rows,)
        return shapes


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Shape of a draft. Its features [T, target_hidden_size] are the target's residual stream after chosen layers.

    Rows of a block predict drafts from `first_draft_row` on: 1 if row k predicts the token at position k, and 0 if it
    predicts the next one (`sample_from_anchor`).
    """

    decoder: DecoderConfig
    block_size: int  # the anchor and the drafts
    target_layer_ids: tuple[int, ...]  # layers of the target whose output is read
    mask_token_id: int
    target_hidden_size: int
    draft_vocab_size: int  # rows of the draft's lm_head
    first_draft_row: int = 1
    path: PathConfig | None = None  # without one each draft is its row's best token
    conv_group: int = 0  # channels in a group of DFlash2's convolutions, 0 without them
    embedding_scale: float = 1.0  # factor of the embedding's rows
    warnings: tuple[str, ...] = field(default=(), compare=False)  # about keys of config.json that are not used

    @property
    def extra_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors, by name, that drafts of DFlash v1 lack."""
        hidden = self.decoder.hidden_size
        shapes = self.path.tensors(self) if self.path else {}
        for i in range(self.decoder.num_layers if self.conv_group else 0):
            for name in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                shapes[f"{name}.base_kernel"] = (2, 2, hidden)
                shapes[f"{name}.kernel_projection.weight"] = (4 * hidden // self.conv_group, hidden)
        return shapes
