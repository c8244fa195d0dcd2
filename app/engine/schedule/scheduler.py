"""Which sequences run in the next step, with how many rows, and what its result changes."""

import logging
from array import array
from collections import deque
from dataclasses import replace

from app.engine.dflash.draft_pages import DraftPages
from app.engine.models.page_pool import OutOfPages, PagePool
from app.engine.schedule.batch import Batch, ScheduledSequence, StepResult
from app.engine.schedule.cache_events import CacheEvents
from app.engine.schedule.pace import Pace
from app.engine.schedule.policy import Policy
from app.engine.schedule.state_slots import StateSlots
from app.engine.sequence import NOT_FINITE, Sequence
from app.messages import CacheEvent, FinishReason, Request, SpecStep, StepStats, TokenDelta

logger = logging.getLogger(__name__)

_NOT_FINITE = "the model's logits are not finite (NaN or infinity) {} tokens into the answer, so there is no next token"


class Scheduler:
    """First come, first served, under one budget of target rows a step.

    Decoding sequences are served first, so `max_num_batched_tokens >= max_num_seqs * block_size` lets all of them
    verify a whole block; prefill chunks take the rest, or as much of it as `pace` allows. If pages run out, the newest
    sequence is preempted: it frees its pages and is recomputed later from its tokens. The caller guarantees that one
    sequence of `max_model_len` plus two blocks fits the pool, so the oldest sequence always makes progress.

    With `prefix_caching` an admitted sequence shares the cached pages of its tokens, except the page of its last token.
    So at least one row runs, and no row is ever written to a cached or shared page.

    `running` is in order of arrival, and each of its sequences is older than all in `waiting`. Rows in flight of a
    sequence that has ended or was preempted are ignored by `commit`. They lie past all cached pages, and their pages
    may be reused at once, because a device works in order and a later step overwrites them.
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
        pace: Pace | None = None,
        states: StateSlots | None = None,
        draft_pages: DraftPages | None = None,
    ) -> None:
        self.pool = pool
        self.draft_pages = draft_pages
        self.to_scrub = [pool.to_scrub, *([draft_pages.pool.to_scrub] if draft_pages else [])]
        """Slots to be zeroed before the next step: the target's, and the draft's if it has separate pages."""
        self.states = states or StateSlots()
        pool.on_forget = self._on_evicted
        self.events: CacheEvents | None = None
        """Changes of the prefix cache, if something reads them."""
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.policy = policy or Policy(block_size)
        self.pace = pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.in_flight: set[Sequence] = set()
        """Sequences with rows in the step ahead."""
        self.at_hand: Sequence | None = None
        """Sequence that is being scheduled."""
        self.unclean: set[Sequence] = set()
        """Sequences with KV after the last token that may not be finite."""
        self.to_start_over: list[Sequence] = []
        """Sequences whose KV is recomputed once the step is committed."""
        self.has_progress = False
        """True once rows of the step are committed."""
        self.last_fault: Exception | None = None
        """Error of the last dropped sequence, until there is progress."""
        self.num_faults_in_row = 0
        """Sequences that were dropped since there was progress."""
        self.num_preemptions = self.num_not_finite = self.num_faults = 0
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self._free_batch_slots = list(reversed(range(max_num_seqs)))
        self._num_arrivals = 0
        self._dropped: list[TokenDelta] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self, batch: Batch | None = None, seconds: float = 0.0, not_ahead: str = "") -> StepStats:
        """Return the state after the step of a batch, or after none."""
        return StepStats(
            kind=batch.kind if batch else "idle",
            seconds=seconds,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            used_pages=self.pool.num_used,
            num_pages=self.pool.num_usable,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_decoding=len(batch.decodes) if batch else 0,
            num_drafting=batch.num_drafting if batch else 0,
            num_not_finite=self.num_not_finite,
            num_faults=self.num_faults,
            used_state_slots=self.states.num_used,
            num_state_slots=self.states.num_slots,
            used_state_checkpoints=self.states.num_used_checkpoints,
            num_state_checkpoints=self.states.num_checkpoints,
            not_ahead=not_ahead,
        )

    def take_cache_events(self) -> list[CacheEvent]:
        """Return the changes of the prefix cache since the last call, if they are recorded."""
        return [] if self.events is None else self.events.take()

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never run."""
        total = len(request.token_ids) + request.max_tokens
        if not request.token_ids or request.max_tokens < 1 or total > self.max_model_len:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.token_ids)} tokens and max_tokens "
                f"{request.max_tokens} must each be at least 1 and together at most {self.max_model_len}"
            )
        self.waiting.append(Sequence(request, arrival=self._num_arrivals, cacheable=self.prefix_caching))
        self._num_arrivals += 1

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. An unknown id belongs to a request that has just finished."""
        for seq in (*self.running, *self.waiting):
            if seq.request.request_id == request_id:
                self.end(seq)
                return

    def flush_cache(self) -> None:
        """Evict all cached pages. Running sequences go on, but publish no more pages."""
        self.pool.flush()
        self.states.flush()
        if self.draft_pages:
            self.draft_pages.pool.flush()
        if self.events is not None:
            self.events.cleared()
        for seq in self.running:
            seq.cacheable = False

    def check(self) -> None:
        """Assert the invariants of docs/DESIGN.md that hold between two steps, for sequences, pages and states."""
        in_order = [*self.running, *self.waiting]
        arrivals = [seq.arrival for seq in in_order]
        assert arrivals == sorted(arrivals), f"sequences are not in order of arrival: {arrivals}"
        batch_slots = sorted([*self._free_batch_slots, *(seq.batch_slot for seq in self.running)])
        assert batch_slots == list(range(self.max_num_seqs)), f"free batch slots and those in use are {batch_slots}"
        for seq in self.waiting:
            request_id = seq.request.request_id
            is_empty = not (seq.pages or seq.draft_pages or seq.state_slot or seq.next_state_slot or seq.split_slot)
            assert seq.batch_slot < 0 and is_empty, f"{request_id} waits, and owns memory"
            assert seq.num_computed == 0, f"{request_id} waits, and {seq.num_computed} of its tokens count as computed"
        assert self.prefix_caching or not self.pool.cached, "pages are cached, and prefix caching is off"
        self.pool.check(seq.pages for seq in self.running)
        if self.draft_pages:
            self.draft_pages.check(self.running)
        self.states.check(self.running, self.pool.cached)
        for seq in self.running:
            self._check_running(seq)

    def _check_running(self, seq: Sequence) -> None:
        """Assert that a sequence has an anchor, pages for its KV, and no cached or shared page to write."""
        request_id, computed, num_tokens = seq.request.request_id, seq.num_computed, seq.num_tokens
        assert 0 <= computed < num_tokens, f"{request_id} has {num_tokens} tokens, and {computed} count as computed"
        wanted = self.pool.pages_for(computed)
        assert len(seq.pages) >= wanted, f"{request_id} has {len(seq.pages)} pages, and its KV takes {wanted}"
        next_page = computed // self.pool.page_size
        for page in seq.pages[next_page:]:
            assert self.pool.is_writable(page), f"{request_id} would write page {page}, which is cached or shared"
        if self.draft_pages:
            for page in seq.draft_pages[max(next_page, seq.first_draft_page) :]:
                assert self.draft_pages.pool.is_writable(page), (
                    f"{request_id} would write page {page} of the draft, which is cached or shared"
                )

    def schedule(self) -> Batch:
        """Return the rows of the next step, with nothing in flight. It is empty if all that could run are dropped."""
        for seq in self.unclean:
            self.pool.scrub(seq.pages, seq.num_computed)
            if self.draft_pages:
                self.draft_pages.pool.scrub(seq.draft_pages, seq.num_computed)
        self.unclean.clear()
        while True:
            try:
                batch = self._next_batch()
                break
            except Exception as error:
                if self.at_hand is None:
                    raise
                self._dropped.append(self.drop(self.at_hand, error))
        return self.with_draft_pages(batch)

    def with_draft_pages(self, batch: Batch) -> Batch:
        """Return the batch after its rows and whole blocks got the draft's separate pages."""
        if self.draft_pages:
            for entry in batch.entries:
                end = entry.start + entry.max_accepted + max(entry.count, self.block_size)
                self.draft_pages.pool.grow(entry.seq.draft_pages, end)
        return batch

    def take_dropped(self) -> list[TokenDelta]:
        """Return the last deltas of sequences that could not be scheduled, once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _next_batch(self) -> Batch:
        self.in_flight, self.at_hand = set(), None
        decoding = self._decoding_with_pages()
        self.at_hand = None
        widths = self.policy.choose([(seq, self.max_drafts(seq)) for seq in decoding])
        batch = Batch(block_rows=widths.block)
        for seq, drafts in zip(decoding, widths.drafts, strict=True):
            self.states.prepare(seq)
            batch.decodes.append(
                ScheduledSequence(
                    seq,
                    start=seq.num_computed,
                    count=drafts + 1,
                    needs_logits=True,
                    num_drafts=drafts,
                    next_slot=seq.next_state_slot,
                )
            )
        budget = self.max_num_batched_tokens - sum(entry.count for entry in batch.decodes)
        if self.pace:
            budget = min(budget, self.pace.most_rows(beside_streams=bool(decoding)))
        for seq in self.running:
            if not seq.is_decoding and budget > 0:
                self.at_hand = seq
                if self.states.prepare(seq, keep=seq.num_computed > 0):
                    batch.prefills.append(self._chunk(seq, budget))
                    budget -= batch.prefills[-1].count
        while budget > 0 and self.waiting and len(self.running) < self.max_num_seqs:
            self.at_hand = seq = self.waiting[0]
            if not self._may_admit(seq):
                break
            self.running.append(self.waiting.popleft())
            seq.batch_slot = self._free_batch_slots.pop()
            self.states.take(seq, self._digest(seq, seq.num_computed) if seq.num_computed else None)
            batch.prefills.append(self._chunk(seq, budget))
            batch.begun.append(seq.request.request_id)
            budget -= batch.prefills[-1].count
        return batch

    def commit(self, batch: Batch, result: StepResult) -> list[TokenDelta]:
        """Append the step's tokens to their sequences, and cache the pages that it filled."""
        results = zip(result.tokens, result.num_accepted, strict=True)
        deltas = []
        for entry in batch.entries:
            tokens, num_accepted = next(results) if entry.needs_logits else ([], 0)
            if not entry.is_live:
                continue
            entry.start = entry.seq.num_computed  # where the previous step has left it
            try:
                delta = self._commit_entry(entry, tokens, num_accepted)
                self.has_progress = True
            except Exception as error:
                delta = self.drop(entry.seq, error)
            if delta:
                deltas.append(delta)
        for seq in self.to_start_over:
            if seq.batch_slot >= 0:
                self._start_over(seq)
            else:  # another sequence's recomputation has preempted it
                seq.cacheable = False
        self.to_start_over.clear()
        return deltas

    def record_time(self, batch: Batch, seconds: float) -> None:
        """Let the policy and the pace learn the time of a step that did not fail."""
        if batch.decodes:
            shape = len(batch.decodes), batch.num_drafting, batch.block_rows, batch.num_drafts
            self.policy.record_time(*shape, 1000 * seconds, prefilled=bool(batch.prefills))
        if self.pace and batch.prefills:
            self.pace.record(batch, seconds)

    def max_drafts(self, seq: Sequence, num_in_flight: int = 0) -> int:
        """Return how many drafts may be verified: no row is past the tokens that the request may still emit."""
        return int(min(seq.request.max_drafts, self.block_size - 1, seq.num_remaining - num_in_flight - 1))

    def max_length(self, seq: Sequence) -> int:
        """Return how many tokens a sequence owns pages for. KV of a whole block lies past the last token."""
        return seq.num_tokens + self.block_size - 1

    def may_admit_next(self) -> bool:
        """Return True if the next `schedule` may admit a waiting sequence."""
        has_room = bool(self.waiting) and len(self.running) < self.max_num_seqs
        return has_room and self._find(self.waiting[0]) is not None

    def _decoding_with_pages(self) -> list[Sequence]:
        """Return decoding sequences that own pages for this step. The newest ones are preempted if they run out."""
        ready: list[Sequence] = []
        for seq in [seq for seq in self.running if seq.is_decoding]:
            self.at_hand = seq
            # An older sequence may have preempted this one.
            if seq.batch_slot >= 0 and self._grow_or_preempt(seq):
                ready.append(seq)
        return ready

    def _grow_or_preempt(self, seq: Sequence) -> bool:
        """Give pages to a running sequence. Return False if it was itself preempted because it is the newest."""
        while True:
            try:
                self.pool.grow(seq.pages, self.max_length(seq))
                return True
            except OutOfPages:
                self.preempt(newest := self.running[-1])
                if newest is seq:
                    return False

    def _chunk(self, seq: Sequence, budget: int) -> ScheduledSequence:
        """Return the next rows of a prompt, which end where it is cut and may leave a checkpoint after a split too."""
        start, end, split = seq.num_computed, min(seq.num_tokens, seq.num_computed + budget), 0
        if self.states.num_checkpoints and seq.cacheable:
            cut, last = self._next_checkpoints(seq)
            end = min(end, cut)
            split = last if start < last < end and self.states.reserve_split(seq) else 0
        needs_logits = end == seq.num_tokens
        return ScheduledSequence(
            seq, start, end - start, needs_logits, next_slot=seq.next_state_slot, is_prefill=True, split=split
        )

    def _next_checkpoints(self, seq: Sequence) -> tuple[int, int]:
        """Return the multiple of the interval at which a prompt is cut next, and the end of its last full page.

        That is the last one that another sequence of the same tokens could find.
        """
        interval, page_size = self.states.interval, self.pool.page_size
        return (seq.num_computed // interval + 1) * interval, (seq.num_tokens - 1) // page_size * page_size

    def _digest(self, seq: Sequence, end: int) -> bytes:
        """Return the digest of the page of a sequence that ends with its first `end` tokens."""
        return seq.digest(end // self.pool.page_size - 1, self.pool.page_size)

    def _may_admit(self, seq: Sequence) -> bool:
        """Give pages to a new sequence, cached ones first, if there is room for it."""
        if (cached := self._find(seq)) is None:
            return False
        self.pool.share(cached)
        seq.pages = cached
        seq.num_computed = seq.num_reused = len(cached) * self.pool.page_size
        self.pool.grow(seq.pages, self.max_length(seq))
        if self.draft_pages:
            self.draft_pages.begin(seq)
        if seq.cacheable and seq.num_cached is None:
            seq.num_cached = seq.num_computed
            self.prefix_cache_queries += seq.num_tokens
            self.prefix_cache_hits += seq.num_cached
        return True

    def _find(self, seq: Sequence) -> "array[int] | None":
        """Return cached pages of the sequence's tokens but the last, or None if it cannot be admitted yet.

        With a hybrid target they end at a checkpoint. A page has to stay free for each running sequence, or its growth
        would preempt the new one.
        """
        page_size = self.pool.page_size
        pages = (seq.num_tokens - 1) // page_size if seq.cacheable else 0
        cached = self.pool.find(seq.digest(page, page_size) for page in range(pages))
        while self.states.num_slots and cached and seq.digest(len(cached) - 1, page_size) not in self.states:
            cached.pop()
        wanted = self.pool.cost(cached, self.max_length(seq)) + len(self.running)
        if wanted > self.pool.num_free or self._is_being_filled(seq, len(cached)):
            return None
        return cached

    def _is_being_filled(self, seq: Sequence, page: int) -> bool:
        """Return True if a running sequence fills, in this step, the page or checkpoint that `seq` could use next."""
        page_size = self.pool.page_size
        for other in self.running if seq.cacheable else ():
            end = min(self._next_checkpoints(other)) if self.states.num_slots else (page + 1) * page_size
            is_next = other.num_computed < end <= other.num_tokens and page * page_size < end < seq.num_tokens
            if other.cacheable and is_next and self._digest(other, end) == self._digest(seq, end):
                return True
        return False

    def _commit_entry(self, entry: ScheduledSequence, tokens: list[int], num_accepted: int) -> TokenDelta | None:
        """Append the tokens of an entry to its sequence. A prefill chunk before the last yields none."""
        seq, is_finite = entry.seq, NOT_FINITE not in tokens
        if not is_finite:  # also after the last token, where rejected drafts leave KV
            self.unclean.add(seq)
        seq.is_sound = entry.needs_logits and seq not in self.unclean
        if not is_finite and NOT_FINITE in tokens[: min(num_accepted + 1, seq.num_remaining)]:
            return self._end_not_finite(entry, tokens)
        self.states.commit(entry)
        delta = self.accept(entry, tokens, num_accepted) if entry.needs_logits else None
        if delta is None:
            seq.num_computed = entry.end
        self._publish(entry)
        if delta and delta.finish_reason:
            self.end(seq)
        return delta

    def accept(self, entry: ScheduledSequence, tokens: list[int], num_accepted: int) -> TokenDelta:
        """Append tokens up to the first stop, in order. Later tokens are neither emitted nor counted."""
        seq, request = entry.seq, entry.seq.request
        num_verified = entry.num_drafts
        emitted = tokens[: min(num_accepted + 1, seq.num_remaining)]
        finish_reason: FinishReason | None = "length" if len(emitted) == seq.num_remaining else None
        for index, token in enumerate(emitted):
            if token in request.stop_token_ids:
                emitted, finish_reason = emitted[: index + 1], "stop"
                break
        if finish_reason:
            num_accepted = min(num_accepted, len(emitted))
            num_verified = min(num_verified, len(emitted))
        # Drafts past a stop were as useless as rejected ones, so the policy learns of all of them.
        self.policy.record_acceptance(seq, entry.num_drafts, num_accepted)
        seq.token_ids.extend(emitted)
        seq.num_computed = seq.num_tokens - 1
        steps = [SpecStep(len(emitted), num_verified, num_accepted)]
        return TokenDelta(request.request_id, emitted, steps, seq.num_cached or 0, finish_reason)

    def _publish(self, entry: ScheduledSequence) -> None:
        """Cache the pages that end between the entry's start and `num_computed`. Rejected drafts lie past it."""
        seq, page_size = entry.seq, self.pool.page_size
        filled = range(entry.start // page_size, seq.num_computed // page_size)
        if self.draft_pages:
            self.draft_pages.move(seq, filled if seq.cacheable else ())
        if seq.cacheable:
            new = [page for page in filled if self.pool.publish(seq.pages[page], seq.digest(page, page_size))]
            if new and self.events is not None:
                self.events.stored(seq, new, page_size)
            if self.states.num_checkpoints:
                self._publish_states(entry)

    def _on_evicted(self, digest: bytes) -> None:
        self.states.forget(digest)
        if self.events is not None:
            self.events.removed(digest)

    def _publish_states(self, entry: ScheduledSequence) -> None:
        """Make checkpoints of the states that the entry's rows leave after full pages.

        A slot has the state before the rows and their inputs, so it serves for a page that ends among these.
        """
        seq, states, page_size = entry.seq, self.states, self.pool.page_size
        if entry.split and seq.split_slot:
            split = self._digest(seq, entry.split)
            states.publish_split(seq, split if split in self.pool.cached else None)
        end = seq.num_computed // page_size * page_size
        if not end or end < (entry.end if entry.is_prefill else entry.start):
            return
        digest = self._digest(seq, end)
        # The page may have been cached from another sequence, and evicted since: its checkpoint would never be found.
        if digest == seq.replaceable or digest not in self.pool.cached:
            return
        if seq.replaceable:
            states.forget(seq.replaceable)
            seq.replaceable = None
        is_new = states.publish(seq, digest, is_final=seq not in self.in_flight)
        seq.replaceable = digest if is_new and end % states.interval else None

    def preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.num_computed, seq.cacheable = 0, self.prefix_caching
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def end(self, seq: Sequence) -> None:
        self._leave(seq)
        self.policy.forget(seq)

    def drop(self, seq: Sequence, error: Exception) -> TokenDelta:
        """End a sequence that raises `error` without others in its batch, and return its last delta."""
        self.last_fault = error
        self.num_faults += 1
        self.num_faults_in_row += 1
        seq.is_sound = False
        self.end(seq)
        logger.error("request %s is dropped", seq.request.request_id, exc_info=error)
        reason = f"the request was dropped because its step failed: {type(error).__name__}: {error}"
        return TokenDelta(seq.request.request_id, [], [SpecStep(0, 0, 0)], seq.num_cached or 0, "error", reason)

    def _end_not_finite(self, entry: ScheduledSequence, tokens: list[int]) -> TokenDelta | None:
        """End a sequence after the finite ones of `tokens`. If it reused cached pages, recompute it instead."""
        seq, tokens = entry.seq, tokens[: tokens.index(NOT_FINITE)]
        self.forget_pages(seq)
        if seq.num_reused:
            self.to_start_over.append(seq)
            return None
        delta = self.accept(entry, tokens, len(tokens))
        if not delta.finish_reason:
            self.num_not_finite += 1
            error = _NOT_FINITE.format(seq.num_tokens - len(seq.request.token_ids))
            delta = replace(delta, finish_reason="error", error=error)
        self.end(seq)
        return delta

    def _leave(self, seq: Sequence) -> None:
        if seq.batch_slot < 0:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
            self._free_batch_slots.append(seq.batch_slot)
            seq.batch_slot = -1
        self._free_memory(seq)

    def _free_memory(self, seq: Sequence) -> None:
        """Release the slots and pages of a sequence. Pages that a step in flight writes count as not sound."""
        self.states.release(seq)
        known = seq.num_computed // self.pool.page_size if seq in self.in_flight else len(seq.pages)
        self.pool.release(seq.pages[known:], sound=False)
        self.pool.release(seq.pages[:known], sound=seq.is_sound)
        if self.draft_pages:
            self.draft_pages.release(seq, known)
        self.unclean.discard(seq)
        seq.pages, seq.num_reused, seq.is_sound = array("i"), 0, False
        seq.num_ended_runs += 1

    def forget_pages(self, seq: Sequence) -> None:
        """Drop a sequence's pages and checkpoints from the prefix cache: some may hold NaN."""
        self.pool.forget(seq.pages)
        if self.draft_pages:
            self.draft_pages.pool.forget(seq.draft_pages)
        if self.states.num_checkpoints:
            for page in range(min(len(seq.pages), seq.num_tokens // self.pool.page_size)):
                self.states.forget(seq.digest(page, self.pool.page_size))

    def _start_over(self, seq: Sequence) -> None:
        """Recompute a sequence on pages that no other sequence has filled."""
        self._free_memory(seq)
        seq.num_computed, seq.cacheable = 0, False
        self.states.take(seq)
        self._grow_or_preempt(seq)
