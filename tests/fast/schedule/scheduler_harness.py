"""Scheduler driven by a scripted model. Every promise of DESIGN.md about a step is checked after each step.

The scripted model replaces target, draft and memory. Its memory records the owner of the token in every slot. So KV
that is missing, stale, overwritten or another sequence's is found in the step that would read it. With prefix caching
it records the salt and all tokens before the token instead. A cache of the test's own, whose keys are these tokens
themselves, knows the expected hits.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from random import Random

from app.engine.dflash.draft_pages import DraftPages, num_draft_pages, window_pages
from app.engine.load.plan import Sizes
from app.engine.models.page_pool import SCRATCH_PAGES, PagePool
from app.engine.schedule.batch import Batch, ScheduledSequence, StepResult
from app.engine.schedule.pace import Pace
from app.engine.schedule.scheduler import Scheduler
from app.engine.sequence import Sequence
from app.messages import Request, TokenDelta

VOCAB = 12
NONSENSE = -7
"""Value past the bonus token in a step's result."""

Accept = Callable[[ScheduledSequence], int]

Place = tuple[str, tuple[int, ...]]
"""Owner of a slot's KV: without a cache (request id, (position, token)), with one (salt, the tokens up to it)."""


@dataclass
class Scripted:
    """Request with its whole text if nothing stops it. `script` is prompt, then answer, then more tokens."""

    request: Request
    script: list[int]
    emitted: list[int]

    @property
    def expected(self) -> tuple[list[int], str]:
        """(the whole answer, why it ends)."""
        start = len(self.request.token_ids)
        answer = self.script[start : start + self.request.max_tokens]
        for index, token in enumerate(answer):
            if token in self.request.stop_token_ids:
                return answer[: index + 1], "stop"
        return answer, "length"


def held(seq: Sequence) -> "array[int]":
    """Return the draft's own pages of a sequence."""
    return seq.draft_pages[seq.first_draft_page :]


def protected(scheduler: Scheduler) -> set[int]:
    """Return the pages that no step may write: those with several owners, and those that the cache can find."""
    owners = Counter(page for seq in scheduler.running for page in seq.pages)
    return {*(page for page, count in owners.items() if count > 1), *scheduler.pool.cached.values()}


def protected_in_draft(scheduler: Scheduler) -> set[int]:
    """Return those of the draft's own pages."""
    assert scheduler.draft_pages
    owners = Counter(page for seq in scheduler.running for page in held(seq))
    return {*(page for page, count in owners.items() if count > 1), *scheduler.draft_pages.pool.cached.values()}


class Harness:
    """A scheduler over a page pool, driven step by step by the scripted model, everything checked after each."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        spare_pages: int = 0,
        block_size: int = 4,
        max_num_seqs: int = 4,
        spare_rows: int = 0,
        max_model_len: int = 32,
        prefix_caching: bool = False,
        draft_window: int = 0,
        pace: Pace | None = None,
    ) -> None:
        """`spare_pages` and `spare_rows` come on top of the least that start-up allows. With a `draft_window` the draft
        has pages of its own, as many as start-up gives it."""
        self.block_size = block_size
        self.page_size = page_size
        self.budget = max_num_seqs * block_size + spare_rows
        one_sequence = -(-(max_model_len + 2 * block_size) // page_size)
        self.pool = PagePool(SCRATCH_PAGES + one_sequence + spare_pages, page_size)
        self.draft_window, draft_pages = draft_window, None
        if draft_window:
            columns = window_pages(draft_window, block_size, page_size)
            sizes = Sizes(block_size, max_model_len, max_num_seqs, self.budget, page_size, window_pages=columns)
            draft_pages = DraftPages(num_draft_pages(sizes), page_size, SCRATCH_PAGES, draft_window)
        self.scheduler = Scheduler(
            self.pool,
            draft_pages=draft_pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=max_model_len,
            block_size=block_size,
            prefix_caching=prefix_caching,
            pace=pace,
        )
        self.prefix_caching = prefix_caching
        self.live: dict[str, Scripted] = {}
        self.done: dict[str, Scripted] = {}
        self.target_kv: dict[int, Place] = {}
        self.draft_kv: dict[int, Place | None] = {}
        self.cached: dict[Place, int] = {}
        """The pages that must be found, by the tokens up to their end."""
        self.num_cached: dict[str, int] = {}
        """Tokens that were found for a request when it was first admitted."""
        self.pages_found = 0
        self.pages_evicted = 0
        self.waits = 0
        self._num_queried = 0
        self.flushed_under: set[str] = set()
        self._count = 0

    # Actions of a user

    def add(
        self,
        prompt: int,
        max_tokens: int,
        *,
        stop: Collection[int] = (),
        speculate: bool | int = True,
        seed: int = 0,
        begins: Collection[int] = (),
        salt: str = "",
    ) -> str:
        """A request of `prompt` tokens, the first of which are those of `begins`; returns its id."""
        request_id = f"r{self._count}"
        self._count += 1
        random = Random(f"{seed} {request_id}")
        script = [*begins, *(random.randrange(VOCAB) for _ in range(prompt + max_tokens + self.block_size))]
        request = Request(
            request_id,
            tuple(script[:prompt]),
            max_tokens,
            stop_token_ids=frozenset(stop),
            speculate=speculate,
            cache_salt=salt,
        )
        self.live[request_id] = Scripted(request, script, [])
        self.scheduler.add(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.scheduler.abort(request_id)
        self.check_between_steps()

    def flush(self) -> None:
        self.scheduler.flush_cache()
        self.cached.clear()
        self.flushed_under = {seq.request.request_id for seq in self.scheduler.running}
        self.check_between_steps()

    def step(self, accept: Accept = lambda rows: rows.num_drafts) -> tuple[Batch, dict[str, TokenDelta]]:
        """One step, in which `accept` says how many drafts of a decoding sequence the target agrees with."""
        before = {seq.request.request_id: (seq.num_tokens, seq.num_computed) for seq in self.sequences}
        owned = {seq.key: seq.pages[:] for seq in self.sequences}
        batch = self.scheduler.schedule()
        self.follow_pages(owned)
        self.check_batch(batch)
        self.write_draft_blocks(batch)
        result = StepResult([], [])
        for entry in batch.entries:
            self.run_rows(entry, accept(entry) if entry.num_drafts else 0, result)
        full = {entry.seq.request.request_id: entry.start // self.page_size for entry in batch.entries}
        owned = {entry.seq.request.request_id: entry.seq.pages[:] for entry in batch.entries}
        deltas = self.scheduler.commit(batch, result)
        for entry in batch.entries:
            request_id = entry.seq.request.request_id
            self.cache_full_pages(entry.seq, full[request_id], owned[request_id])
        self.check_deltas(batch, before, deltas)
        self.check_between_steps()
        return batch, {delta.request_id: delta for delta in deltas}

    def drain(self, accept: Accept = lambda rows: rows.num_drafts) -> None:
        """Steps until nothing is left to do; every step brings the oldest request further, so this ends."""
        while self.scheduler.has_work:
            self.step(accept)
        assert not self.live, "requests were forgotten"
        assert self.pool.num_used == 0

    # The model and its memory

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def sequence(self, request_id: str) -> Sequence:
        return next(seq for seq in self.sequences if seq.request.request_id == request_id)

    def slot(self, seq: Sequence, position: int) -> int:
        page = seq.pages[position // self.page_size]
        return page * self.page_size + position % self.page_size

    def draft_slot(self, seq: Sequence, position: int) -> int:
        if not self.draft_window:
            return self.slot(seq, position)
        page, in_page = divmod(position, self.page_size)
        assert page >= seq.first_draft_page
        return seq.draft_pages[page] * self.page_size + in_page

    def place(self, request: Request, tokens: list[int]) -> Place:
        """Return the key of the last of these tokens of a sequence, which has all tokens from its first."""
        if self.prefix_caching:
            return request.cache_salt, tuple(tokens)
        return request.request_id, (len(tokens) - 1, tokens[-1])

    def write_draft_blocks(self, batch: Batch) -> None:
        """The draft writes the whole block of each anchor, past what is verified; it reads all the context before."""
        written: set[int] = set()
        for rows in batch.decodes:
            if not rows.num_drafts:
                continue
            self.check_draft_memory(rows.seq, rows.start)
            for position in range(rows.start, rows.start + self.block_size):
                slot = self.draft_slot(rows.seq, position)
                assert slot not in written, f"two draft rows write slot {slot}"
                written.add(slot)
                self.draft_kv[slot] = None
        if self.draft_window:
            assert not {slot // self.page_size for slot in written} & protected_in_draft(self.scheduler)
        else:
            self.check_own(written)

    def run_rows(self, rows: ScheduledSequence, accepted: int, result: StepResult) -> None:
        """Target rows and the context KV of the same rows; then what the target says after those that sample."""
        seq = rows.seq
        assert 0 <= accepted <= rows.num_drafts
        self.check_memory(self.target_kv, seq, rows.start)
        self.check_draft_memory(seq, rows.start)
        script = self.live[seq.request.request_id].script
        tokens = script[rows.start : rows.end]
        first_draft = rows.count - rows.num_drafts
        tokens[first_draft + accepted :] = [(t + 1) % VOCAB for t in tokens[first_draft + accepted :]]
        for row, position in enumerate(range(rows.start, rows.end)):
            place = self.place(seq.request, seq.token_ids[: rows.start] + tokens[: row + 1])
            self.target_kv[self.slot(seq, position)] = self.draft_kv[self.draft_slot(seq, position)] = place
        if rows.needs_logits:
            n = rows.end - rows.num_drafts
            said = script[n : n + accepted + 1]
            result.tokens.append(said + [NONSENSE] * (self.block_size - len(said)))
            result.num_accepted.append(accepted)

    # The cache, once more

    def prefixes(self, seq: Sequence) -> Iterator[Place]:
        """Return the key of each page that a hit may cover, which excludes the page of the last token."""
        for end in range(self.page_size, seq.num_tokens, self.page_size):
            yield self.place(seq.request, seq.token_ids[:end])

    def found(self, seq: Sequence) -> list[int]:
        pages = []
        for place in self.prefixes(seq):
            if place not in self.cached:
                break
            pages.append(self.cached[place])
        return pages

    def follow_pages(self, owned: dict[tuple[str, int, int], "array[int]"]) -> None:
        """Check after a schedule that new pages are not cached, and that new sequences share the pages that they had to
        find. So does one that was preempted and came back at once."""
        hits: dict[str, list[int]] = {}
        for seq in self.scheduler.running:
            request_id = seq.request.request_id
            before = owned.get(seq.key, array("i"))
            if not before:
                hits[request_id] = seq.pages[: seq.num_computed // self.page_size].tolist()
            assert before == seq.pages[: len(before)], "pages that are owned change places"
            taken = set(seq.pages[len(before) + len(hits.get(request_id, [])) :])
            self.pages_evicted += len(taken & set(self.cached.values()))
            self.cached = {place: page for place, page in self.cached.items() if page not in taken}
        for request_id, pages in hits.items():
            seq = self.sequence(request_id)
            assert self.found(seq) == pages
            assert seq.num_computed == len(pages) * self.page_size <= seq.num_tokens - 1
            self.pages_found += len(pages)
            if request_id not in self.num_cached:
                self.num_cached[request_id] = seq.num_computed
                self._num_queried += len(seq.request.token_ids)
        self.flushed_under &= {seq.request.request_id for seq in self.scheduler.running}

    def cache_full_pages(self, seq: Sequence, first: int, pages: "array[int]") -> None:
        """After a commit; `first` is the first page that was not full before it."""
        request_id = seq.request.request_id
        if not self.prefix_caching or request_id in self.flushed_under:
            return
        for page in range(first, seq.num_computed // self.page_size):
            place = self.place(seq.request, seq.token_ids[: (page + 1) * self.page_size])
            self.cached.setdefault(place, pages[page])

    def is_being_filled(self, seq: Sequence) -> bool:
        """Return True if a running sequence fills the next page that `seq` could find, by the end of this step."""
        left = list(self.prefixes(seq))[len(self.found(seq)) :]
        return bool(left) and any(
            other.num_computed < len(left[0][1]) <= other.num_tokens
            and other.request.request_id not in self.flushed_under
            and self.place(other.request, other.token_ids[: len(left[0][1])]) == left[0]
            for other in self.scheduler.running
        )

    # Checks

    def check_memory(self, kv: dict[int, Place] | dict[int, Place | None], seq: Sequence, num_tokens: int) -> None:
        """The slots of the first `num_tokens` tokens hold just these tokens, in this order, of this sequence."""
        for position in range(num_tokens):
            expected = self.place(seq.request, seq.token_ids[: position + 1])
            assert kv.get(self.slot(seq, position)) == expected

    def check_draft_memory(self, seq: Sequence, num_tokens: int) -> None:
        """So does the draft's: that of all tokens, or of those in its window that have been computed or found."""
        first = seq.first_draft_page * self.page_size if self.draft_window else 0
        assert first <= max(0, num_tokens - self.draft_window, seq.num_reused)
        for position in range(first, num_tokens):
            expected = self.place(seq.request, seq.token_ids[: position + 1])
            assert self.draft_kv.get(self.draft_slot(seq, position)) == expected

    def check_own(self, slots: set[int]) -> None:
        pages = {slot // self.page_size for slot in slots}
        assert not pages & {*self.cached.values(), *protected(self.scheduler)}, "a shared or cached page is written"

    def check_batch(self, batch: Batch) -> None:
        scheduler = self.scheduler
        assert batch, "there is work and nothing runs"
        assert sum(entry.count for entry in batch.entries) <= self.budget
        assert len(scheduler.running) <= scheduler.max_num_seqs
        self.scheduler.check()

        in_batch = [entry.seq for entry in batch.entries]
        assert len(set(map(id, in_batch))) == len(in_batch), "a sequence runs twice"
        assert {id(seq) for seq in in_batch} <= {id(seq) for seq in scheduler.running}
        assert scheduler.running[0] in in_batch, "the oldest does not get on"
        for part in (batch.decodes, batch.prefills):
            arrivals = [rows.seq.arrival for rows in part]
            assert arrivals == sorted(arrivals)

        decoding = [seq for seq in scheduler.running if seq.is_decoding and seq not in [r.seq for r in batch.prefills]]
        assert decoding == [rows.seq for rows in batch.decodes], "a decoding sequence was passed over"
        for rows in batch.decodes:
            seq = rows.seq
            width = min(seq.request.max_drafts + 1, self.block_size, seq.num_remaining)
            assert rows == ScheduledSequence(seq, seq.num_tokens - 1, width, needs_logits=True, num_drafts=width - 1)
        for rows in batch.prefills:
            assert rows.count >= 1 and rows.num_drafts == 0
            assert rows.start == rows.seq.num_computed and rows.end <= rows.seq.num_tokens
            assert rows.needs_logits == (rows.end == rows.seq.num_tokens)

        left = self.budget - sum(entry.count for entry in batch.entries)
        if scheduler.pace:
            left = min(left, scheduler.pace.bound - sum(entry.count for entry in batch.prefills))
            assert left >= 0, "more rows than the pace allows"
        if left:  # no waiting sequence could have run
            assert len(in_batch) == len(scheduler.running)
            assert all(rows.needs_logits for rows in batch.prefills)
            if scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
                self.check_waits(scheduler.waiting[0])
        else:  # only the last chunk is cut short
            assert all(rows.needs_logits for rows in batch.prefills[:-1])

        written: set[int] = set()
        for entry in batch.entries:
            for position in range(entry.start, entry.end):
                slot = self.slot(entry.seq, position)
                assert slot not in written, f"two target rows write slot {slot}"
                written.add(slot)
        self.check_own(written)

    def check_waits(self, seq: Sequence) -> None:
        """Check that it waits for free pages besides one for each running sequence, or for a page of this step."""
        owned = {page for other in self.scheduler.running for page in other.pages}
        tokens = seq.num_tokens + self.block_size - 1
        wanted = self.pool.pages_for(tokens) - len(owned.intersection(self.found(seq)))
        being_filled = self.is_being_filled(seq)
        self.waits += being_filled
        assert being_filled or wanted + len(self.scheduler.running) > self.pool.num_free

    def check_deltas(self, batch: Batch, before: dict[str, tuple[int, int]], deltas: list[TokenDelta]) -> None:
        assert [d.request_id for d in deltas] == [
            entry.seq.request.request_id for entry in batch.entries if entry.needs_logits
        ]
        for delta in deltas:
            scripted = self.live[delta.request_id]
            scripted.emitted += delta.token_ids
            answer, reason = scripted.expected
            assert delta.token_ids, "a step of a sampling sequence yields a token at least"
            assert scripted.emitted == answer[: len(scripted.emitted)], "not what the model said"
            assert (delta.finish_reason is not None) == (len(scripted.emitted) == len(answer))
            assert delta.finish_reason in (None, reason)
            assert 0 <= delta.steps[0].n_accepted <= delta.steps[0].n_verified <= max(0, self.block_size - 1)
            assert len(delta.token_ids) - delta.steps[0].n_accepted in (
                (0, 1) if delta.finish_reason == "stop" else (1,)
            )
            assert delta.cached_tokens == self.num_cached[delta.request_id]
            if delta.finish_reason:
                assert delta.steps[0].n_verified <= len(delta.token_ids), "drafts behind the end are counted"
                self.done[delta.request_id] = self.live.pop(delta.request_id)
        for entry in batch.entries:
            n, computed = before[entry.seq.request.request_id]
            assert entry.seq.num_computed > computed or entry.seq.num_tokens > n
        assert self.scheduler.prefix_cache_hits == sum(self.num_cached.values())
        assert self.scheduler.prefix_cache_queries == (self._num_queried if self.prefix_caching else 0)

    def check_between_steps(self) -> None:
        scheduler = self.scheduler
        assert {seq.request.request_id for seq in self.sequences} == set(self.live)
        assert len(self.sequences) == len(self.live)
        self.scheduler.check()
        for seq in scheduler.running:
            self.check_memory(self.target_kv, seq, seq.num_computed)
            self.check_draft_memory(seq, seq.num_computed)
        for seq in self.sequences:
            scripted = self.live[seq.request.request_id]
            assert seq.token_ids == [*scripted.request.token_ids, *scripted.emitted], "tokens were lost"
        assert set(self.pool.cached.values()) == set(self.cached.values()), "not what must be found"
        if not scheduler.has_work:
            assert self.pool.num_used == 0
