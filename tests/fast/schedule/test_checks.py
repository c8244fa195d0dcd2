"""`Scheduler.check` sees each way in which the books of sequences, pages and states can be wrong, and says which."""

from array import array
from collections.abc import Callable

import pytest

from app.engine.models.page_pool import SCRATCH_PAGES, PagePool
from app.engine.schedule.scheduler import Scheduler
from app.engine.schedule.state_slots import StateSlots
from app.engine.sequence import Sequence
from app.messages import Request
from tests.fast.schedule.scheduler_harness import Harness

Mistake = Callable[[Scheduler], object]


def scheduler_at_work(draft_window: int = 0) -> Scheduler:
    """Two sequences that decode, share a cached page and have cached another each, and one that waits."""
    harness = Harness(max_num_seqs=2, spare_pages=40, spare_rows=40, prefix_caching=True, draft_window=draft_window)
    harness.add(9, 20, begins=range(4))
    harness.step(lambda rows: 0)
    harness.add(9, 20, begins=range(4))
    harness.step(lambda rows: 0)
    harness.add(1, 1)
    scheduler = harness.scheduler
    scheduler.check()
    assert scheduler.running[0].pages[0] == scheduler.running[1].pages[0] and scheduler.waiting
    return scheduler


def swap_arrivals(scheduler: Scheduler) -> None:
    scheduler.running.reverse()


def lose_batch_slot(scheduler: Scheduler) -> None:
    scheduler.running[0].batch_slot = scheduler.running[1].batch_slot


def wait_with_pages(scheduler: Scheduler) -> None:
    scheduler.pool.grow(scheduler.waiting[0].pages, 1)


def wait_with_computed_tokens(scheduler: Scheduler) -> None:
    scheduler.waiting[0].num_computed = 1


def compute_the_anchor(scheduler: Scheduler) -> None:
    scheduler.running[0].num_computed = scheduler.running[0].num_tokens


def cache_without_prefix_caching(scheduler: Scheduler) -> None:
    scheduler.prefix_caching = False


def leak_a_page(scheduler: Scheduler) -> None:
    scheduler.running[0].pages.pop()


def own_a_free_page(scheduler: Scheduler) -> None:
    page = array("i")
    scheduler.pool.grow(page, 1)
    scheduler.pool.release(page)
    scheduler.running[0].pages += page


def free_a_page_of_others(scheduler: Scheduler) -> None:
    scheduler.pool.release(scheduler.running[0].pages[-1:])


def own_a_scratch_page(scheduler: Scheduler) -> None:
    scheduler.running[0].pages.append(0)


def run_without_pages_of_all_tokens(scheduler: Scheduler) -> None:
    seq = scheduler.running[0]
    scheduler.pool.release(seq.pages[2:])
    del seq.pages[2:]


def cache_a_page_that_is_written(scheduler: Scheduler) -> None:
    scheduler.pool.publish(scheduler.running[0].pages[2], b"not full")


def share_a_page_that_is_written(scheduler: Scheduler) -> None:
    page = scheduler.running[0].pages[-1:]
    scheduler.pool.share(page)
    scheduler.running[1].pages += page


def cache_a_page_twice(scheduler: Scheduler) -> None:
    scheduler.pool.publish(scheduler.running[0].pages[0], b"another digest")


def cache_a_free_page(scheduler: Scheduler) -> None:
    page = array("i")
    scheduler.pool.grow(page, 1)
    scheduler.pool.release(page)
    scheduler.pool.publish(page[0], b"free")


def forget_a_free_page(scheduler: Scheduler) -> None:
    seq = scheduler.running[0]
    scheduler.end(seq)
    scheduler.pool.forget([scheduler.pool.cached[seq.digest(1, scheduler.pool.page_size)]])


MISTAKES: dict[Mistake, str] = {
    swap_arrivals: "sequences are not in order of arrival",
    lose_batch_slot: "free batch slots and those in use are",
    wait_with_pages: "r2 waits, and owns memory",
    wait_with_computed_tokens: "r2 waits, and 1 of its tokens",
    compute_the_anchor: "r0 has 11 tokens, and 11 count as computed",
    cache_without_prefix_caching: "prefix caching is off",
    leak_a_page: "has 0 owners, but 1 are counted",
    own_a_free_page: "has 1 owners, but 0 are counted",
    free_a_page_of_others: "has 1 owners, but 0 are counted",
    own_a_scratch_page: "scratch page 0 is owned",
    run_without_pages_of_all_tokens: "r0 has 2 pages, and its KV takes 3",
    cache_a_page_that_is_written: "r0 would write page .*, which is cached or shared",
    share_a_page_that_is_written: "r0 would write page .*, which is cached or shared",
    cache_a_page_twice: "is cached under another page's digest",
    cache_a_free_page: "is reused before those that are not cached",
    forget_a_free_page: "counts as cached, and has no digest",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_the_books_of_sequences_and_pages_is_named(mistake: Mistake):
    scheduler = scheduler_at_work()
    with pytest.raises(AssertionError, match=MISTAKES[mistake]):
        mistake(scheduler)
        scheduler.check()


def hold_a_draft_page_before_the_first(scheduler: Scheduler) -> None:
    scheduler.running[0].first_draft_page += 1


def leak_a_draft_page(scheduler: Scheduler) -> None:
    scheduler.running[0].draft_pages.pop()


def write_a_cached_draft_page(scheduler: Scheduler) -> None:
    assert scheduler.draft_pages
    scheduler.draft_pages.pool.publish(scheduler.running[0].draft_pages[-1], b"not full")


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (hold_a_draft_page_before_the_first, "r0 holds pages of the draft before its first one"),
        (leak_a_draft_page, "has 0 owners, but 1 are counted"),
        (write_a_cached_draft_page, "r0 would write page .* of the draft, which is cached or shared"),
    ],
)
def test_a_mistake_in_the_books_of_the_drafts_pages_is_named(mistake: Mistake, told: str):
    scheduler = scheduler_at_work(draft_window=8)
    with pytest.raises(AssertionError, match=told):
        mistake(scheduler)
        scheduler.check()


class Slots:
    """Slots of 2 sequences and 2 checkpoints. One sequence owns a slot, and one reads the checkpoint of a page."""

    def __init__(self) -> None:
        self.states = StateSlots(2, 2, 512)
        self.owner, self.reader = (Sequence(Request(name, [1], 1), 0) for name in ("owner", "reader"))
        self.running = [self.owner, self.reader]
        self.cached = {b"page": 1}
        self.states.take(self.owner)
        assert self.states.publish(self.owner, b"page", is_final=True)
        self.states.release(self.owner)
        self.states.take(self.owner)
        self.states.take(self.reader, b"page")
        self.check()

    def check(self) -> None:
        self.states.check(self.running, self.cached)


def lose_a_slot(slots: Slots) -> None:
    slots.owner.state_slot = 0


def own_a_free_slot(slots: Slots) -> None:
    slots.states.release(Sequence(slots.owner.request, 0, state_slot=slots.owner.state_slot))


def own_a_slot_together(slots: Slots) -> None:
    slots.running.append(Sequence(slots.owner.request, 0, state_slot=slots.owner.state_slot))


def own_a_slot_that_does_not_exist(slots: Slots) -> None:
    slots.owner.next_state_slot = 17


def read_uncounted(slots: Slots) -> None:
    slots.running.append(Sequence(slots.owner.request, 0, state_slot=slots.reader.state_slot))


def forget_a_readers_end(slots: Slots) -> None:
    slots.running.remove(slots.reader)
    slots.running.append(Sequence(slots.owner.request, 0, state_slot=slots.reader.next_state_slot))


def outlive_the_page(slots: Slots) -> None:
    slots.cached.clear()


def keep_more_than_there_is_room_for(slots: Slots) -> None:
    slots.states.num_checkpoints, slots.states.num_slots = 0, slots.states.num_slots + 2


def keep_the_spare_slot(slots: Slots) -> None:
    assert slots.states.prepare(slots.owner, keep=True)
    slots.running.remove(slots.owner)
    slots.running.append(
        Sequence(slots.owner.request, 0, state_slot=slots.owner.state_slot, next_state_slot=slots.owner.next_state_slot)
    )


def keep_the_spare_slot_after_a_chunk(slots: Slots) -> None:
    assert slots.states.prepare(slots.owner, keep=True)
    before = slots.owner.state_slot
    slots.owner.state_slot, slots.owner.next_state_slot = slots.owner.next_state_slot, 0
    slots.states.release(Sequence(slots.owner.request, 0, state_slot=before))


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (keep_the_spare_slot_after_a_chunk, "holds the spare slot after its chunk"),
        (lose_a_slot, "of 0 sequences, is 0 times free"),
        (own_a_free_slot, "of 1 sequences, is 1 times free"),
        (own_a_slot_together, "which steps write, has 2 owners"),
        (own_a_slot_that_does_not_exist, "slots do not exist"),
        (read_uncounted, "has 2 readers, but 1 are counted"),
        (forget_a_readers_end, "has 0 readers, but 1 are counted"),
        (outlive_the_page, "is the checkpoint of a page that is no longer cached"),
        (keep_more_than_there_is_room_for, "1 checkpoints are too many"),
        (keep_the_spare_slot, "a sequence that has ended holds the spare slot"),
    ],
)
def test_a_mistake_in_the_books_of_states_is_named(mistake: Callable[[Slots], None], told: str):
    slots = Slots()
    mistake(slots)
    with pytest.raises(AssertionError, match=told):
        slots.check()


def test_a_checkpoint_whose_page_was_evicted_unseen_is_found():
    pool = PagePool(SCRATCH_PAGES + 8, 1)
    states = StateSlots(1, 1, 512)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8, "block_size": 1}
    scheduler = Scheduler(pool, states=states, **sizes)  # type: ignore[arg-type]
    seq = Sequence(Request("a", [1, 2], 1), 0)
    states.take(seq)
    assert states.publish(seq, b"evicted", is_final=True)
    states.release(seq)
    with pytest.raises(AssertionError, match="no longer cached"):
        scheduler.check()
