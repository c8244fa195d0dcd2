"""The rows of a step that need more than argmax, as a record of arrays on the host and of tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from app.engine.arrays import A, R, with_arrays
from app.messages import SamplingParams

SHORTLIST = 128
"""Best tokens of a row that are looked at first, because most filters keep no others."""


class Kind(NamedTuple):
    """Work that rows need in addition to argmax: filters of a form, "" for none, and penalties. Rows `by_host`, which
    may have additions or a "long" form, are in no graph."""

    filters: str
    penalised: bool
    by_host: bool = False


GRAPH_KINDS = [Kind(filters, penalised) for filters in ("", "short", "open") for penalised in (False, True)]


def kind_of(asked: SamplingParams, num_emitted: int) -> Kind | None:
    """Return the work for the token after `num_emitted` ones, or None if argmax is enough."""
    form = (
        "" if not asked.is_filtered else "open" if not asked.top_k else "short" if asked.top_k <= SHORTLIST else "long"
    )
    by_host = form == "long" or bool(asked.logit_bias) or num_emitted < asked.min_tokens
    is_argmax = asked.is_greedy and not (asked.is_penalised or by_host)
    return None if is_argmax else Kind(form, asked.is_penalised, by_host)


class CountedTokens(NamedTuple):
    """Tokens of a sequence with penalties. `key` tells it from others that had its batch slot, and from itself
    before it was recomputed."""

    key: tuple[str, int, int]
    batch_slot: int
    num_prompt_tokens: int
    token_ids: Sequence[int]


@dataclass(slots=True)
class LogitBias(Generic[A]):
    """Values [M] fp32 that are added to the logits of `rows` [M] and `tokens` [M]."""

    rows: A
    tokens: A
    values: A


@dataclass(slots=True)
class Filters(Generic[A]):
    """Filters of N rows, fp32 [N]. `top_k` and `top_p` inf and `min_p` 0 keep all tokens.

    In the `form` "short" every top-k is at most SHORTLIST, so the SHORTLIST best tokens hold all that any row keeps. In
    "open" every top-k is inf.
    """

    top_k: A
    top_p: A
    min_p: A
    form: str = "long"


@dataclass(slots=True)
class Penalties(Generic[A]):
    """Penalties of N rows: `presence`, `frequency` and `repetition` fp32 [N].

    A row comes after the first `place` [N] drafts of its sequence, which are in row `draft_index` [N] of the step's.
    `batch_slot` [N] is the sequence's row in counts. `counted_in` [S] is that of each sequence of the step's result, -1
    if it is not counted. On the device `seen` has counts of `counted`: [batch slots, V] int32, how often each token is
    in the answer, and [batch slots, V] bool, true for tokens of the prompt; and the step's drafts [D, columns] or None.
    """

    presence: A
    frequency: A
    repetition: A
    batch_slot: A
    place: A
    draft_index: A
    counted_in: A
    counted: list[CountedTokens]
    seen: tuple[A, A, A | None] | None = None


@dataclass(slots=True)
class SamplingMetadata(Generic[A]):
    """The logit rows `rows` [N] of a step that need the same kind of work.

    `temperature` [N] fp32 is 1 for greedy rows, and `state` [N] seeds the noise. In a graph it is the request's key,
    and positions, which are the device's, make a state of it. There `rows` may be repeated. `drawn` [N] is 0 for greedy
    rows, and None if there are none. `additions` count these N rows from 0. A field is None if no row needs it.
    Integers are int32.
    """

    kind: Kind
    rows: A
    temperature: A
    state: A
    drawn: A | None = None
    filters: Filters[A] | None = None
    additions: LogitBias[A] | None = None
    penalties: Penalties[A] | None = None
    in_graph: bool = False


def part_of(record: R, part: Any) -> R:
    """Return a part of the rows of a record, by a slice or an index."""
    return with_arrays(record, lambda _, column: column[part])
