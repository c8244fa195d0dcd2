"""The least time that a device could take, by the bandwidth of its memory and the rate of its multipliers.

A stage reads its weights and KV, and multiplies; it takes the longer of the two times. No engine is faster, whatever
its kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.engine.backend.base import Backend
from app.engine.dflash.config import DFlashConfig
from app.engine.models.config import DecoderConfig

NUMBER_BYTES = 2
"""Bytes of a weight, and of a number in KV, in bfloat16."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Bytes a second of HBM, and operations a second in bfloat16; a multiply-add is two."""

    bandwidth: float
    flops: float
    source: str = "assumed from secondary sources, good to 15 % at best"

    def seconds(self, read: float, operations: float) -> float:
        return max(read / self.bandwidth, operations / self.flops)


H200 = Chip(4.3e12, 790e12, "measured on an H200: a large copy, and large matrix products")
CHIPS = {
    "NVIDIA H200": H200,
    "Ascend910B2": Chip(1.6e12, 354e12),
    "Ascend910B3": Chip(1.6e12, 295e12),
    "Ascend910B4": Chip(0.8e12, 280e12),
    "Ascend910_93": Chip(1.6e12, 376e12),
}
"""Beginning of the name that a chip gives itself -> figures; for A3 of one of the two dies, each of which is a device.

No vendor's data sheet was at hand for Ascend, and published figures disagree. Cores and clocks of 910B2 and 910B3 are
from a CANN platform file: 24 or 20 cores x 8192 x 1.8 GHz."""


def figures(name: str) -> Chip | None:
    return next((chip for begin, chip in CHIPS.items() if name.startswith(begin)), None)


def chip_name(backend: Backend) -> str:
    """Return the name that the chip gives itself; "" on a CPU."""
    device_module = getattr(torch, backend.device.type)
    named: Callable[[int], str] | None = getattr(device_module, "get_device_name", None)
    return str(named(backend.device.index or 0)) if named else ""


def chip_of(backend: Backend) -> Chip | None:
    return figures(chip_name(backend))


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
