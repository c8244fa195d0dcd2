"""The rows of a step that need more than argmax, as a record of arrays on the host and of tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from app.engine.arrays import A, R, with_arrays
from app.messages import SamplingParams

SHORTLIST = 128
"""Best tokens of a row that are looked at first, because most filters keep no others."""


class Kind(NamedTuple):
    """Work that rows need in addition to argmax."""

    filters: str  # form of the filters, "" for none
    penalised: bool
    by_host: bool = False  # never in a graph: it may have additions or filters of the "long" form


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
    """Values [M] fp32 that are added to the logits of `rows` [M] at `tokens` [M]."""

    rows: A
    tokens: A
    values: A


@dataclass(slots=True)
class Filters(Generic[A]):
    """Filters of N rows, fp32 [N]."""

    top_k: A  # inf keeps all tokens
    top_p: A  # likewise
    min_p: A  # 0 keeps all tokens
    form: str = "long"
    """In "short" every top-k is at most SHORTLIST, so the SHORTLIST best tokens hold all that any row keeps. In "open"
    every top-k is inf."""


@dataclass(slots=True)
class Penalties(Generic[A]):
    """Penalties of N rows of a step with S sequences."""

    presence: A  # fp32 [N], like the next two
    frequency: A
    repetition: A
    batch_slot: A  # [N], the sequence's row in the counts
    num_before: A  # [N], drafts of the sequence that come before the row
    draft_index: A  # [N], the sequence's row in the step's drafts
    counted_in: A  # [S], the batch slot of each sequence of the step's result, -1 if it is not counted
    counted: list[CountedTokens]
    seen: tuple[A, A, A | None] | None = None
    """On the device: how often each token is in the answer, [batch slots, V] int32; which tokens the prompt has,
    [batch slots, V] bool; and the step's drafts [D, columns], if any."""


@dataclass(slots=True)
class SamplingMetadata(Generic[A]):
    """N logit rows of a step that need the same kind of work. Integers are int32. None where no row needs it."""

    kind: Kind
    rows: A  # [N], numbers of logit rows. In a graph they may be repeated
    temperature: A  # [N] fp32, 1 for greedy rows
    state: A  # [N], seeds the noise. In a graph it is the request's key, and the device mixes positions into it
    drawn: A | None = None  # [N], 0 for greedy rows
    filters: Filters[A] | None = None
    additions: LogitBias[A] | None = None  # its rows are indices of these N
    penalties: Penalties[A] | None = None
    in_graph: bool = False


def part_of(record: R, part: Any) -> R:
    """Return a part of the rows of a record, by a slice or an index."""
    return with_arrays(record, lambda _, column: column[part])
