"""The step behind one in flight has the right sequences and pages, and `commit` takes the right rows of it."""

from array import array
from collections.abc import Collection
from typing import Any

import pytest

from app.engine.models.page_pool import SCRATCH_PAGES, PagePool
from app.engine.schedule.batch import Batch, StepResult
from app.engine.schedule.overlap import schedule_ahead
from app.engine.schedule.policy import Policy
from app.engine.schedule.scheduler import Scheduler
from app.engine.schedule.state_slots import StateSlots
from app.engine.sequence import NOT_FINITE, Sequence
from app.messages import Request, SamplingParams, TokenDelta
from tests.fast.engine.flat_request import flat_request

BLOCK = 4


class Flight:
    """A scheduler with `count` sequences that decode, "a", "b" and so on, each with 3 tokens of which 2 are prompt."""

    def __init__(
        self,
        count: int = 1,
        *,
        pages: int = 200,
        page_size: int = 1,
        states: StateSlots | None = None,
        max_tokens: int = 30,
        max_num_seqs: int = 4,
        prefix_caching: bool = False,
        stop: Collection[int] = (),
        draws: bool = True,
        **asked: Any,
    ) -> None:
        self.draws = draws
        self.pool = PagePool(SCRATCH_PAGES + pages, page_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=40,
            max_model_len=40,
            block_size=BLOCK,
            prefix_caching=prefix_caching,
            states=states,
        )
        for name in "abcd"[:count]:
            self.scheduler.add(
                flat_request(name, (1, 2), max_tokens, stop_token_ids=frozenset(stop), cache_salt=name, **asked)
            )
        self.commit(self.scheduler.schedule(), [[3]] * count, [0] * count)
        self.batch = self.scheduler.schedule()

    @property
    def seqs(self) -> list[Sequence]:
        return self.scheduler.running

    def behind(self) -> Batch | None:
        found = schedule_ahead(self.scheduler, self.batch, draws=self.draws)
        return found if isinstance(found, Batch) else None

    def commit(self, batch: Batch, tokens: list[list[int]], accepted: list[int]) -> list[TokenDelta]:
        deltas = self.scheduler.commit(batch, StepResult(tokens, accepted))
        self.scheduler.check()
        return deltas


def test_a_step_that_must_wait_says_why():
    def why(flight: Flight) -> Any:
        return schedule_ahead(flight.scheduler, flight.batch, draws=flight.draws)

    assert why(Flight(max_tokens=2)) == "end"
    assert why(Flight(temperature=0.5, draws=False)) == why(Flight(logit_bias=((1, 2.0),))) == "sampling"
    assert why(Flight(2, pages=18)) == "pages"
    flight = Flight()
    flight.scheduler.add(Request("late", (1,) * 38, 2))
    assert why(flight) == "admission"
    flight.batch = flight.scheduler.schedule()
    assert why(flight) == "prefill"


def test_rows_begin_where_they_must_at_least_and_own_pages_for_where_they_may_end():
    flight = Flight(2)
    behind = flight.behind()
    assert behind is not None and behind.kind == "decode"
    (seq, _) = flight.seqs
    rows = behind.decodes[0]
    assert (rows.start, rows.max_accepted, rows.count, rows.num_drafts) == (3, 3, 4, 3)
    assert [rows.prev_row for rows in behind.decodes] == [0, 1]
    assert len(seq.pages) == 3 + 4 + BLOCK - 1, "tokens read, tokens in flight, and a block's drafts"
    flight.commit(flight.batch, [[10, 11, 12, 13]] * 2, [2, 0])
    a, b = flight.commit(behind, [[20, 21, 22, 23], [30, 31, 32, 33]], [1, 3])
    assert (a.token_ids, b.token_ids) == ([20, 21], [30, 31, 32, 33])
    assert [rows.start for rows in behind.decodes] == [5, 3]
    assert all(seq.is_decoding for seq in flight.seqs)


@pytest.mark.parametrize("page_size", [3, 4, 5, 6, 7])
def test_a_state_in_flight_becomes_a_checkpoint_if_its_rows_end_a_page(page_size: int):
    """Rows [2, 6) end pages of up to 6 tokens, also where the last row's token stops the answer."""
    states = StateSlots(4, 8, 512)
    flight = Flight(page_size=page_size, prefix_caching=True, states=states, stop=[13])
    (seq,) = flight.seqs
    assert flight.behind() and states.num_used_checkpoints == (page_size < 7), "none is kept for nothing"
    (delta,) = flight.commit(flight.batch, [[10, 11, 12, 13]], [3])
    assert delta.finish_reason == "stop"
    assert (page_size == 7) or seq.digest(6 // page_size - 1, page_size) in states


def test_no_more_rows_than_may_be_emitted_and_none_of_who_is_sure_to_end():
    flight = Flight(max_tokens=4)  # 3 are left
    assert [rows.count for rows in flight.batch.decodes] == [3]
    behind = flight.behind()
    assert behind is not None and [rows.count for rows in behind.decodes] == [2]
    flight = Flight(max_tokens=2)
    assert flight.behind() is None


@pytest.mark.parametrize(
    ("asked", "by_device"),
    [
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "top_k": 128, "min_p": 0.1}, True),
        ({"temperature": 0.7, "top_k": 129}, False),
        ({"top_k": 129}, True),
        ({"temperature": 0.7, "top_p": 0.9}, True),
        ({"presence_penalty": 0.5}, True),
        ({"min_tokens": 2}, True),
        ({"min_tokens": 3}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
    ],
    ids=str,
)
def test_who_needs_the_host_for_a_token_is_waited_for(asked: dict[str, Any], by_device: bool):
    """One token is emitted, and one more is sure to be by the step in flight."""
    assert (Flight(**asked).behind() is not None) == by_device
    if SamplingParams(**asked).is_argmax or asked.keys() & {"min_tokens"} or "temperature" not in asked:
        return
    assert Flight(**asked, draws=False).behind() is None


def test_a_newcomer_is_waited_for_but_not_one_who_cannot_be_admitted():
    flight = Flight(2, max_num_seqs=3)
    flight.scheduler.add(Request("new", (1,), 5))
    assert flight.behind() is None
    assert flight.scheduler.waiting, "he is admitted by the next schedule"
    full = Flight(2, max_num_seqs=2)
    full.scheduler.add(Request("new", (1,), 5))
    assert full.behind() is not None
    tight = Flight(1, pages=20)
    tight.scheduler.add(Request("new", (1,) * 20, 5))
    assert tight.behind() is not None


@pytest.mark.parametrize(("length", "is_last"), [(5, True), (36, True), (37, False)])
def test_a_step_is_scheduled_ahead_of_prompts_that_end_and_not_of_parts(length: int, is_last: bool):
    flight = Flight(1)
    flight.commit(flight.batch, [[5, 6, 7, 8]], [0])
    flight.scheduler.add(Request("new", (1,) * length, 3))
    flight.batch = flight.scheduler.schedule()
    behind = flight.behind()
    assert flight.batch.kind == "mixed" and (behind is not None) == is_last
    if behind is None:
        return
    assert [(rows.start, rows.max_accepted, rows.prev_row) for rows in behind.decodes] == [(4, 3, 0), (length, 0, 1)]
    assert len(flight.seqs[1].pages) == length + 1 + BLOCK - 1
    flight.commit(flight.batch, [[5, 6, 7, 8], [9]], [1, 0])
    assert [rows.start for rows in behind.decodes] == [4, length], "as launched until they are committed"
    a, new = flight.commit(behind, [[20, 21, 22, 23], [30, 31, 32, 33]], [3, 1])
    assert (a.token_ids, new.token_ids) == ([20, 21, 22, 23], [30, 31])
    assert [rows.start for rows in behind.decodes] == [5, length]


@pytest.mark.parametrize(("length", "leaves_one"), [(8, True), (7, False)])
def test_rows_behind_a_hybrids_prompt_leave_the_state_that_others_may_find(length: int, leaves_one: bool):
    """A prompt that ends with a page leaves a checkpoint, so what follows is written to another slot."""
    flight = Flight(page_size=4, prefix_caching=True, states=StateSlots(4, 8, 512))
    flight.scheduler.add(Request("new", (1,) * length, 5))
    flight.batch = flight.scheduler.schedule()
    written = flight.batch.prefills[0].next_slot
    behind = flight.behind()
    assert flight.batch.kind == "mixed" and behind is not None
    assert (behind.decodes[1].next_slot != written) == leaves_one


def test_rows_behind_a_prompt_are_ignored_if_it_has_to_be_read_again():
    flight = Flight(1)
    flight.scheduler.add(Request("new", (1,) * 5, 5))
    flight.batch = flight.scheduler.schedule()
    seq = flight.seqs[1]
    seq.num_reused = 4
    behind = flight.behind()
    assert behind is not None
    (a,) = flight.commit(flight.batch, [[5, 6, 7, 8], [NOT_FINITE]], [1, 0])
    assert seq.num_computed == 0 and flight.scheduler.unclean == set()
    flight.batch = behind
    assert schedule_ahead(flight.scheduler, behind, draws=True) == "prefill"
    (again,) = flight.commit(behind, [[20, 21, 22, 23], [30, 31, 32, 33]], [0, 1])
    assert (a.request_id, again.request_id) == ("a", "a")


def test_a_sequence_finds_its_row_of_the_result_in_whatever_order_they_run():
    flight = Flight(2)
    flight.batch.decodes.reverse()
    behind = flight.behind()
    assert behind is not None
    assert [(rows.seq, rows.prev_row) for rows in behind.decodes] == [*zip(flight.seqs, (1, 0), strict=True)]


def test_where_pages_are_short_none_are_taken():
    flight = Flight(2, pages=18)
    used = flight.pool.num_used
    assert flight.behind() is None and flight.pool.num_used == used
    flight.scheduler.check()


def test_pages_that_one_owns_already_are_not_another_ones():
    """A sequence that owns more than it needs does not make up for one that owns less."""
    flight = Flight(2, pages=26)
    (a, _) = flight.seqs
    flight.pool.grow(a.pages, 20)
    assert flight.pool.num_free == 0 and flight.behind() is None


def test_of_who_has_ended_nothing_counts_and_its_neighbours_get_their_own_lines(monkeypatch: pytest.MonkeyPatch):
    flight = Flight(3, stop=[9])
    behind = flight.behind()
    assert behind is not None
    seen: list[Any] = []
    monkeypatch.setattr(Policy, "record_acceptance", lambda _, *outcome: seen.append(outcome))
    a, b, c = flight.commit(flight.batch, [[10, 9, 11, 12], [20, 21, 22, 23], [30, 31, 32, 33]], [3, 1, 0])
    assert (a.finish_reason, a.token_ids) == ("stop", [10, 9]) and not b.finish_reason and not c.finish_reason
    flight.scheduler.abort("c")
    seen.clear()
    (only,) = flight.commit(behind, [[50, 51, 52, 53], [60, 61, 62, 63], [70, 71, 72, 73]], [3, 2, 1])
    assert (only.request_id, only.token_ids) == ("b", [60, 61, 62])
    assert [seq.request.request_id for seq, *_ in seen] == ["b"]


def test_who_is_computed_anew_gets_no_token_of_the_step_in_flight():
    flight = Flight(2, prefix_caching=True)
    flight.seqs[1].num_reused = 1
    behind = flight.behind()
    assert behind is not None
    flight.commit(flight.batch, [[10, 11, 12, 13], [NOT_FINITE] * 4], [0, 0])
    again = flight.seqs[1]
    assert (again.num_tokens, again.num_computed) == (3, 0)
    (delta,) = flight.commit(behind, [[20, 21, 22, 23], [0, 0, 0, 0]], [0, 0])
    assert delta.request_id == "a" and (again.num_tokens, again.num_computed) == (3, 0)
    assert not flight.pool.find([again.digest(page, 1) for page in range(2)])


def test_what_a_step_in_flight_may_still_write_is_scrubbed_and_what_is_known_is_not():
    flight = Flight(1, stop=[9], prefix_caching=True)
    flight.behind()
    (seq,) = flight.seqs
    pages = seq.pages[:]
    flight.commit(flight.batch, [[10, 9, 11, 12]], [3])  # 5 tokens, and KV of 4
    assert list(flight.pool.find([seq.digest(page, 1) for page in range(4)])) == list(pages[:4])
    flight.pool.grow(array("i"), flight.pool.num_free)
    assert sorted(flight.pool.to_scrub) == sorted(pages[4:]) and len(pages) == 10


def test_no_step_is_scheduled_ahead_before_rejected_drafts_are_scrubbed_behind_the_step_in_flight():
    flight = Flight(1)
    behind = flight.behind()
    assert behind is not None
    flight.commit(flight.batch, [[10, 11, NOT_FINITE, NOT_FINITE]], [1])
    (seq,) = flight.seqs
    assert schedule_ahead(flight.scheduler, behind, draws=True) == "scrub" and not seq.is_sound
    flight.commit(behind, [[20, 21, 22, 23]], [3])
    assert not seq.is_sound
    known = set(seq.pages[: seq.num_computed])
    batch, scrub = flight.scheduler.schedule(), set(flight.pool.to_scrub)
    assert seq.num_computed == 8 and scrub and not known & scrub
    flight.commit(batch, [[30, 31, 32, 33]], [0])
    assert seq.is_sound


def test_a_step_that_is_forgotten_may_have_written():
    flight = Flight(1)
    flight.behind()
    flight.scheduler.unclean |= flight.scheduler.in_flight
    (seq,) = flight.seqs
    flight.commit(flight.batch, [[10, 11, 12, 13]], [1])
    assert not seq.is_sound
    flight.scheduler.schedule()
    assert set(seq.pages[seq.num_computed :]) <= set(flight.pool.to_scrub)


def test_a_flush_lets_nothing_of_the_step_in_flight_be_cached():
    flight = Flight(1, prefix_caching=True)
    behind = flight.behind()
    assert behind is not None
    flight.commit(flight.batch, [[10, 11, 12, 13]], [3])
    flight.scheduler.flush_cache()
    flight.commit(behind, [[20, 21, 22, 23]], [3])
    assert not flight.pool.cached
