"""The sampled rows of a batch as tables. `app.engine.sampling.metadata` reads their columns by name.

A new sampling parameter is one line of PARAMETERS, and one that uses it in `app.engine.sampling`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.arrays import Ints
from app.engine.sampling.columns import CountedTokens, SamplingRows
from app.engine.sampling.noise import noise_states
from app.engine.schedule.batch import ScheduledSequence
from app.messages import SamplingParams

PARAMETERS: Mapping[str, Callable[[SamplingParams], float]] = {
    "temperature": lambda params: 1.0 if params.is_greedy else params.temperature,
    "is_drawn": lambda params: not params.is_greedy,
    "top_k": lambda params: params.top_k or np.inf,
    "top_p": lambda params: params.top_p if params.top_p < 1 else np.inf,
    "min_p": lambda params: params.min_p,
    "presence": lambda params: params.presence_penalty,
    "frequency": lambda params: params.frequency_penalty,
    "repetition": lambda params: params.repetition_penalty,
}
"""fp32 columns with one value a sequence, repeated for each of its rows."""


class SampledSequence(NamedTuple):
    """A share whose rows are sampled: the first of its logit rows, and its row in the drafts."""

    share: ScheduledSequence
    logits_start: int
    draft_index: int


def sampling_rows(sampled: Sequence[SampledSequence]) -> list[SamplingRows]:
    """Return the rows of sequences that need more than argmax. Those with filters or penalties are kept apart, because
    they cost more."""
    kinds: dict[tuple[bool, bool], list[SampledSequence]] = {}
    for one in sampled:
        params = one.share.seq.request.sampling
        kinds.setdefault((params.is_filtered, params.is_penalised), []).append(one)
    return [_rows(of_kind) for of_kind in kinds.values()]


def _rows(sampled: Sequence[SampledSequence]) -> SamplingRows:
    seqs = [one.share.seq for one in sampled]
    params = [seq.request.sampling for seq in seqs]
    counts = [one.share.num_drafts + 1 for one in sampled]
    starts = np.cumsum(counts) - counts
    biases = [pair for one, start in zip(sampled, starts, strict=True) for pair in _biases(one.share, int(start))]
    bias_row, bias_token, bias = zip(*biases, strict=True) if biases else ((), (), ())
    places = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])

    def repeated(values: Sequence[int]) -> Ints:
        return np.repeat(np.array(values, dtype=np.int32), counts)

    columns: dict[str, NDArray[Any]] = {
        "rows": repeated([one.logits_start for one in sampled]) + places,
        "state": np.concatenate([_noise_states(one.share) for one in sampled]),
        "batch_slot": repeated([seq.batch_slot for seq in seqs]),
        "place": places,
        "draft_index": repeated([one.draft_index for one in sampled]),
        "bias_row": np.array(bias_row, dtype=np.int32),
        "bias_token": np.array(bias_token, dtype=np.int32),
        "bias": np.array(bias, dtype=np.float32),
    }
    for name, value_of in PARAMETERS.items():
        columns[name] = np.repeat(np.array([value_of(some) for some in params], dtype=np.float32), counts)
    counted = [
        CountedTokens(seq.key, seq.batch_slot, len(seq.request.token_ids), seq.token_ids)
        for seq in seqs
        if seq.request.sampling.is_penalised
    ]
    return SamplingRows(columns, counted, params[0].is_filtered)


def _biases(share: ScheduledSequence, start: int) -> Iterator[tuple[int, int, float]]:
    """Yield (row, token, bias) for the rows of a sequence, the first of which is `start`."""
    request = share.seq.request
    num_emitted = share.end - share.num_drafts - len(request.token_ids)
    for place in range(share.num_drafts + 1):
        yield from ((start + place, token, bias) for token, bias in request.sampling.logit_bias)
        if num_emitted + place < request.sampling.min_tokens:
            yield from ((start + place, token, -np.inf) for token in request.stop_token_ids)


def _noise_states(share: ScheduledSequence) -> Ints:
    """Return the noise state of the token that each logit row draws. The anchor's row draws the next token."""
    return noise_states(share.seq.request.sampling.seed, share.end - share.num_drafts, share.num_drafts + 1)
