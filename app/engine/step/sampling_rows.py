"""What sampling parameters mean for the rows of a batch. `app.engine.sampling` applies them."""

from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np

from app.engine.arrays import Array, Ints
from app.engine.sampling.metadata import CountedTokens, Filters, Kind, LogitBias, Penalties, SamplingMetadata, kind_of
from app.engine.sampling.noise import noise_key, noise_states
from app.engine.schedule.batch import ScheduledSequence


def sampled_rows(
    entries: list[ScheduledSequence], logits_start: Ints, draft_index: Ints, in_graph: bool
) -> list[SamplingMetadata[Array]]:
    """Return rows that need more than argmax, by the kind of their work.

    Entry i has logit rows from `logits_start[i]` on, and its drafts are in row `draft_index[i]`. With `in_graph`, kinds
    without work of the host are drawn by graphs.
    """
    kinds: dict[Kind, list[int]] = {}
    for i, entry in enumerate(entries):
        if kind := kind_of(entry.seq.request.sampling, entry.end - entry.num_drafts - len(entry.seq.request.token_ids)):
            kinds.setdefault(kind, []).append(i)
    return [_for_kind(kind, indices, entries, logits_start, draft_index, in_graph) for kind, indices in kinds.items()]


def graph_rows(kind: Kind, num_rows: int, num_seqs: int) -> SamplingMetadata[Array]:
    """Return metadata with room for the rows of a graph."""
    ones = np.ones(num_rows, np.float32)
    zeros = np.zeros(num_rows, np.int32)
    metadata: SamplingMetadata[Array] = SamplingMetadata(kind, zeros, ones, zeros, in_graph=True)
    if kind.filters:
        metadata.filters = Filters(ones, ones, ones, kind.filters)
    if kind.penalised:
        uncounted = np.full(num_seqs, -1, np.int32)
        metadata.drawn = zeros
        metadata.penalties = Penalties(ones, ones, ones, zeros, zeros, zeros, uncounted, [])
    return metadata


def _for_kind(
    kind: Kind,
    indices: list[int],
    entries: list[ScheduledSequence],
    logits_start: Ints,
    draft_index: Ints,
    in_graph: bool,
) -> SamplingMetadata[Array]:
    """Return the logit rows of `entries[i]` for the `indices` i, and the work for them."""
    in_graph = in_graph and not kind.by_host
    entries = [entries[i] for i in indices]
    params = [entry.seq.request.sampling for entry in entries]
    counts = [entry.num_drafts + 1 for entry in entries]
    offsets = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    rows = np.repeat(logits_start[indices], counts) + offsets

    def column(values: Iterable[float], dtype: type = np.float32) -> Array:
        """Return one value of each sequence, repeated for each of its rows."""
        return np.repeat(np.array([*values], dtype=dtype), counts)

    # A row draws the token after it: the anchor's row draws the next one.
    states = [
        noise_key(each.seed).repeat(count) if in_graph else noise_states(each.seed, entry.end - count + 1, count)
        for each, entry, count in zip(params, entries, counts, strict=True)
    ]
    metadata: SamplingMetadata[Array] = SamplingMetadata(
        kind,
        rows,
        temperature=column(1.0 if each.is_greedy else each.temperature for each in params),
        state=np.concatenate(states),
        in_graph=in_graph,
    )
    if any(each.is_greedy for each in params) or (in_graph and kind.penalised):
        metadata.drawn = column((not each.is_greedy for each in params), np.int32)
    if kind.filters:
        metadata.filters = Filters(
            top_k=column(each.top_k or np.inf for each in params),
            top_p=column(each.top_p if each.top_p < 1 else np.inf for each in params),
            min_p=column(each.min_p for each in params),
            form=kind.filters,
        )
    starts = accumulate(counts, initial=0)
    biases = [bias for entry, start in zip(entries, starts, strict=False) for bias in _biases(entry, start)]
    if biases:
        bias_rows, tokens, values = zip(*biases, strict=True)
        metadata.additions = LogitBias(*map(np.array, (bias_rows, tokens, values), (np.int32, np.int32, np.float32)))
    if kind.penalised:
        seqs = [entry.seq for entry in entries]
        counted_in = np.full(len(logits_start), -1, dtype=np.int32)
        counted_in[indices] = [seq.batch_slot for seq in seqs]
        metadata.penalties = Penalties(
            presence=column(each.presence_penalty for each in params),
            frequency=column(each.frequency_penalty for each in params),
            repetition=column(each.repetition_penalty for each in params),
            batch_slot=column((seq.batch_slot for seq in seqs), np.int32),
            num_before=offsets,
            draft_index=np.repeat(draft_index[indices], counts),
            counted_in=counted_in,
            counted=[CountedTokens(seq.key, seq.batch_slot, len(seq.request.token_ids), seq.token_ids) for seq in seqs],
        )
    return metadata


def _biases(entry: ScheduledSequence, start: int) -> Iterator[tuple[int, int, float]]:
    """Yield (row, token, bias) for the rows of a sequence, the first of which is `start`."""
    request = entry.seq.request
    num_emitted = entry.end - entry.num_drafts - len(request.token_ids)
    for offset in range(entry.num_drafts + 1):
        yield from ((start + offset, token, bias) for token, bias in request.sampling.logit_bias)
        if num_emitted + offset < request.sampling.min_tokens:
            yield from ((start + offset, token, -np.inf) for token in request.stop_token_ids)
