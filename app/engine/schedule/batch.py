"""What one step runs: which rows of which sequences. Built by the scheduler, turned into arrays by `step_inputs`."""

from dataclasses import dataclass, field

from app.engine.sequence import Sequence
from app.messages import TokenDelta


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's share of a step: target rows [start, start + count) of its tokens.

    A decoding sequence has start = n - 1 and count = its width w: row 0 is the anchor, the `num_drafts` = w - 1
    rows after it are drafts. A prefilling one has a chunk of its own tokens. `needs_logits` is true when the rows reach
    the last token, so that the step yields the sequence's next one.

    Behind a step that nobody has read yet, where the sequence has the line `line` of the result, `start` is the least
    that it can be, as if no draft were accepted there; it may be up to `max_accepted` more. `line` is -1 where all
    is known.
    """

    seq: Sequence
    start: int
    count: int
    needs_logits: bool
    num_drafts: int = 0
    line: int = -1
    max_accepted: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    def resolve_start(self) -> bool:
        """Take the true start, now that the step before is committed. False where nothing of these rows counts: their
        sequence has left, or is computed anew."""
        if self.line < 0:
            return self.seq.batch_slot >= 0
        self.start, self.line, self.max_accepted = self.seq.num_computed, -1, 0
        return self.seq.batch_slot >= 0 and self.seq.is_decoding


@dataclass(slots=True)
class Batch:
    """One step. Rows of decoding sequences come first, then prefill chunks, each in order of arrival.

    Slots `scrub` are zeroed before it: they may hold KV that is not finite. `dropped` are the last deltas of sequences
    that nothing could be scheduled for. Draft blocks have `least_block` rows at least.
    """

    decodes: list[ScheduledSequence] = field(default_factory=list)
    prefills: list[ScheduledSequence] = field(default_factory=list)
    scrub: list[int] = field(default_factory=list)
    dropped: list[TokenDelta] = field(default_factory=list)
    least_block: int = 0

    @property
    def rows(self) -> list[ScheduledSequence]:
        return self.decodes + self.prefills

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The shares that yield tokens, in the order in which the step's result lists them."""
        return [rows for rows in self.rows if rows.needs_logits]

    @property
    def kind(self) -> str:
        if self.decodes and self.prefills:
            return "mixed"
        return "decode" if self.decodes else "prefill"

    @property
    def num_drafting(self) -> int:
        """How many sequences verify drafts."""
        return sum(rows.num_drafts > 0 for rows in self.decodes)

    @property
    def block_rows(self) -> int:
        """Rows of each draft block, its anchor included: at least as many as are verified of the widest."""
        return max([self.least_block, *(rows.num_drafts + 1 for rows in self.decodes)])

    @property
    def num_verify_rows(self) -> int:
        return sum(rows.count for rows in self.decodes)

    @property
    def halves(self) -> tuple["Batch", "Batch"]:
        """The rows in two parts, neither of them empty if there are two sequences."""
        middle = (len(self.decodes) + len(self.prefills) + 1) // 2
        chunks = max(0, middle - len(self.decodes))
        first = Batch(self.decodes[:middle], self.prefills[:chunks], least_block=self.least_block)
        return first, Batch(self.decodes[middle:], self.prefills[chunks:], least_block=self.least_block)

    @property
    def live_part(self) -> "Batch":
        """The rows that still count."""
        decodes, prefills = ([rows for rows in some if rows.resolve_start()] for some in (self.decodes, self.prefills))
        return Batch(decodes, prefills, least_block=self.least_block)

    @property
    def has_live_rows(self) -> bool:
        """Whether anybody it is for is still there."""
        return any(rows.seq.batch_slot >= 0 for rows in self.rows)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


@dataclass(slots=True)
class StepResult:
    """What a step's one device-to-host copy says, per sequence of `Batch.sampling`.

    `tokens[i]` is the target's own choice after each row; the first `num_accepted[i]` equal the drafts and one more
    is the bonus. Entries past that are meaningless, but that NOT_FINITE anywhere tells of logits that are not.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
