"""Rows of one step and their results. The scheduler makes a Batch, and `step/inputs.py` turns it into arrays."""

from dataclasses import dataclass, field

from app.engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Share of a sequence in a step: target rows [start, start + count) of its tokens.

    A decoding sequence has start = n - 1 and count = its width: the anchor, and its drafts. A prefilling one has a
    chunk of its own tokens.
    """

    seq: Sequence
    start: int
    """The least that it may be, if the previous step is in flight: that step accepts no draft. `commit` corrects it."""
    count: int
    needs_logits: bool
    """The rows reach the last token, so the step yields the next one."""
    num_drafts: int = 0
    prev_row: int = -1
    """The sequence's row in the result of the previous step if that is in flight, else -1."""
    max_accepted: int = 0
    """Drafts that the step in flight may accept, by which the true start may be greater."""
    next_slot: int = 0
    """Slot that the recurrent state is written to, or 0 for the one it is read from. A chunk writes the state after its
    last row, other rows that before their first one."""
    is_prefill: bool = False
    split: int = 0
    """Tokens after which a chunk writes the state to the sequence's `split_slot` too, if not 0."""
    run: int = field(init=False)

    def __post_init__(self) -> None:
        self.run = self.seq.num_ended_runs

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_live(self) -> bool:
        """False if these rows no longer count, because their sequence has ended or is recomputed."""
        return self.seq.num_ended_runs == self.run


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
        return any(share.is_live for share in self.shares)

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
