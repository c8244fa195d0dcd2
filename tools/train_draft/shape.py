"""The sizes of a draft, taken from its target's, and the taps of published drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.config.error import ConfigError
from app.engine.checkpoint.shapes import DecoderConfig

Head = Literal["dflash", "dflash2", "dspark"]
MAX_BLOCK = 16
"""Rows of a block that every device serves: GPUs and NPUs verify no more."""
TOP_K = 16
"""Candidates of each row that the path of DFlash2 and DSpark walks through."""
CONV_GROUP = 16
NUM_TAPS = 5


@dataclass(frozen=True)
class Shape:
    """Sizes of a draft whose hidden size, vocabulary, embedding and lm_head are its target's.

    The lm_head has `draft_vocab` of the target's rows. Taps are layers of the target whose outputs are the features.
    """

    vocab: int
    draft_vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float
    eps: float
    max_positions: int
    block: int  # the anchor and its drafts
    taps: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    head: Head
    rank: int  # of the tables of pairs; 0 for a head without them
    conv_group: int = CONV_GROUP  # channels of a group of DFlash2's convolutions


def shape_for(
    target: DecoderConfig,
    *,
    head: Head,
    layers: int,
    block: int,
    taps: Sequence[int] | None,
    draft_vocab: int | None,
    mask_token_id: int,
    rank: int,
) -> Shape:
    """Return the shape of a draft for a target. Without `taps` they are `default_taps`, and without `draft_vocab` the
    vocabulary is the target's. RoPE is the target's without its scaling. Raises ConfigError."""
    last = target.num_layers - 2
    chosen = default_taps(target.num_layers) if taps is None else tuple(taps)
    if not chosen or not all(0 <= tap <= last for tap in chosen) or list(chosen) != sorted(set(chosen)):
        given = f"--taps {','.join(map(str, chosen))}" if taps is not None else f"a target of {target.num_layers} layer"
        wanted = f"layers 0 to {last}, ascending and each once" if last >= 0 else "a target of 2 layers or more"
        raise ConfigError(f"{given}: a draft reads {wanted}; the target's last layer feeds its head and is no tap")
    if layers < 1:
        raise ConfigError(f"--layers {layers}: a draft has at least 1 layer")
    if not 2 <= block <= MAX_BLOCK:
        raise ConfigError(f"--block {block}: give 2 to {MAX_BLOCK}, the rows that all devices serve, anchor included")
    size = target.vocab_size if draft_vocab is None else draft_vocab
    check_vocabulary(size, target.vocab_size)
    if head == "dflash2" and target.hidden_size % CONV_GROUP:
        both = f"its convolutions have groups of {CONV_GROUP} channels, and the target's hidden_size is"
        raise ConfigError(f"--head dflash2: {both} {target.hidden_size}; give dspark or dflash")
    if head != "dflash" and rank < 1:
        raise ConfigError(f"--rank {rank}: the tables of --head {head} have at least 1 column")
    return Shape(
        **sizes_of(target),
        draft_vocab=size,
        layers=layers,
        block=block,
        taps=chosen,
        num_target_layers=target.num_layers,
        mask_token_id=mask_token_id,
        head=head,
        rank=0 if head == "dflash" else rank,
    )


def sizes_of(decoder: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a Shape that a draft has in common with its target, by a decoder that has them."""
    return {
        "vocab": decoder.vocab_size,
        "hidden": decoder.hidden_size,
        "heads": decoder.num_heads,
        "kv_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "mlp": decoder.intermediate_size,
        "rope_theta": decoder.rope.theta,
        "eps": decoder.rms_norm_eps,
        "max_positions": decoder.max_position_embeddings,
    }


def check_vocabulary(size: int, whole: int) -> None:
    """Raise ConfigError for a reduced vocabulary that is too small, or larger than the target's."""
    if not TOP_K <= size <= whole:
        raise ConfigError(f"--draft-vocab {size}: give {TOP_K} to {whole}, the target's vocabulary")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return NUM_TAPS layers of N spread evenly from 1 to N - 3, as in published drafts: 1, 8, 14, 21, 27 of 30. A
    target of up to NUM_TAPS + 1 layers has all but the last one tapped."""
    if num_layers <= NUM_TAPS + 1:
        return tuple(range(num_layers - 1))
    steps = (i * (num_layers - 4) / (NUM_TAPS - 1) for i in range(NUM_TAPS))
    return tuple(sorted({1 + int(step + 0.5) for step in steps}))  # halves go up, so not `round`
