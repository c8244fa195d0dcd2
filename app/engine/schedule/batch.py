"""Rows of one step and their results. The scheduler makes a Batch, and `step/inputs.py` turns it into arrays."""

from dataclasses import dataclass, field

from app.engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Share of a sequence in a step: target rows [start, start + count) of its tokens.

    A decoding sequence has start = n - 1 and count = its width: the anchor, and `num_drafts` = count - 1 drafts. A
    prefilling one has a chunk of its own tokens. With `needs_logits` the rows reach the last token, so the step yields
    the next one.

    While the previous step is in flight, `prev_row` is the sequence's row in its result, else -1. The true start is
    then between `start` (no draft accepted) and `start + max_accepted`.

    A recurrent state is read from the sequence's slot and written to `next_slot`, or to the same one if that is 0. A
    prefill chunk (`is_prefill`) saves the state after its last row and, if `split` > 0, the state after `split` tokens
    in the sequence's `split_slot`. Other rows leave the state before their first one.
    """

    seq: Sequence
    start: int
    count: int
    needs_logits: bool
    num_drafts: int = 0
    prev_row: int = -1
    max_accepted: int = 0
    next_slot: int = 0
    is_prefill: bool = False
    split: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    def resolve_start(self) -> bool:
        """Take the true start once the previous step is committed.

        Return False if these rows no longer count, because their sequence has ended or is recomputed.
        """
        if self.prev_row < 0:
            return self.seq.batch_slot >= 0
        self.start, self.prev_row, self.max_accepted = self.seq.num_computed, -1, 0
        return self.seq.batch_slot >= 0 and self.seq.is_decoding


@dataclass(slots=True)
class Batch:
    """Shares of one step: decoding sequences first, then prefill chunks, each in order of arrival.

    All draft blocks have `block_rows` rows, the anchor included. `begun` are the requests that are admitted with this
    step, in which their first rows run.
    """

    decodes: list[ScheduledSequence] = field(default_factory=list)
    prefills: list[ScheduledSequence] = field(default_factory=list)
    block_rows: int = 1
    begun: list[str] = field(default_factory=list)

    @property
    def shares(self) -> list[ScheduledSequence]:
        return self.decodes + self.prefills

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """Return the shares that yield tokens, in the order of `StepResult`."""
        return [share for share in self.shares if share.needs_logits]

    @property
    def kind(self) -> str:
        if self.decodes and self.prefills:
            return "mixed"
        return "decode" if self.decodes else "prefill"

    @property
    def num_drafting(self) -> int:
        """Return the number of sequences that verify drafts."""
        return sum(share.num_drafts > 0 for share in self.decodes)

    @property
    def num_drafts(self) -> int:
        return sum(share.num_drafts for share in self.decodes)

    @property
    def has_live_rows(self) -> bool:
        return any(share.seq.batch_slot >= 0 for share in self.shares)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


@dataclass(slots=True)
class StepResult:
    """Result of a step, one entry for each share of `Batch.sampling`.

    `tokens[i]` are the target's own choices after each row. The first `num_accepted[i]` equal the drafts, and the next
    is the bonus. Later entries have no meaning, except that NOT_FINITE tells of logits that are not finite.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
