"""The least time that an H200 could take for decode steps, by the rates of its memory and of its multipliers.

A stage reads its weights and KV, and multiplies; it takes the longer of the two times. No engine is faster, whatever
its kernels.
"""

from dataclasses import dataclass

from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from tools.report.roofline import H200, NUMBER_BYTES


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read and operations to compute of one stage."""

    read: float
    operations: float

    @property
    def seconds(self) -> float:
        """Least time on an H200."""
        return H200.seconds(self.read, self.operations)


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences that are decoded at once, and the tokens of each prompt and of each answer."""

    concurrency: int
    prompt: int
    answer: int

    @property
    def context(self) -> float:
        """Tokens of KV that a decode step reads of each sequence, on average."""
        return self.prompt + self.answer / 2


def forward(decoder: DecoderConfig, rows: int, seqs: int, context: float, *, logits: int) -> Work:
    """Return the work of `rows` rows of `seqs` sequences over `context` tokens each, with `logits` logit rows."""
    layers = decoder.num_layers * layer_weights(decoder)
    head = decoder.vocab_size * decoder.hidden_size
    kv = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
    scores = 4 * decoder.num_layers * decoder.num_heads * decoder.head_dim * context
    return Work(
        NUMBER_BYTES * (layers + head * (logits > 0) + seqs * context * kv),
        2 * (rows * layers + logits * head) + rows * scores,
    )


def layer_weights(decoder: DecoderConfig) -> int:
    attention = (2 * decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
    return decoder.hidden_size * (attention + 3 * decoder.intermediate_size)


def context_kv(draft: DFlashConfig, rows: int) -> Work:
    decoder = draft.decoder
    kv = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
    weights = decoder.hidden_size * (len(draft.target_layer_ids) * decoder.hidden_size + kv)
    return Work(NUMBER_BYTES * weights, 2 * rows * weights)


def step_seconds(target: DecoderConfig, draft: DFlashConfig | None, load: Load) -> float:
    """Return the floor of a decode step: a row of each sequence, or a whole block drafted and verified."""
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
    """Return the floor of a whole load: prompts, whose last row emits a token, and the steps of all other tokens."""
    rows = load.concurrency * load.prompt
    prompts = forward(target, rows, load.concurrency, load.prompt / 2, logits=load.concurrency).seconds
    if draft is not None:
        prompts += context_kv(draft, rows).seconds
    steps = (load.answer - 1) / (acceptance_length if draft else 1.0)
    return prompts + steps * step_seconds(target, draft, load)
