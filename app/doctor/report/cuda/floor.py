"""The least time that a GPU could take: bytes that must be read over its bandwidth, or operations over its rate,
whichever is longer, stage after stage. No engine is faster, whatever its kernels."""

from dataclasses import dataclass

from app.engine.dflash.config import DFlashConfig
from app.engine.models.config import DecoderConfig

BANDWIDTH = 4.3e12
"""Bytes a second that an H200's memory was measured to give."""
FLOPS = 790e12
"""Operations a second in bfloat16 that an H200 was measured to reach in large matrix products."""
BYTES = 2
"""Of a weight, and of a number in KV."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of one stage."""

    read: float
    operations: float

    @property
    def seconds(self) -> float:
        return max(self.read / BANDWIDTH, self.operations / FLOPS)


@dataclass(frozen=True, slots=True)
class Load:
    """So many sequences at once, each with so many tokens of prompt and of answer."""

    concurrency: int
    prompt: int
    answer: int

    @property
    def context(self) -> float:
        """Tokens of KV that a decode step reads of each sequence, on average."""
        return self.prompt + self.answer / 2


def forward(decoder: DecoderConfig, rows: int, seqs: int, context: float, *, logits: int) -> Work:
    """Of `rows` rows in all of `seqs` sequences over `context` tokens each, `logits` of which meet the lm_head."""
    layers = decoder.num_layers * layer_weights(decoder)
    head = decoder.vocab_size * decoder.hidden_size
    kv = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
    scores = 4 * decoder.num_layers * decoder.num_heads * decoder.head_dim * context
    return Work(
        BYTES * (layers + head * (logits > 0) + seqs * context * kv),
        2 * (rows * layers + logits * head) + rows * scores,
    )


def layer_weights(decoder: DecoderConfig) -> int:
    attention = (2 * decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
    return decoder.hidden_size * (attention + 3 * decoder.intermediate_size)


def context_kv(draft: DFlashConfig, rows: int) -> Work:
    decoder = draft.decoder
    kv = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
    weights = decoder.hidden_size * (len(draft.taps) * decoder.hidden_size + kv)
    return Work(BYTES * weights, 2 * rows * weights)


def step_seconds(target: DecoderConfig, draft: DFlashConfig | None, load: Load) -> float:
    """Of a decode step: a row of each sequence, or a whole block drafted and verified."""
    seqs = load.concurrency
    if draft is None:
        return forward(target, seqs, seqs, load.context, logits=seqs).seconds
    rows = seqs * draft.block_size
    parts = [
        forward(draft.decoder, rows, seqs, load.context, logits=rows - seqs),
        forward(target, rows, seqs, load.context, logits=rows),
        context_kv(draft, rows),
    ]
    return sum(stage.seconds for stage in parts)


def run_seconds(target: DecoderConfig, draft: DFlashConfig | None, load: Load, acceptance_length: float) -> float:
    """Of the whole load: the prompts, whose last row emits a token, and the steps of the others."""
    rows = load.concurrency * load.prompt
    prompts = forward(target, rows, load.concurrency, load.prompt / 2, logits=load.concurrency).seconds
    if draft is not None:
        prompts += context_kv(draft, rows).seconds
    steps = (load.answer - 1) / (acceptance_length if draft else 1.0)
    return prompts + steps * step_seconds(target, draft, load)
