"""Rows of one step and their results. The scheduler makes a Batch, and `step/inputs.py` turns it into arrays."""

from dataclasses import dataclass, field

from app.engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """An entry of a batch: target rows [start, start + count) of a sequence.

    A decoding sequence has start = n - 1 and count = its width: the anchor and its drafts. A prefilling one has a chunk
    of its tokens.
    """

    seq: Sequence
    start: int
    """A lower bound while the previous step is in flight, as if that accepted no draft. `commit` corrects it."""
    count: int
    needs_logits: bool
    """The rows reach the last token, so the step yields the next one."""
    num_drafts: int = 0
    prev_row: int = -1
    """The sequence's row in the result of the previous step if that is in flight, else -1."""
    max_accepted: int = 0
    """Drafts that the step in flight may accept. The true start is up to so many tokens later."""
    next_slot: int = 0
    """Slot that the recurrent state is written to, or 0 for the one it is read from. A chunk writes the state after its
    last row, a decoding sequence the state before its first one."""
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
    """Entries of one step: decoding sequences first, then prefill chunks, each in order of arrival."""

    decodes: list[ScheduledSequence] = field(default_factory=list)
    prefills: list[ScheduledSequence] = field(default_factory=list)
    block_rows: int = 1  # of every draft block, the anchor included
    begun: list[str] = field(default_factory=list)  # ids of requests that are admitted with this step

    @property
    def entries(self) -> list[ScheduledSequence]:
        return self.decodes + self.prefills

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The entries that yield tokens, in the order of `StepResult`."""
        return [entry for entry in self.entries if entry.needs_logits]

    @property
    def kind(self) -> str:
        if self.decodes and self.prefills:
            return "mixed"
        return "decode" if self.decodes else "prefill"

    @property
    def num_drafting(self) -> int:
        """The number of sequences that verify drafts."""
        return sum(entry.num_drafts > 0 for entry in self.decodes)

    @property
    def num_drafts(self) -> int:
        return sum(entry.num_drafts for entry in self.decodes)

    @property
    def has_live_rows(self) -> bool:
        return any(entry.is_live for entry in self.entries)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


@dataclass(slots=True)
class StepResult:
    """Result of a step, in the order of `Batch.sampling`.

    `tokens[i]` are the target's own choices after each row. The first `num_accepted[i]` equal the drafts, and the next
    is the bonus. Later tokens have no meaning, except that NOT_FINITE marks logits that are not finite.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
