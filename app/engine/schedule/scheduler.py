"""Who runs in the next step, with how many rows, and what became of the last one."""

import logging
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from app.engine.dflash.policy import Policy
from app.engine.schedule.batch import Batch, ScheduledSequence, StepResult
from app.engine.schedule.page_pool import OutOfPages, PagePool
from app.engine.sequence import NOT_FINITE, Sequence
from app.messages import FinishReason, Request, SpecStep, StepStats, TokenDelta

logger = logging.getLogger(__name__)

_MOST_FAULTS_IN_ROW = 3
"""So many sequences may be dropped one after another while nobody gets on; then none of them is to blame."""
_NOT_FINITE = "the model's logits are not finite (NaN or infinity) {} tokens into the answer, so there is no next token"


class Scheduler:
    """First come, first served, under one budget of target rows a step.

    Decoding sequences are served first, so `max_num_batched_tokens >= max_num_seqs * block_size` lets all of them
    verify a whole block; prefill chunks take the rest. When pages run out, the newest sequence is preempted: it
    gives its pages back and is recomputed later from its tokens, so nothing is lost. The caller guarantees that one
    sequence of `max_model_len` plus two blocks fits the pool; the oldest sequence therefore always makes progress.

    With `prefix_caching` a page that a step has filled can be found from its commit on, and a sequence that is admitted
    shares what is found of its tokens, but for the page of its last one: so a row is always run, and no row is ever
    written to a page that is cached or shared. Queries and hits count the prompt tokens of first admissions.

    `running` is in order of arrival, and everything in it is older than everything in `waiting`. A step is committed
    before the next one is scheduled. The step behind it (`overlap`) may be launched before that, and then steps are
    committed one behind. A sequence that ends, aborts or is preempted meanwhile still has rows in the step in flight,
    and `commit` ignores them. Such rows are written past the last token that is known here, so past all cached pages.
    A later step overwrites them, because a device works in order, so the pages may be reused at once. These rows may be
    NaN, so their pages count as not sound.

    A sequence whose logits are not finite ends with an error, and so does one that raises an exception, see `drop`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        prefix_caching: bool = True,
        policy: Policy | None = None,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.policy = policy or Policy(block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_not_finite = 0
        self.num_faults = 0
        self._at: Sequence | None = None
        self.fault: Exception | None = None
        """What was raised last, by a sequence that was dropped, and nobody has got on since."""
        self._faults_in_row = 0
        self._got_on = False
        self.unclean: set[Sequence] = set()
        """Sequences behind whose last token there may be KV that is not finite."""
        self.unread: set[Sequence] = set()
        """Those with rows in a step that will still be in flight when the one before it is committed."""
        self._free_seats = list(reversed(range(max_num_seqs)))
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(
        self, kind: str = "idle", seconds: float = 0.0, *, num_decoding: int = 0, num_drafting: int = 0
    ) -> StepStats:
        """Return the state after a step of this kind."""
        return StepStats(
            kind=kind,
            seconds=seconds,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            used_pages=self.pool.num_used,
            num_pages=self.pool.num_usable,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_decoding=num_decoding,
            num_drafting=num_drafting,
            num_not_finite=self.num_not_finite,
            num_faults=self.num_faults,
        )

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that could never run; whoever takes requests checks this at the door."""
        total = len(request.token_ids) + request.max_tokens
        if not request.token_ids or request.max_tokens < 1 or total > self.max_model_len:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.token_ids)} tokens and max_tokens "
                f"{request.max_tokens} must each be at least 1 and together at most {self.max_model_len}"
            )
        self.waiting.append(Sequence(request, arrival=self._arrivals, cacheable=self.prefix_caching))
        self._arrivals += 1

    def abort(self, request_id: str) -> None:
        """Forget the request and free its pages; an unknown id is one that has just finished."""
        for seq in (*self.running, *self.waiting):
            if seq.request.request_id == request_id:
                self._end(seq)
                return

    def flush_cache(self) -> None:
        """Forget all cached pages. What runs goes on, and caches nothing more of what it had begun."""
        self.pool.flush()
        for seq in self.running:
            seq.cacheable = False

    def drop(self, seq: Sequence, error: Exception) -> TokenDelta:
        """End a sequence that alone raises `error`; its last delta."""
        self.fault = error
        self._faults_in_row += 1
        self.num_faults += 1
        seq.is_sound = False
        self._end(seq)
        logger.error("request %s is dropped", seq.request.request_id, exc_info=error)
        reason = f"the request was dropped because its step failed: {type(error).__name__}: {error}"
        return _delta(seq, [], finish_reason="error", error=reason)

    def end_step(self) -> None:
        """Raises the last sequence's error where one after another was dropped and nobody has got on since."""
        if self._got_on:
            self._got_on, self.fault, self._faults_in_row = False, None, 0
        elif self.fault and self._faults_in_row >= _MOST_FAULTS_IN_ROW:
            raise self.fault

    def schedule(self) -> Batch:
        """The rows of the next step, with nothing in flight; empty when there is nothing to do."""
        self.unread = set()
        left_behind = [slot for seq in self.unclean for slot in self._slots_from(seq, seq.num_computed)]
        self.unclean.clear()
        dropped: list[TokenDelta] = []
        while True:
            try:
                batch = self._schedule()
                break
            except Exception as error:
                if self._at is None:
                    raise
                dropped.append(self.drop(self._at, error))
        batch.dropped = dropped
        batch.scrub = left_behind + self.reused_slots()
        return batch

    def discard_ahead(self) -> None:
        """The continuation failed, or will not be read; but some of it may have been written."""
        self.unclean |= self.unread

    def _schedule(self) -> Batch:
        self._at = None
        batch = Batch()
        budget = self.max_num_batched_tokens
        decoding = self._decoding_with_pages()
        self._at = None
        widths = self.policy.choose([(seq, self.max_drafts(seq)) for seq in decoding])
        batch.least_block = widths.block
        for seq, drafts in zip(decoding, widths.drafts, strict=True):
            batch.decodes.append(
                ScheduledSequence(seq, seq.num_computed, drafts + 1, needs_logits=True, num_drafts=drafts)
            )
            budget -= drafts + 1
        for seq in self.running:
            if not seq.is_decoding and budget > 0:
                self._at = seq
                batch.prefills.append(self._chunk(seq, budget))
                budget -= batch.prefills[-1].count
        while budget > 0 and self.waiting and len(self.running) < self.max_num_seqs:
            self._at = seq = self.waiting[0]
            if not self._may_admit(seq):
                break
            self.running.append(self.waiting.popleft())
            seq.batch_slot = self._free_seats.pop()
            batch.prefills.append(self._chunk(seq, budget))
            budget -= batch.prefills[-1].count
        return batch

    def commit(self, batch: Batch, result: StepResult) -> list[TokenDelta]:
        """Take the step's tokens into the sequences, and the pages it has filled into the cache. Whoever stops leaves
        at once and frees its pages. Of who has left since the step was launched nothing counts."""
        results = zip(result.tokens, result.num_accepted, strict=True)
        deltas: list[TokenDelta] = []
        unclear: list[Sequence] = []
        for rows in batch.rows:
            seq = rows.seq
            tokens, num_accepted = next(results) if rows.needs_logits else ([], 0)
            if not rows.resolve_start():
                continue
            try:
                if not rows.needs_logits:
                    self._take_chunk(rows)
                elif (delta := self._take_tokens(rows, tokens, num_accepted)) is None:
                    unclear.append(seq)
                else:
                    deltas.append(delta)
                    if delta.finish_reason:
                        self._end(seq)
                self._got_on = True
            except Exception as error:
                deltas.append(self.drop(seq, error))
        for seq in unclear:
            if seq.batch_slot < 0:  # another one's start has preempted it
                seq.cacheable = False
            else:
                self._start_over(seq)
        return deltas

    def _take_chunk(self, rows: ScheduledSequence) -> None:
        """No token comes of it yet, and so nothing says whether its KV is finite."""
        rows.seq.num_computed = rows.end
        rows.seq.is_sound = False
        self._publish(rows)

    def _take_tokens(self, rows: ScheduledSequence, tokens: list[int], num_accepted: int) -> TokenDelta | None:
        """None where nothing is to be said of a sequence before it was computed anew."""
        seq = rows.seq
        if NOT_FINITE in tokens:  # drafts that were refused leave KV behind the last token
            self.unclean.add(seq)
        seq.is_sound = seq not in self.unclean
        if NOT_FINITE in tokens[: min(num_accepted + 1, seq.num_remaining)]:
            return self._accept_not_finite(rows, tokens[: tokens.index(NOT_FINITE)])
        delta = self._accept(rows, tokens, num_accepted)
        self._publish(rows)
        return delta

    def _accept_not_finite(self, rows: ScheduledSequence, tokens: list[int]) -> TokenDelta | None:
        """`tokens` are those before the one that cannot be chosen. Nobody may find the sequence's pages any more; if it
        has found some of them itself, then these may be at fault."""
        seq = rows.seq
        self.pool.forget(seq.pages)
        if seq.num_found:
            return None
        delta = self._accept(rows, tokens, len(tokens))
        if not delta.finish_reason:
            self.num_not_finite += 1
            error = _NOT_FINITE.format(seq.num_tokens - len(seq.request.token_ids))
            return replace(delta, finish_reason="error", error=error)
        return delta

    def _accept(self, rows: ScheduledSequence, tokens: list[int], num_accepted: int) -> TokenDelta:
        """Stop conditions hold in token order: nothing behind the first is emitted or counted."""
        seq, request = rows.seq, rows.seq.request
        num_verified = rows.num_drafts
        emitted = tokens[: min(num_accepted + 1, seq.num_remaining)]
        finish_reason: FinishReason | None = "length" if len(emitted) == seq.num_remaining else None
        for index, token in enumerate(emitted):
            if token in request.stop_token_ids:
                emitted, finish_reason = emitted[: index + 1], "stop"
                break
        if finish_reason:
            num_accepted = min(num_accepted, len(emitted))
            num_verified = min(num_verified, len(emitted))
        # What was drafted past a stop is of no more use than what was refused.
        self.policy.record_acceptance(seq, rows.num_drafts, num_accepted)
        seq.token_ids.extend(emitted)
        seq.num_computed = seq.num_tokens - 1
        return _delta(seq, emitted, num_verified, num_accepted, finish_reason)

    def _publish(self, rows: ScheduledSequence) -> None:
        """Pages that end between the rows' start and what is computed now. KV of refused drafts lies past that."""
        seq, page_size = rows.seq, self.pool.page_size
        if seq.cacheable:
            for page in range(rows.start // page_size, seq.num_computed // page_size):
                self.pool.publish(seq.pages[page], seq.digest(page, page_size))

    def _slots_from(self, seq: Sequence, position: int) -> Iterator[int]:
        """The slots of its pages from `position` on."""
        page_size = self.pool.page_size
        for place in range(position, len(seq.pages) * page_size):
            yield seq.pages[place // page_size] * page_size + place % page_size

    def reused_slots(self) -> list[int]:
        """The slots of pages that were taken since this was last asked, and may hold KV that is not finite."""
        page_size = self.pool.page_size
        return [slot for page in self.pool.pages_to_scrub() for slot in range(page * page_size, (page + 1) * page_size)]

    def max_drafts(self, seq: Sequence, in_flight: int = 0) -> int:
        """How many drafts the target may verify: never more rows than the request may still emit, if so many tokens at
        least are in flight."""
        return min(self.block_size, seq.num_remaining - in_flight) - 1 if seq.request.speculate else 0

    def _chunk(self, seq: Sequence, budget: int) -> ScheduledSequence:
        count = min(seq.num_tokens - seq.num_computed, budget)
        return ScheduledSequence(seq, seq.num_computed, count, needs_logits=seq.num_computed + count == seq.num_tokens)

    def _decoding_with_pages(self) -> list[Sequence]:
        """Decoding sequences that own pages for this step, taken from the newest sequences if need be."""
        ready: list[Sequence] = []
        for seq in [seq for seq in self.running if seq.is_decoding]:
            if seq.arrival > self.running[-1].arrival:
                break  # preempted for an older one, as is everything behind it
            self._at = seq
            while not self._grow(seq):
                newest = self.running[-1]
                self._preempt(newest)
                if newest is seq:
                    return ready
            ready.append(seq)
        return ready

    def _may_admit(self, seq: Sequence) -> bool:
        """Own pages for a new sequence, shared ones first, if a page stays free for each running one: else the next
        growth of an older sequence would preempt the newcomer at once. A page that is about to be cached is waited
        for."""
        found = self._find(seq)
        if not self._has_room(seq, found):
            return False
        self.pool.share(found)
        seq.pages = found
        seq.num_computed = seq.num_found = len(found) * self.pool.page_size
        self.pool.grow(seq.pages, self.reach(seq))
        if seq.cacheable and seq.num_cached is None:
            seq.num_cached = seq.num_computed
            self.prefix_cache_queries += seq.num_tokens
            self.prefix_cache_hits += seq.num_cached
        return True

    def admits_next(self) -> bool:
        """Whether the next `schedule` lets somebody in."""
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return False
        return self._has_room(self.waiting[0], self._find(self.waiting[0]))

    def _has_room(self, seq: Sequence, found: "array[int]") -> bool:
        if self._is_being_filled(seq, len(found)):
            return False
        return self.pool.cost(found, self.reach(seq)) + len(self.running) <= self.pool.num_free

    def _find(self, seq: Sequence) -> "array[int]":
        """Cached pages of the sequence's tokens, without the page of the last one."""
        pages = (seq.num_tokens - 1) // self.pool.page_size if seq.cacheable else 0
        return self.pool.find(seq.digest(page, self.pool.page_size) for page in range(pages))

    def _is_being_filled(self, seq: Sequence, page: int) -> bool:
        """Whether a running sequence fills, for itself, the page that `seq` could use next. It does so in the step at
        hand: budget is left for newcomers only when every running sequence gets all the rows it has."""
        page_size = self.pool.page_size
        end = (page + 1) * page_size
        if not seq.cacheable or end >= seq.num_tokens:
            return False
        return any(
            other.num_computed < end <= other.num_tokens
            and other.cacheable
            and other.digest(page, page_size) == seq.digest(page, page_size)
            for other in self.running
        )

    def _grow(self, seq: Sequence) -> bool:
        try:
            self.pool.grow(seq.pages, self.reach(seq))
        except OutOfPages:
            return False
        return True

    def reach(self, seq: Sequence) -> int:
        """How many tokens it owns pages for: the draft block is never cut, and its KV lies past the last token."""
        return seq.num_tokens + self.block_size - 1

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.num_computed = 0
        seq.cacheable = self.prefix_caching
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _start_over(self, seq: Sequence) -> None:
        """Compute all of a running sequence anew, on pages that nobody else has filled."""
        self._give_back(seq)
        seq.num_computed = 0
        seq.cacheable = False
        while not self._grow(seq):
            newest = self.running[-1]
            self._preempt(newest)
            if newest is seq:
                return

    def _end(self, seq: Sequence) -> None:
        self._leave(seq)
        self.policy.forget(seq)

    def _leave(self, seq: Sequence) -> None:
        if seq.batch_slot < 0:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
            self._free_seats.append(seq.batch_slot)
            seq.batch_slot = -1
        self._give_back(seq)

    def _give_back(self, seq: Sequence) -> None:
        known = seq.num_computed // self.pool.page_size if seq in self.unread else len(seq.pages)
        self.pool.release(seq.pages[known:], sound=False)
        self.pool.release(seq.pages[:known], sound=seq.is_sound)
        self.unclean.discard(seq)
        seq.pages = array("i")
        seq.num_found = 0
        seq.is_sound = False


def _delta(
    seq: Sequence,
    token_ids: list[int],
    num_verified: int = 0,
    num_accepted: int = 0,
    finish_reason: FinishReason | None = None,
    error: str | None = None,
) -> TokenDelta:
    """Return what one step yields for a sequence."""
    steps = [SpecStep(len(token_ids), num_verified, num_accepted)]
    return TokenDelta(seq.request.request_id, token_ids, steps, seq.num_cached or 0, finish_reason, error)
