"""Whatever requests come, however many drafts are accepted and however small the pool: DESIGN.md's invariants hold.

A scripted model stands in for target, draft and memory. Its memory remembers for every slot whose token was written
there, so KV that is missing, stale, overwritten or someone else's is seen in the step that would read it.
"""

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from app.engine.batch import Batch, Delta, Rows, StepResult
from app.engine.kv_cache import SCRATCH_PAGES, OutOfPages, PagePool
from app.engine.scheduler import Scheduler
from app.engine.sequence import Request, Sequence

VOCAB = 12
NONSENSE = -7
"""What a step's result holds past the bonus token."""

Accept = Callable[[Rows], int]


@dataclass
class Scripted:
    """A request and all it would say with nobody to stop it: `script` is prompt, then answer, then some more."""

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
    ) -> None:
        """`spare_pages` and `spare_rows` come on top of the least that start-up allows."""
        self.block_size = block_size
        self.page_size = page_size
        self.budget = max_num_seqs * block_size + spare_rows
        one_sequence = -(-(max_model_len + 2 * block_size) // page_size)
        self.pool = PagePool(SCRATCH_PAGES + one_sequence + spare_pages, page_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=max_model_len,
            block_size=block_size,
        )
        self.live: dict[str, Scripted] = {}
        self.done: dict[str, Scripted] = {}
        self.target_kv: dict[int, tuple[str, int, int]] = {}
        self.draft_kv: dict[int, tuple[str, int, int]] = {}
        self._count = 0

    # What a user does

    def add(
        self, prompt: int, max_tokens: int, *, stop: Collection[int] = (), speculate: bool = True, seed: int = 0
    ) -> str:
        """A request of `prompt` tokens; returns its id."""
        request_id = f"r{self._count}"
        self._count += 1
        random = Random(f"{seed} {request_id}")
        script = [random.randrange(VOCAB) for _ in range(prompt + max_tokens + self.block_size)]
        request = Request(
            request_id, tuple(script[:prompt]), max_tokens, stop_token_ids=frozenset(stop), speculate=speculate
        )
        self.live[request_id] = Scripted(request, script, [])
        self.scheduler.add(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.scheduler.abort(request_id)
        self.check_between_steps()

    def step(self, accept: Accept = lambda rows: rows.num_drafts) -> tuple[Batch, dict[str, Delta]]:
        """One step, in which `accept` says how many drafts of a decoding sequence the target agrees with."""
        before = {seq.request.request_id: (seq.num_tokens, seq.num_computed) for seq in self.sequences}
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        self.write_draft_blocks(batch)
        result = StepResult([], [])
        for rows in batch.rows:
            self.run_rows(rows, accept(rows) if rows.num_drafts else 0, result)
        deltas = self.scheduler.commit(batch, result)
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

    def write_draft_blocks(self, batch: Batch) -> None:
        """The draft writes the whole block of each anchor, past what is verified; it reads all the context before."""
        written: set[int] = set()
        for rows in batch.decodes:
            if not rows.num_drafts:
                continue
            self.check_memory(self.draft_kv, rows.seq, rows.start)
            for position in range(rows.start, rows.start + self.block_size):
                slot = self.slot(rows.seq, position)
                assert slot not in written, f"two draft rows write slot {slot}"
                written.add(slot)
                self.draft_kv[slot] = (rows.seq.request.request_id, position, NONSENSE)

    def run_rows(self, rows: Rows, accepted: int, result: StepResult) -> None:
        """Target rows and the context KV of the same rows; then what the target says after those that sample."""
        seq = rows.seq
        request_id = seq.request.request_id
        assert 0 <= accepted <= rows.num_drafts
        self.check_memory(self.target_kv, seq, rows.start)
        script = self.live[request_id].script
        tokens = script[rows.start : rows.end]
        first_draft = rows.count - rows.num_drafts
        tokens[first_draft + accepted :] = [(t + 1) % VOCAB for t in tokens[first_draft + accepted :]]
        for position, token in zip(range(rows.start, rows.end), tokens, strict=True):
            entry = (request_id, position, token)
            self.target_kv[self.slot(seq, position)] = self.draft_kv[self.slot(seq, position)] = entry
        if rows.samples:
            n = rows.end - rows.num_drafts
            said = script[n : n + accepted + 1]
            result.tokens.append(said + [NONSENSE] * (self.block_size - len(said)))
            result.num_accepted.append(accepted)

    # What must hold

    def check_memory(self, kv: dict[int, tuple[str, int, int]], seq: Sequence, num_tokens: int) -> None:
        """The slots of the first `num_tokens` tokens hold just these tokens, in this order, of this sequence."""
        for position in range(num_tokens):
            expected = (seq.request.request_id, position, seq.token_ids[position])
            assert kv.get(self.slot(seq, position)) == expected

    def check_batch(self, batch: Batch) -> None:
        scheduler = self.scheduler
        assert batch, "there is work and nothing runs"
        assert sum(rows.count for rows in batch.rows) <= self.budget
        assert len(scheduler.running) <= scheduler.max_num_seqs
        self.check_pages()

        in_batch = [rows.seq for rows in batch.rows]
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
            width = min(self.block_size, seq.num_remaining) if seq.request.speculate else 1
            assert rows == Rows(seq, seq.num_tokens - 1, width, samples=True, num_drafts=width - 1)
        for rows in batch.prefills:
            assert rows.count >= 1 and rows.num_drafts == 0
            assert rows.start == rows.seq.num_computed and rows.end <= rows.seq.num_tokens
            assert rows.samples == (rows.end == rows.seq.num_tokens)

        left = self.budget - sum(rows.count for rows in batch.rows)
        if left:  # nobody waits who could have run
            assert len(in_batch) == len(scheduler.running)
            assert all(rows.samples for rows in batch.prefills)
            if scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
                tokens = scheduler.waiting[0].num_tokens + self.block_size - 1
                assert self.pool.pages_for(tokens) + len(scheduler.running) > self.pool.num_free
        else:  # what is cut short is the last chunk alone
            assert all(rows.samples for rows in batch.prefills[:-1])

        written: set[int] = set()
        for rows in batch.rows:
            for position in range(rows.start, rows.end):
                slot = self.slot(rows.seq, position)
                assert slot not in written, f"two target rows write slot {slot}"
                written.add(slot)

    def check_deltas(self, batch: Batch, before: dict[str, tuple[int, int]], deltas: list[Delta]) -> None:
        assert [d.request_id for d in deltas] == [rows.seq.request.request_id for rows in batch.rows if rows.samples]
        for delta in deltas:
            scripted = self.live[delta.request_id]
            scripted.emitted += delta.token_ids
            answer, reason = scripted.expected
            assert delta.token_ids, "a step of a sampling sequence yields a token at least"
            assert scripted.emitted == answer[: len(scripted.emitted)], "not what the model said"
            assert (delta.finish_reason is not None) == (len(scripted.emitted) == len(answer))
            assert delta.finish_reason in (None, reason)
            assert 0 <= delta.num_accepted <= delta.num_verified <= max(0, self.block_size - 1)
            assert len(delta.token_ids) - delta.num_accepted in ((0, 1) if delta.finish_reason == "stop" else (1,))
            if delta.finish_reason:
                assert delta.num_verified <= len(delta.token_ids), "drafts behind the end are counted"
                self.done[delta.request_id] = self.live.pop(delta.request_id)
        for rows in batch.rows:
            n, computed = before[rows.seq.request.request_id]
            assert rows.seq.num_computed > computed or rows.seq.num_tokens > n

    def check_between_steps(self) -> None:
        scheduler = self.scheduler
        assert {seq.request.request_id for seq in self.sequences} == set(self.live)
        assert len(self.sequences) == len(self.live)
        arrivals = [seq.arrival for seq in self.sequences]
        assert arrivals == sorted(arrivals), "who came first is not served first"
        self.check_pages()
        for seq in scheduler.running:
            assert seq.num_computed <= seq.num_tokens - 1
            assert seq.is_decoding == (seq.num_computed == seq.num_tokens - 1)
            self.check_memory(self.target_kv, seq, seq.num_computed)
            self.check_memory(self.draft_kv, seq, seq.num_computed)
        for seq in scheduler.waiting:
            assert not seq.pages and seq.num_computed == 0
        for seq in self.sequences:
            scripted = self.live[seq.request.request_id]
            assert seq.token_ids == [*scripted.request.token_ids, *scripted.emitted], "tokens were lost"
        if not scheduler.has_work:
            assert self.pool.num_used == 0

    def check_pages(self) -> None:
        """Every page but the scratch ones is free or owned, by one sequence, once."""
        owned = [page for seq in self.sequences for page in seq.pages]
        free = array("i")
        self.pool.grow(free, self.pool.num_free * self.page_size)
        self.pool.release(free[::-1])  # so that they are free in the same order as before
        assert sorted([*owned, *free]) == list(range(SCRATCH_PAGES, self.pool.num_pages))
        assert self.pool.num_used == len(owned)


# Who runs


def test_prompts_are_taken_in_chunks_within_the_budget_and_in_order_of_arrival():
    harness = Harness(max_num_seqs=3, block_size=4, spare_pages=40)  # 12 rows a step
    first, second, third = harness.add(10, 4), harness.add(5, 4), harness.add(3, 4)
    chunks = [[(rows.seq.request.request_id, rows.count) for rows in harness.step()[0].prefills] for _ in range(2)]
    assert chunks == [[(first, 10), (second, 2)], [(second, 3), (third, 3)]]


def test_decoding_sequences_are_served_first_and_prefill_takes_the_rest():
    harness = Harness(max_num_seqs=3, block_size=4, spare_pages=40)
    harness.add(2, 20), harness.add(2, 20, speculate=False)
    harness.step()
    harness.add(30, 2)
    batch, _ = harness.step()
    assert [rows.count for rows in batch.decodes] == [4, 1]
    assert [(rows.count, rows.samples) for rows in batch.prefills] == [(12 - 4 - 1, False)]
    assert batch.kind == "mixed"


def test_the_first_token_comes_from_the_last_chunk_and_drafting_starts_in_the_next_step():
    harness = Harness(max_num_seqs=1, block_size=4)  # 4 rows a step
    request = harness.add(7, 8)
    assert harness.step()[1] == {}
    batch, deltas = harness.step()
    assert batch.kind == "prefill"
    assert (len(deltas[request].token_ids), deltas[request].num_verified) == (1, 0)
    batch, deltas = harness.step()
    assert batch.kind == "decode"
    assert (len(deltas[request].token_ids), deltas[request].num_verified, deltas[request].num_accepted) == (4, 3, 3)


def test_a_chunk_that_leaves_only_the_last_token_leaves_an_anchor_to_draft_from():
    harness = Harness(max_num_seqs=2, block_size=4, spare_pages=40)  # 8 rows a step
    request = harness.add(9, 8)
    assert harness.step()[1] == {}
    assert harness.sequence(request).is_decoding
    batch, deltas = harness.step()
    assert batch.kind == "decode" and len(deltas[request].token_ids) == 4
    harness.drain()


def test_no_more_sequences_run_than_allowed():
    harness = Harness(max_num_seqs=2, spare_rows=50, spare_pages=50)
    for _ in range(3):
        harness.add(2, 3)
    assert len(harness.step()[0].rows) == 2
    assert (len(harness.scheduler.running), len(harness.scheduler.waiting)) == (2, 1)
    harness.drain()


def test_admission_stops_when_pages_run_out_and_nobody_overtakes():
    harness = Harness(page_size=4, block_size=4, max_model_len=32, max_num_seqs=4, spare_rows=80)  # 10 pages
    harness.add(24, 2), harness.add(24, 2), harness.add(1, 2)  # 7 pages, 7 pages, 1 page
    batch, _ = harness.step()
    assert [rows.seq.arrival for rows in batch.rows] == [0]
    assert harness.pool.num_free == 3
    assert [seq.arrival for seq in harness.scheduler.waiting] == [1, 2]
    harness.drain()


def test_when_pages_run_out_the_newest_is_preempted_and_nothing_of_it_is_lost():
    harness = Harness(page_size=1, block_size=4, max_model_len=16, max_num_seqs=2, spare_rows=30)  # 24 pages
    old, new = harness.add(6, 10), harness.add(6, 10)  # 9 pages each at first, 19 each in the end
    harness.step()
    while not harness.scheduler.num_preemptions:
        harness.step(lambda rows: 0)
    preempted = harness.sequence(new)
    assert list(harness.scheduler.waiting) == [preempted] and harness.scheduler.running == [harness.sequence(old)]
    assert (preempted.num_computed, len(preempted.pages)) == (0, 0)
    assert preempted.num_tokens > 7, "it had emitted more than its first token"
    harness.drain()
    assert harness.done[new].emitted == harness.done[new].expected[0]
    assert harness.scheduler.num_preemptions == 1, "the old one was let finish"


def test_a_preempted_sequence_is_back_before_any_that_came_later():
    harness = Harness(page_size=1, block_size=4, max_model_len=16, max_num_seqs=2, spare_rows=30)
    harness.add(6, 10), harness.add(6, 10), harness.add(1, 1)
    while not harness.scheduler.num_preemptions:
        harness.step(lambda rows: 0)
    assert [seq.arrival for seq in harness.scheduler.waiting] == [1, 2]
    harness.drain()


def test_the_widest_block_fits_at_the_context_limit_in_the_smallest_pool():
    for page_size in (1, 3, 4, 16):
        harness = Harness(page_size=page_size, block_size=6, max_model_len=20, max_num_seqs=1)
        for prompt in (1, 7, 19):
            harness.add(prompt, 20 - prompt)
        harness.drain(lambda rows: 0)


# How wide


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_step_never_verifies_more_than_may_still_be_emitted(max_tokens):
    harness = Harness(block_size=4, max_num_seqs=1)
    request = harness.add(2, max_tokens)
    widths = []
    while harness.scheduler.has_work:
        remaining = harness.sequence(request).num_remaining
        batch, _ = harness.step(lambda rows: 1 if rows.num_drafts else 0)
        widths += [rows.count for rows in batch.decodes]
        assert all(rows.count <= remaining for rows in batch.decodes)
    assert max(widths, default=1) == min(4, max(1, max_tokens - 1))


def test_a_request_that_wants_no_speculation_and_a_target_alone_run_one_row():
    plain, alone = Harness(block_size=4), Harness(block_size=1)
    plain.add(3, 6, speculate=False), alone.add(3, 6)
    for harness in (plain, alone):
        harness.step()
        while harness.scheduler.has_work:
            batch, deltas = harness.step()
            assert [(rows.count, rows.num_drafts) for rows in batch.decodes] == [(1, 0)]
            assert [(len(d.token_ids), d.num_verified, d.num_accepted) for d in deltas.values()] == [(1, 0, 0)]


# When it ends


class OneDecodeStep:
    """A decoding request (2 tokens of prompt and one more known) and what the target says next."""

    def __init__(self, *, max_tokens: int = 20, stop: Collection[int] = (), block_size: int = 4) -> None:
        self.scheduler = Scheduler(
            PagePool(100, 1), max_num_seqs=1, max_num_batched_tokens=8, max_model_len=40, block_size=block_size
        )
        self.scheduler.add(Request("r", (1, 2), max_tokens, stop_token_ids=frozenset(stop)))
        self.first = self._commit([3], 0)

    def says(self, tokens: list[int], accepted: int) -> Delta:
        return self._commit(tokens, accepted)

    def _commit(self, tokens: list[int], accepted: int) -> Delta:
        (delta,) = self.scheduler.commit(self.scheduler.schedule(), StepResult([tokens], [accepted]))
        return delta


@pytest.mark.parametrize(
    ("says", "accepted", "expected"),
    [
        ([10, 11, 12, 13], 3, Delta("r", [10, 11, 12, 13], 3, 3, None)),
        ([10, 11, 12, 13], 1, Delta("r", [10, 11], 3, 1, None)),
        ([10, 11, 12, 13], 0, Delta("r", [10], 3, 0, None)),
        ([9, 11, 12, 13], 3, Delta("r", [9], 1, 1, "stop")),
        ([10, 9, 12, 13], 3, Delta("r", [10, 9], 2, 2, "stop")),
        ([10, 11, 9, 13], 3, Delta("r", [10, 11, 9], 3, 3, "stop")),
        ([10, 11, 12, 9], 3, Delta("r", [10, 11, 12, 9], 3, 3, "stop")),  # the bonus after a whole block
        ([10, 9, 12, 13], 1, Delta("r", [10, 9], 2, 1, "stop")),  # the bonus after a draft that was refused
        ([9, 11, 12, 13], 0, Delta("r", [9], 1, 0, "stop")),
        ([10, 11, 9, 13], 1, Delta("r", [10, 11], 3, 1, None)),  # a stop token that was not accepted
        ([8, 9, 12, 13], 3, Delta("r", [8], 1, 1, "stop")),  # two stops: the first counts
    ],
)
def test_nothing_behind_a_stop_token_is_emitted_or_counted(says, accepted, expected):
    decode = OneDecodeStep(stop={9, 8})
    assert decode.says(says, accepted) == expected
    assert decode.scheduler.has_work == (expected.finish_reason is None)
    if expected.finish_reason:
        assert decode.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    ("max_tokens", "says", "accepted", "expected"),
    [
        (2, [10], 0, Delta("r", [10], 0, 0, "length")),
        (4, [10, 11, 12], 2, Delta("r", [10, 11, 12], 2, 2, "length")),
        (4, [10, 11, 12], 1, Delta("r", [10, 11], 2, 1, None)),
        (5, [10, 11, 12, 13], 3, Delta("r", [10, 11, 12, 13], 3, 3, "length")),
        (6, [10, 11, 12, 13], 3, Delta("r", [10, 11, 12, 13], 3, 3, None)),
        (5, [10, 11, 12, 9], 3, Delta("r", [10, 11, 12, 9], 3, 3, "stop")),  # both at once
    ],
)
def test_max_tokens_ends_the_text_exactly(max_tokens, says, accepted, expected):
    assert OneDecodeStep(max_tokens=max_tokens, stop={9}).says(says, accepted) == expected


def test_the_first_token_can_be_the_last():
    assert OneDecodeStep(max_tokens=1).first == Delta("r", [3], 0, 0, "length")
    stopped = OneDecodeStep(stop={3})
    assert stopped.first == Delta("r", [3], 0, 0, "stop")
    assert not stopped.scheduler.has_work and stopped.scheduler.pool.num_used == 0


def test_a_stop_token_in_the_prompt_ends_nothing():
    harness = Harness()
    request = harness.add(6, 5)
    prompt, answer = harness.live[request].script[:6], harness.live[request].expected[0]
    stop = {token for token in prompt if token not in answer}
    assert stop
    harness.abort(request)
    other = Harness()
    other.add(6, 5, stop=stop)
    other.drain()
    assert other.done["r0"].emitted == answer


# Aborts


def test_abort_frees_everything_in_every_phase():
    harness = Harness(page_size=1, block_size=4, max_model_len=24, max_num_seqs=2, spare_pages=4)  # 8 rows a step
    decoding, prefilling, waiting = harness.add(3, 12), harness.add(20, 2), harness.add(3, 2)
    harness.step()
    harness.step()
    assert harness.sequence(decoding).is_decoding
    assert 0 < harness.sequence(prefilling).num_computed < 19
    assert harness.sequence(waiting) in harness.scheduler.waiting
    for request_id in (waiting, prefilling, decoding):
        used = harness.pool.num_used
        owned = len(harness.sequence(request_id).pages)
        harness.abort(request_id)
        assert harness.pool.num_used == used - owned
    assert not harness.scheduler.has_work


def test_abort_of_a_preempted_request_leaves_the_others_as_they_are():
    harness = Harness(page_size=1, block_size=4, max_model_len=16, max_num_seqs=2, spare_rows=30)
    old, new = harness.add(6, 10), harness.add(6, 10)
    while not harness.scheduler.num_preemptions:
        harness.step(lambda rows: 0)
    harness.abort(new)
    harness.drain()
    assert set(harness.done) == {old}


def test_abort_of_an_unknown_or_finished_request_does_nothing():
    harness = Harness()
    harness.add(3, 1)
    harness.step()
    harness.abort("r0")
    other = harness.add(3, 4)
    harness.abort("never seen")
    harness.drain()
    assert set(harness.done) == {"r0", other}


# At the door


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 4), (4, 0), (29, 4), (33, 1)])
def test_a_request_that_could_never_run_is_refused_with_the_limit(prompt, max_tokens):
    harness = Harness(max_model_len=32)
    with pytest.raises(ValueError, match=rf"{prompt} tokens and max_tokens {max_tokens} .* at most 32"):
        harness.scheduler.add(Request("r", (1,) * prompt, max_tokens))
    assert not harness.scheduler.has_work


# Pages


def test_growing_takes_all_pages_or_none():
    pool = PagePool(SCRATCH_PAGES + 5, page_size=4)
    mine = array("i")
    pool.grow(mine, 9)
    assert len(mine) == 3 and pool.num_used == 3
    kept = mine[:]
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 free"):
        pool.grow(mine, 21)
    assert mine == kept and pool.num_free == 2
    pool.grow(mine, 12)
    assert mine == kept, "12 tokens fit three pages"
    pool.grow(mine, 1)
    assert mine == kept, "pages are not given back by asking for less"
    pool.grow(mine, 20)
    assert mine[:3] == kept and pool.num_free == 0


def test_free_pages_are_reused_least_recently_used_first_and_scratch_never():
    pool = PagePool(SCRATCH_PAGES + 4, page_size=2)
    first, second, again = array("i"), array("i"), array("i")
    pool.grow(first, 4)
    pool.grow(second, 2)
    pool.release(second)
    pool.release(first)
    pool.grow(again, 8)
    assert sorted(again[2:]) == sorted(first), "what was given back last is taken last"
    assert again[1] == second[0]
    assert sorted(again) == list(range(SCRATCH_PAGES, SCRATCH_PAGES + 4))


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_rounds_up(tokens, pages):
    assert PagePool(10, page_size=16).pages_for(tokens) == pages


# Anything goes


class AnyTraffic(RuleBasedStateMachine):
    """Requests of every kind come, are cut short, and decode with any luck, over any sizes start-up allows."""

    requests = Bundle("requests")

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        spare_pages=st.integers(0, 12),
        block_size=st.integers(1, 6),
        max_num_seqs=st.integers(1, 5),
        spare_rows=st.integers(0, 24),
        max_model_len=st.integers(2, 40),
    )
    def start(self, **sizes: int) -> None:
        self.harness = Harness(**sizes)

    @rule(
        target=requests,
        prompt=st.integers(1, 40),
        max_tokens=st.integers(1, 40),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        speculate=st.booleans(),
        count=st.integers(1, 3),
    )
    def add(self, prompt: int, max_tokens: int, stop: set[int], speculate: bool, count: int) -> object:
        room = self.harness.scheduler.max_model_len
        prompt = min(prompt, room - 1)
        max_tokens = min(max_tokens, room - prompt)
        return multiple(*(self.harness.add(prompt, max_tokens, stop=stop, speculate=speculate) for _ in range(count)))

    @rule(request_id=requests)
    def abort(self, request_id: str) -> None:
        self.harness.abort(request_id)

    @rule(luck=st.lists(st.integers(0, 5), min_size=1, max_size=4), count=st.integers(1, 6))
    def step(self, luck: list[int], count: int) -> None:
        for _ in range(count):
            if self.harness.scheduler.has_work:
                self.harness.step(lambda rows: min(luck[rows.seq.arrival % len(luck)], rows.num_drafts))

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain(lambda rows: rows.seq.arrival % (rows.num_drafts + 1))


TestInvariantsHoldUnderAnyTraffic = AnyTraffic.TestCase
TestInvariantsHoldUnderAnyTraffic.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
TestInvariantsHoldUnderAnyTraffic.pytestmark = pytest.mark.timeout(900)  # a failure is made small for minutes
