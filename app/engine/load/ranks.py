"""Tensor parallelism: where it can run, and what it divides."""

from collections.abc import Callable
from typing import NamedTuple

from app.engine.checkpoint.decoder import EXPERTS_ALIGNMENT
from app.engine.checkpoint.shapes import DecoderConfig, DFlashConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.step.runner import Tell
from app.engine_config import EngineConfig

_VOCAB = "tokens in its vocabulary"


class Rank(NamedTuple):
    """One of the processes that share a model. Rank 0 of several has `tell`, which sends its calls to the others."""

    comm: Comm = ALONE
    tell: Tell | None = None


Join = Callable[[Backend], Rank]
"""Function that returns this process's rank on its device, once the others have come."""


def alone(backend: Backend) -> Rank:
    return Rank()


def check_shards(config: EngineConfig, backend: Backend, target: DecoderConfig, draft: DFlashConfig | None) -> None:
    """Raise UnsupportedError if the models cannot be split as the user wishes."""
    size, draft_size = config.tensor_parallel_size, config.draft_tensor_parallel_size
    if draft_size not in (None, 1, size):
        raise UnsupportedError(
            f"--draft-tensor-parallel-size {draft_size}: give 1 or --tensor-parallel-size, which is {size}"
        )
    if size == 1:
        return
    wish = f"--tensor-parallel-size {size}"
    numbers = {"the target": _divided(target, target.vocab_size)}
    if draft:
        split = _divided(draft.decoder, draft.draft_vocab_size)
        numbers["the draft"] = {_VOCAB: draft.draft_vocab_size} if draft_size == 1 else split
    for model, divided in numbers.items():
        for what, number in divided.items():
            if number % size:
                could_be_whole = model == "the draft" and what != _VOCAB
                hint = "; --draft-tensor-parallel-size 1 leaves its layers whole" if could_be_whole else ""
                raise UnsupportedError(f"{wish}: {model} has {number} {what}, which {size} does not divide{hint}")


def _divided(decoder: DecoderConfig, vocab_size: int) -> dict[str, int]:
    numbers = {"attention heads": decoder.num_heads, "KV heads": decoder.num_kv_heads, _VOCAB: vocab_size}
    if decoder.moe is None or decoder.moe.dense_layers:
        numbers["columns in its MLP"] = decoder.intermediate_size
    if decoder.moe is not None:
        numbers[f"groups of {EXPERTS_ALIGNMENT} columns in each expert"] = (
            decoder.moe.intermediate_size // EXPERTS_ALIGNMENT
        )
        if decoder.moe.shared_size:
            numbers["columns in its shared expert"] = decoder.moe.shared_size
    if decoder.gated_delta is not None:
        numbers["key heads in its recurrent layers"] = decoder.gated_delta.num_k_heads
    return numbers
