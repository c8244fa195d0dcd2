"""Whatever requests come, however many drafts are accepted and however small the pool: DESIGN.md's invariants hold.

Most tests have no prefix cache, so every prompt is run whole. test_prefix_cache.py tests the cache.
"""

from array import array
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from app.engine.models.page_pool import SCRATCH_PAGES, OutOfPages, PagePool
from app.engine.schedule.batch import Batch, StepResult
from app.engine.schedule.policy import Policy
from app.engine.schedule.scheduler import Scheduler
from app.engine.sequence import NOT_FINITE
from app.messages import FinishReason, Request, SpecStep, TokenDelta
from tests.fast.schedule.scheduler_harness import VOCAB, Harness

# Running sequences


def test_prompts_are_taken_in_chunks_within_the_budget_and_in_order_of_arrival():
    harness = Harness(max_num_seqs=3, block_size=4, spare_pages=40)  # 12 rows a step
    first, second, third = harness.add(10, 4), harness.add(5, 4), harness.add(3, 4)
    batches = [harness.step()[0] for _ in range(3)]
    chunks = [[(rows.seq.request.request_id, rows.count) for rows in batch.prefills] for batch in batches]
    assert chunks == [[(first, 10), (second, 2)], [(second, 3), (third, 3)], []]
    assert [batch.begun for batch in batches] == [[first, second], [third], []]


def test_decoding_sequences_are_served_first_and_prefill_takes_the_rest():
    harness = Harness(max_num_seqs=3, block_size=4, spare_pages=40)
    harness.add(2, 20), harness.add(2, 20, speculate=False)
    harness.step()
    harness.add(30, 2)
    batch, _ = harness.step()
    assert [rows.count for rows in batch.decodes] == [4, 1]
    assert [(rows.count, rows.needs_logits) for rows in batch.prefills] == [(12 - 4 - 1, False)]
    assert batch.kind == "mixed"


def test_the_first_token_comes_from_the_last_chunk_and_drafting_starts_in_the_next_step():
    harness = Harness(max_num_seqs=1, block_size=4)  # 4 rows a step
    request = harness.add(7, 8)
    assert harness.step()[1] == {}
    batch, deltas = harness.step()
    assert batch.kind == "prefill"
    assert (len(deltas[request].token_ids), deltas[request].steps[0].n_verified) == (1, 0)
    batch, deltas = harness.step()
    assert batch.kind == "decode"
    assert (
        len(deltas[request].token_ids),
        deltas[request].steps[0].n_verified,
        deltas[request].steps[0].n_accepted,
    ) == (4, 3, 3)


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
    assert len(harness.step()[0].entries) == 2
    assert (len(harness.scheduler.running), len(harness.scheduler.waiting)) == (2, 1)
    harness.drain()


def test_admission_stops_when_pages_run_out_and_no_sequence_overtakes():
    harness = Harness(page_size=4, block_size=4, max_model_len=32, max_num_seqs=4, spare_rows=80)  # 10 pages
    harness.add(24, 2), harness.add(24, 2), harness.add(1, 2)  # 7 pages, 7 pages, 1 page
    batch, _ = harness.step()
    assert [entry.seq.arrival for entry in batch.entries] == [0]
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


@pytest.mark.parametrize(("asked", "rows"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4), (True, 4)])
def test_a_request_may_cap_the_drafts_of_a_step(asked, rows):
    harness = Harness(block_size=4)
    harness.add(3, 20, speculate=asked)
    harness.step()
    assert [rows.count for rows in harness.step()[0].decodes] == [rows]


def test_a_request_that_wants_no_speculation_and_a_target_alone_run_one_row():
    plain, alone = Harness(block_size=4), Harness(block_size=1)
    plain.add(3, 6, speculate=False), alone.add(3, 6)
    for harness in (plain, alone):
        harness.step()
        while harness.scheduler.has_work:
            batch, deltas = harness.step()
            assert [(rows.count, rows.num_drafts) for rows in batch.decodes] == [(1, 0)]
            assert [(len(d.token_ids), d.steps[0].n_verified, d.steps[0].n_accepted) for d in deltas.values()] == [
                (1, 0, 0)
            ]


# When it ends


def delta_of(tokens: list[int], verified: int, accepted: int, finish_reason: FinishReason | None) -> TokenDelta:
    """Return one step's result for the request "r"."""
    return TokenDelta("r", tokens, [SpecStep(len(tokens), verified, accepted)], finish_reason=finish_reason)


class OneDecodeStep:
    """A decoding request (2 tokens of prompt and one more known) and what the target says next."""

    def __init__(self, *, max_tokens: int = 20, stop: Collection[int] = (), block_size: int = 4) -> None:
        self.scheduler = Scheduler(
            PagePool(100, 1),
            max_num_seqs=1,
            max_num_batched_tokens=8,
            max_model_len=40,
            block_size=block_size,
        )
        self.scheduler.add(Request("r", (1, 2), max_tokens, stop_token_ids=frozenset(stop)))
        self.first = self._commit([3], 0)

    def says(self, tokens: list[int], accepted: int) -> TokenDelta:
        return self._commit(tokens, accepted)

    def _commit(self, tokens: list[int], accepted: int) -> TokenDelta:
        (delta,) = self.scheduler.commit(self.scheduler.schedule(), StepResult([tokens], [accepted]))
        return delta


@pytest.mark.parametrize(
    ("says", "accepted", "expected"),
    [
        ([10, 11, 12, 13], 3, delta_of([10, 11, 12, 13], 3, 3, None)),
        ([10, 11, 12, 13], 1, delta_of([10, 11], 3, 1, None)),
        ([10, 11, 12, 13], 0, delta_of([10], 3, 0, None)),
        ([9, 11, 12, 13], 3, delta_of([9], 1, 1, "stop")),
        ([10, 9, 12, 13], 3, delta_of([10, 9], 2, 2, "stop")),
        ([10, 11, 9, 13], 3, delta_of([10, 11, 9], 3, 3, "stop")),
        ([10, 11, 12, 9], 3, delta_of([10, 11, 12, 9], 3, 3, "stop")),  # the bonus after a whole block
        ([10, 9, 12, 13], 1, delta_of([10, 9], 2, 1, "stop")),  # the bonus after a draft that was refused
        ([9, 11, 12, 13], 0, delta_of([9], 1, 0, "stop")),
        ([10, 11, 9, 13], 1, delta_of([10, 11], 3, 1, None)),  # a stop token that was not accepted
        ([8, 9, 12, 13], 3, delta_of([8], 1, 1, "stop")),  # two stops: the first counts
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
        (2, [10], 0, delta_of([10], 0, 0, "length")),
        (4, [10, 11, 12], 2, delta_of([10, 11, 12], 2, 2, "length")),
        (4, [10, 11, 12], 1, delta_of([10, 11], 2, 1, None)),
        (5, [10, 11, 12, 13], 3, delta_of([10, 11, 12, 13], 3, 3, "length")),
        (6, [10, 11, 12, 13], 3, delta_of([10, 11, 12, 13], 3, 3, None)),
        (5, [10, 11, 12, 9], 3, delta_of([10, 11, 12, 9], 3, 3, "stop")),  # both at once
    ],
)
def test_max_tokens_ends_the_text_exactly(max_tokens, says, accepted, expected):
    assert OneDecodeStep(max_tokens=max_tokens, stop={9}).says(says, accepted) == expected


def test_the_first_token_can_be_the_last():
    assert OneDecodeStep(max_tokens=1).first == delta_of([3], 0, 0, "length")
    stopped = OneDecodeStep(stop={3})
    assert stopped.first == delta_of([3], 0, 0, "stop")
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


def test_the_policy_forgets_who_is_aborted_while_preempted():
    harness = Harness(page_size=1, block_size=4, max_model_len=16, max_num_seqs=2, spare_rows=30)
    _, new = harness.add(6, 10), harness.add(6, 10)
    while not harness.scheduler.num_preemptions:
        harness.step(lambda rows: 0)
    (seq,) = harness.scheduler.waiting
    forgotten = []

    class Remembering(Policy):
        def forget(self, sequence):
            forgotten.append(sequence)

    harness.scheduler.policy = Remembering(block_size=4)
    harness.abort(new)
    assert forgotten == [seq]


def test_abort_of_an_unknown_or_finished_request_does_nothing():
    harness = Harness()
    harness.add(3, 1)
    harness.step()
    harness.abort("r0")
    other = harness.add(3, 4)
    harness.abort("never seen")
    harness.drain()
    assert set(harness.done) == {"r0", other}


# Faults

BAD = NOT_FINITE


@pytest.mark.parametrize(
    ("says", "accepted", "expected"),
    [
        ([BAD, 11, 12, 13], 0, delta_of([], 3, 0, "error")),
        ([10, 11, BAD, 13], 2, delta_of([10, 11], 3, 2, "error")),
        ([10, 11, 12, BAD], 3, delta_of([10, 11, 12], 3, 3, "error")),
        ([BAD, BAD, BAD, BAD], 0, delta_of([], 3, 0, "error")),
        ([10, 9, BAD, 13], 2, delta_of([10, 9], 2, 2, "stop")),  # it had stopped before
        ([10, 11, BAD, BAD], 1, delta_of([10, 11], 3, 1, None)),  # behind drafts that were refused
    ],
)
def test_a_sequence_ends_in_front_of_the_first_token_that_cannot_be_chosen(says, accepted, expected):
    decode = OneDecodeStep(stop={9})
    found = decode.says(says, accepted)
    assert (found.error is not None) == (expected.finish_reason == "error")
    found = replace(found, error=None)
    assert found == expected
    assert decode.scheduler.num_not_finite == (expected.finish_reason == "error")
    assert decode.scheduler.has_work == (expected.finish_reason is None)


def test_what_refused_drafts_have_left_that_is_not_finite_is_scrubbed_before_the_next_step():
    decode = OneDecodeStep()
    decode.says([10, 11, BAD, BAD], 1)
    (seq,) = decode.scheduler.running
    assert seq.num_computed == 4
    decode.scheduler.schedule()
    scrub = decode.scheduler.pool.to_scrub
    assert scrub == list(seq.pages[4:6]), "slots behind its KV that it had in that step; a page has one"
    scrub.clear()
    decode.scheduler.schedule()
    assert not scrub


def test_pages_of_who_is_not_sound_are_scrubbed_when_they_are_reused_and_not_before():
    pool = PagePool(SCRATCH_PAGES + 4, page_size=2)
    bad, good, again = array("i"), array("i"), array("i")
    pool.grow(bad, 4)
    pool.release(bad, sound=False)
    assert not pool.to_scrub
    pool.grow(good, 6)
    assert sorted(pool.to_scrub) == sorted(slot for page in set(bad) & set(good) for slot in (2 * page, 2 * page + 1))
    pool.to_scrub.clear()
    pool.release(good)
    pool.grow(again, 8)
    left = [page for page in again if page in bad and page not in good]
    assert pool.to_scrub == [slot for page in left for slot in (2 * page, 2 * page + 1)]


def test_a_cached_page_is_trusted_again_once_a_sound_sequence_has_used_it():
    pool = PagePool(SCRATCH_PAGES + 1, page_size=2)
    page = array("i")
    pool.grow(page, 2)
    pool.publish(page[0], b"digest")
    pool.release(page, sound=False)
    found = pool.find([b"digest"])
    pool.share(found)
    pool.release(found)
    again = array("i")
    pool.grow(again, 2)
    assert not pool.to_scrub


def test_who_starts_over_preempts_the_newest_if_it_needs_their_pages():
    harness = Harness(page_size=1, block_size=4, max_model_len=16, max_num_seqs=3, spare_rows=30, prefix_caching=True)
    first = harness.add(8, 8, begins=range(8))
    harness.step(lambda rows: 0)
    second, third = harness.add(8, 8, begins=range(8)), harness.add(1, 6)
    harness.step(lambda rows: 0)
    seq = harness.sequence(second)
    assert seq.num_reused == 7 and len(seq.pages) + harness.pool.num_free - 7 < 12
    harness.pool.forget(seq.pages)
    harness.cached = {place: page for place, page in harness.cached.items() if page not in seq.pages}
    harness.scheduler.to_start_over.append(seq)
    harness.scheduler.commit(Batch(), StepResult([], []))
    harness.flushed_under = {second}
    assert [seq.request.request_id for seq in harness.scheduler.running] == [first, second]
    assert list(harness.scheduler.waiting) == [harness.sequence(third)]
    assert not set(seq.pages) & set(harness.sequence(first).pages)
    harness.drain(lambda rows: 0)
    assert harness.done[second].emitted == harness.done[second].expected[0]


def test_who_is_preempted_by_anothers_start_does_not_start_over_itself(monkeypatch):
    """It would get pages while it waits, and no sequence would ever free them."""
    harness = Harness(page_size=4, block_size=4, max_model_len=32, max_num_seqs=2, prefix_caching=True)
    first, second = (harness.add(6, 8) for _ in range(2))
    harness.step(lambda rows: 0)
    scheduler, older, newer = harness.scheduler, harness.sequence(first), harness.sequence(second)
    started = []
    older.num_reused = newer.num_reused = 1  # so that neither is blamed for its logits
    monkeypatch.setattr(scheduler, "_start_over", lambda seq: started.append(seq) or scheduler.preempt(newer))
    batch = scheduler.schedule()
    scheduler.commit(batch, StepResult([[NOT_FINITE] * 4] * 2, [0, 0]))
    assert started == [older] and not newer.pages and not newer.cacheable
    assert [entry.seq for entry in batch.entries if entry.is_live] == [older]


# Waiting sequences


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_very_long_prompt_costs_others_no_step(prefix_caching):
    """A decoding sequence emits in every step, also during a prompt of many steps. No step has more rows than the
    budget."""
    harness = Harness(
        max_num_seqs=4, block_size=4, max_model_len=400, spare_pages=60, spare_rows=4, prefix_caching=prefix_caching
    )
    decoding = [harness.add(3, 100, speculate=i > 0) for i in range(3)]
    harness.step()
    long = harness.add(350, 4)
    steps = 0
    while harness.sequence(long).num_tokens == 350:
        batch, deltas = harness.step(lambda rows: 0)
        steps += 1
        assert set(decoding) <= set(deltas)
        assert sum(entry.count for entry in batch.entries) <= harness.budget
    rows_left = harness.budget - (1 + 4 + 4)
    assert steps == -(-350 // rows_left), "and it gets all the rows that are left"
    harness.drain()


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("siblings", [1, 2])
def test_more_work_than_pages_is_all_done(prefix_caching, siblings):
    """In the smallest possible pool, which fits one sequence, all end in time, and no sequence loses a token."""
    harness = Harness(max_num_seqs=4, block_size=4, max_model_len=64, spare_rows=40, prefix_caching=prefix_caching)
    for i in range(12):
        for _ in range(siblings):
            harness.add(4 + i * 3, 20, begins=range(i * 3))
    tokens = sum(request.request.max_tokens for request in harness.live.values())
    steps = 0
    while harness.scheduler.has_work:
        harness.step(lambda rows: 0)
        steps += 1
        assert steps <= 2 * tokens, "no progress"
    assert len(harness.done) == 12 * siblings and harness.scheduler.num_preemptions
    assert all(request.emitted == request.expected[0] for request in harness.done.values())


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
        prefix_caching=st.booleans(),
        draft_window=st.sampled_from([0, 1, 5, 9]),
    )
    def start(self, **sizes: int) -> None:
        self.harness = Harness(**sizes)

    @rule(
        target=requests,
        prompt=st.integers(1, 40),
        max_tokens=st.integers(1, 40),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        speculate=st.booleans(),
        alike=st.integers(0, 60),
        salt=st.sampled_from(("", "", "salt")),
        count=st.integers(1, 3),
    )
    def add(self, prompt: int, max_tokens: int, alike: int, count: int, **options: Any) -> object:
        """The first `alike` tokens of all texts are the same, as far as each goes."""
        room = self.harness.scheduler.max_model_len
        prompt = min(prompt, room - 1)
        max_tokens = min(max_tokens, room - prompt)
        begins = [index % VOCAB for index in range(alike)]
        return multiple(*(self.harness.add(prompt, max_tokens, begins=begins, **options) for _ in range(count)))

    @rule(request_id=requests)
    def abort(self, request_id: str) -> None:
        self.harness.abort(request_id)

    @rule()
    def flush(self) -> None:
        self.harness.flush()

    @rule(luck=st.lists(st.integers(0, 5), min_size=1, max_size=4), count=st.integers(1, 6))
    def step(self, luck: list[int], count: int) -> None:
        for _ in range(count):
            if self.harness.scheduler.has_work:
                self.harness.step(lambda rows: min(luck[rows.seq.arrival % len(luck)], rows.num_drafts))

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain(lambda rows: rows.seq.arrival % (rows.num_drafts + 1))


class SomeTraffic(AnyTraffic):
    """The fast tests' share of it."""


TestInvariantsHoldUnderSomeTraffic = SomeTraffic.TestCase
TestInvariantsHoldUnderSomeTraffic.settings = settings(max_examples=20, stateful_step_count=30)
TestInvariantsHoldUnderAnyTraffic = pytest.mark.exhaustive(AnyTraffic.TestCase)
TestInvariantsHoldUnderAnyTraffic.settings = settings(max_examples=150, stateful_step_count=30)
