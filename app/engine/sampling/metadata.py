"""The rows of a step that need more than argmax, as a record of arrays on the host and of tensors on the device."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

from app.engine.arrays import A, R, with_arrays

SHORTLIST = 128
"""Best tokens of a row that are looked at first, because most filters keep no others."""


class CountedTokens(NamedTuple):
    """Tokens of a sequence with penalties. `key` tells it from other sequences that had its batch slot."""

    key: tuple[str, int]
    batch_slot: int
    num_prompt_tokens: int
    token_ids: Sequence[int]


@dataclass(slots=True)
class LogitBias(Generic[A]):
    """Values [M] fp32 that are added to the logits of `rows` [M], ascending, and `tokens` [M]."""

    host_rows: list[int]
    rows: A
    tokens: A
    values: A


@dataclass(slots=True)
class Filters(Generic[A]):
    """Filters of N rows, fp32 [N]. `top_k` and `top_p` inf and `min_p` 0 keep all tokens.

    `short` is true if every top-k is at most SHORTLIST, so the SHORTLIST best tokens hold all that any row keeps.
    """

    top_k: A
    top_p: A
    min_p: A
    short: bool = False


@dataclass(slots=True)
class Penalties(Generic[A]):
    """Penalties of N rows: `presence`, `frequency` and `repetition` fp32 [N].

    A row comes after the first `place` [N] drafts of its sequence, which are in row `draft_index` [N] of the step's.
    `batch_slot` [N] is the sequence's row in `counts`. On the device `drafts` [N, columns] are there unless the step
    has none, and `counts` of `counted`: [batch slots, V] int32, how often each token is in the answer, and
    [batch slots, V] bool, true for tokens of the prompt.
    """

    presence: A
    frequency: A
    repetition: A
    batch_slot: A
    place: A
    draft_index: A
    counted: list[CountedTokens]
    drafts: A | None = None
    counts: tuple[A, A] | None = None


@dataclass(slots=True)
class SamplingMetadata(Generic[A]):
    """N logit rows that need the same kinds of work: their numbers `rows` [N], and `host_rows` ascending.

    `temperature` [N] fp32 is 1 for greedy rows, and `state` [N] seeds the noise. `drawn` [N] is 0 for greedy rows, and
    None if there are none. `additions` count these N rows from 0. A field is None if no row needs it. Integers are
    int32.
    """

    host_rows: list[int]
    rows: A
    temperature: A
    state: A
    drawn: A | None = None
    filters: Filters[A] | None = None
    additions: LogitBias[A] | None = None
    penalties: Penalties[A] | None = None

    def within(self, start: int, stop: int) -> "SamplingMetadata[A] | None":
        """Return the part for logit rows [start, stop), counted from `start`; None if it is empty."""
        part = _range(self.host_rows, start, stop)
        if part.start == part.stop:
            return None
        if part.stop - part.start == len(self.host_rows) and not start:
            return self
        own = _numbered(part_of(replace(self, additions=None), part), self.host_rows[part], start)
        if added := self.additions:
            among = _range(added.host_rows, part.start, part.stop)
            own.additions = _numbered(part_of(added, among), added.host_rows[among], part.start)
        return own


def part_of(record: R, part: Any) -> R:
    """Return a part of the rows of a record, by a slice or an index."""
    return with_arrays(record, lambda _, column: column[part])


def _range(host_rows: list[int], start: int, stop: int) -> slice:
    return slice(bisect_left(host_rows, start), bisect_left(host_rows, stop))


def _numbered(record: Any, host_rows: list[int], start: int) -> Any:
    """Return a record of `host_rows` that counts them from `start`."""
    return replace(record, host_rows=[row - start for row in host_rows], rows=record.rows - start)
