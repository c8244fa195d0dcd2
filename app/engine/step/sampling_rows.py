"""The sampled rows of a batch as tables. `app.engine.sampling.metadata` reads their columns by name.

A new sampling parameter is one line of PARAMETERS, and one that uses it in `app.engine.sampling`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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


def sampling_rows(shares: Sequence[ScheduledSequence], logits_start: Ints, draft_index: Ints) -> list[SamplingRows]:
    """Return the rows of those sequences that need more than argmax, where they start and with their row in the drafts.

    Those with filters or penalties are kept apart, because they cost more.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for i, share in enumerate(shares):
        params = share.seq.request.sampling
        if not params.is_argmax:
            kinds.setdefault((params.is_filtered, params.is_penalised), []).append(i)
    return [_rows([shares[i] for i in kind], logits_start[kind], draft_index[kind]) for kind in kinds.values()]


def _rows(shares: list[ScheduledSequence], logits_start: Ints, draft_index: Ints) -> SamplingRows:
    seqs = [share.seq for share in shares]
    params = [seq.request.sampling for seq in seqs]
    counts = [share.num_drafts + 1 for share in shares]
    starts = np.cumsum(counts) - counts
    biases = [pair for share, start in zip(shares, starts.tolist(), strict=True) for pair in _biases(share, start)]
    bias_row, bias_token, bias = zip(*biases, strict=True) if biases else ((), (), ())
    places = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    columns: dict[str, NDArray[Any]] = {
        "rows": np.repeat(logits_start, counts) + places,
        # A row draws the token after it: the anchor's row draws the next one.
        "state": np.concatenate(
            [
                noise_states(share.seq.request.sampling.seed, share.end - share.num_drafts, share.num_drafts + 1)
                for share in shares
            ]
        ),
        "batch_slot": np.repeat(np.array([seq.batch_slot for seq in seqs], dtype=np.int32), counts),
        "place": places,
        "draft_index": np.repeat(draft_index, counts),
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
