"""Who runs in the next step, with how many rows, and what became of the last one."""

from array import array
from collections import deque

from app.engine.batch import Batch, Delta, FinishReason, Rows, StepResult
from app.engine.kv_cache import OutOfPages, PagePool
from app.engine.sequence import Request, Sequence


class Scheduler:
    """First come, first served, under one budget of target rows a step.

    Decoding sequences are served first, so `max_num_batched_tokens >= max_num_seqs * block_size` lets all of them
    verify a whole block; prefill chunks take the rest. When pages run out, the newest sequence is preempted: it
    gives its pages back and is recomputed later from its tokens, so nothing is lost. The caller guarantees that one
    sequence of `max_model_len` plus two blocks fits the pool; the oldest sequence therefore always makes progress.

    `running` is in order of arrival, and everything in it is older than everything in `waiting`. A step is committed
    before the next one is scheduled, and nothing is aborted in between.
    """

    def __init__(
        self, pool: PagePool, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_seats = list(reversed(range(max_num_seqs)))
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Raises ValueError for a request that could never run; whoever takes requests checks this at the door."""
        total = len(request.token_ids) + request.max_tokens
        if not request.token_ids or request.max_tokens < 1 or total > self.max_model_len:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.token_ids)} tokens and max_tokens "
                f"{request.max_tokens} must each be at least 1 and together at most {self.max_model_len}"
            )
        self.waiting.append(Sequence(request, arrival=self._arrivals))
        self._arrivals += 1

    def abort(self, request_id: str) -> None:
        """Forget the request and free its pages; an unknown id is one that has just finished."""
        for seq in self.running:
            if seq.request.request_id == request_id:
                self._leave(seq)
                return
        self.waiting = deque(seq for seq in self.waiting if seq.request.request_id != request_id)

    def schedule(self) -> Batch:
        """The rows of the next step; empty when there is nothing to do."""
        batch = Batch()
        budget = self.max_num_batched_tokens
        for seq in self._decoding_with_pages():
            width = self._width(seq)
            batch.decodes.append(Rows(seq, seq.num_computed, width, samples=True, num_drafts=width - 1))
            budget -= width
        for seq in self.running:
            if not seq.is_decoding and budget > 0:
                batch.prefills.append(self._chunk(seq, budget))
                budget -= batch.prefills[-1].count
        while budget > 0 and self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self._may_admit(seq):
                break
            self.running.append(self.waiting.popleft())
            seq.seat = self._free_seats.pop()
            batch.prefills.append(self._chunk(seq, budget))
            budget -= batch.prefills[-1].count
        return batch

    def commit(self, batch: Batch, result: StepResult) -> list[Delta]:
        """Take the step's tokens into the sequences. Whoever stops leaves at once and frees its pages."""
        for rows in batch.prefills:
            rows.seq.num_computed = rows.end
        deltas = []
        for rows, tokens, num_accepted in zip(batch.sampling, result.tokens, result.num_accepted, strict=True):
            delta = self._accept(rows, tokens, num_accepted)
            deltas.append(delta)
            if delta.finish_reason:
                self._leave(rows.seq)
        return deltas

    def _accept(self, rows: Rows, tokens: list[int], num_accepted: int) -> Delta:
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
        seq.token_ids.extend(emitted)
        seq.num_computed = seq.num_tokens - 1
        return Delta(request.request_id, emitted, num_verified, num_accepted, finish_reason)

    def _width(self, seq: Sequence) -> int:
        """How many rows the target verifies: never more than the request may still emit."""
        return min(self.block_size, seq.num_remaining) if seq.request.speculate else 1

    def _chunk(self, seq: Sequence, budget: int) -> Rows:
        count = min(seq.num_tokens - seq.num_computed, budget)
        return Rows(seq, seq.num_computed, count, samples=seq.num_computed + count == seq.num_tokens)

    def _decoding_with_pages(self) -> list[Sequence]:
        """Decoding sequences that own pages for this step, taken from the newest sequences if need be."""
        ready: list[Sequence] = []
        for seq in [seq for seq in self.running if seq.is_decoding]:
            if seq.arrival > self.running[-1].arrival:
                break  # preempted for an older one, as is everything behind it
            while not self._grow(seq):
                newest = self.running[-1]
                self._preempt(newest)
                if newest is seq:
                    return ready
            ready.append(seq)
        return ready

    def _may_admit(self, seq: Sequence) -> bool:
        """Own pages for a new sequence, if a page stays free for each running one: else the next growth of an older
        sequence would preempt the newcomer at once."""
        wanted = self.pool.pages_for(seq.num_tokens + self.block_size - 1)
        if self.running and wanted + len(self.running) > self.pool.num_free:
            return False
        return self._grow(seq)

    def _grow(self, seq: Sequence) -> bool:
        """Own pages for the whole draft block too: it is never cut, and its KV lies past the last token."""
        try:
            self.pool.grow(seq.pages, seq.num_tokens + self.block_size - 1)
        except OutOfPages:
            return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.num_computed = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free_seats.append(seq.seat)
        seq.seat = -1
        self.pool.release(seq.pages)
        seq.pages = array("i")
