"""What sampling parameters mean for the rows of a batch. `app.engine.sampling` applies them."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np

from app.engine.arrays import Array, Ints
from app.engine.sampling.metadata import SHORTLIST, CountedTokens, Filters, LogitBias, Penalties, SamplingMetadata
from app.engine.sampling.noise import noise_states
from app.engine.schedule.batch import ScheduledSequence


def sampling_rows(shares: list[ScheduledSequence], logits_start: Ints, draft_index: Ints) -> SamplingMetadata[Array]:
    """Return the logit rows of sequences that need the same kinds of work, and their places among all and in drafts."""
    params = [share.seq.request.sampling for share in shares]
    counts = [share.num_drafts + 1 for share in shares]
    places = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    rows = np.repeat(logits_start, counts) + places

    def column(values: Iterable[float], dtype: type = np.float32) -> Array:
        """Return one value of each sequence, repeated for each of its rows."""
        return np.repeat(np.array([*values], dtype=dtype), counts)

    # A row draws the token after it: the anchor's row draws the next one.
    states = [
        noise_states(each.seed, share.end - share.num_drafts, share.num_drafts + 1)
        for each, share in zip(params, shares, strict=True)
    ]
    found: SamplingMetadata[Array] = SamplingMetadata(
        rows.tolist(),
        rows,
        temperature=column(1.0 if each.is_greedy else each.temperature for each in params),
        state=np.concatenate(states),
    )
    if any(each.is_greedy for each in params):
        found.drawn = column((not each.is_greedy for each in params), np.int32)
    if params[0].is_filtered:
        found.filters = Filters(
            top_k=column(each.top_k or np.inf for each in params),
            top_p=column(each.top_p if each.top_p < 1 else np.inf for each in params),
            min_p=column(each.min_p for each in params),
            short=all(0 < each.top_k <= SHORTLIST for each in params),
        )
    starts = accumulate(counts, initial=0)
    biases = [bias for share, start in zip(shares, starts, strict=False) for bias in _biases(share, start)]
    if biases:
        bias_rows, tokens, values = zip(*biases, strict=True)
        found.additions = LogitBias(
            [*bias_rows], np.array(bias_rows, np.int32), np.array(tokens, np.int32), np.array(values, np.float32)
        )
    if params[0].is_penalised:
        seqs = [share.seq for share in shares]
        found.penalties = Penalties(
            presence=column(each.presence_penalty for each in params),
            frequency=column(each.frequency_penalty for each in params),
            repetition=column(each.repetition_penalty for each in params),
            batch_slot=column((seq.batch_slot for seq in seqs), np.int32),
            place=places,
            draft_index=np.repeat(draft_index, counts),
            counted=[CountedTokens(seq.key, seq.batch_slot, len(seq.request.token_ids), seq.token_ids) for seq in seqs],
        )
    return found


def _biases(share: ScheduledSequence, start: int) -> Iterator[tuple[int, int, float]]:
    """Yield (row, token, bias) for the rows of a sequence, the first of which is `start`."""
    request = share.seq.request
    num_emitted = share.end - share.num_drafts - len(request.token_ids)
    for place in range(share.num_drafts + 1):
        yield from ((start + place, token, bias) for token, bias in request.sampling.logit_bias)
        if num_emitted + place < request.sampling.min_tokens:
            yield from ((start + place, token, -np.inf) for token in request.stop_token_ids)
