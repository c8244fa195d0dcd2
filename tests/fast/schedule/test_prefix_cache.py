"""The prefix cache finds the right pages and no others, and no page is written twice or lost."""

import hashlib
from array import array
from random import Random

import pytest

from app.engine.models.page_pool import SCRATCH_PAGES, OutOfPages, PagePool
from app.engine.schedule.batch import StepResult
from app.engine.schedule.scheduler import Scheduler
from app.engine.sequence import Sequence
from app.messages import Request
from tests.fast.schedule.scheduler_harness import VOCAB, Harness

PAGE = 4
STEMS = 24
"""Number of the latest texts that a prompt may grow out of."""


# Pages


def pool_of(num_pages: int) -> PagePool:
    return PagePool(SCRATCH_PAGES + num_pages, PAGE)


def taken(pool: PagePool, num_pages: int) -> "array[int]":
    pages = array("i")
    pool.grow(pages, num_pages * PAGE)
    return pages


def test_digests_are_found_up_to_the_first_that_is_not_cached():
    pool = pool_of(4)
    a, b, c, _ = taken(pool, 4)
    for page, digest in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish(page, digest)
    assert pool.find([b"a", b"b", b"c"]).tolist() == [a, b, c]
    assert pool.find([b"a", b"x", b"c"]).tolist() == [a]
    assert pool.find([b"x", b"a"]).tolist() == pool.find([]).tolist() == []


def test_of_two_pages_with_one_digest_the_first_stays_cached_and_the_second_is_an_ordinary_page():
    pool = pool_of(2)
    first, second = taken(pool, 1), taken(pool, 1)
    pool.publish(first[0], b"a")
    pool.publish(second[0], b"a")
    pool.release(second)
    assert pool.find([b"a"]) == first
    assert taken(pool, 1) == second
    assert pool.find([b"a"]) == first


def test_a_shared_page_is_free_when_its_last_owner_gives_it_back():
    pool = pool_of(3)
    pages = taken(pool, 1)
    pool.publish(pages[0], b"a")
    for _ in range(2):
        pool.share(pages)
    for left in (2, 1):
        pool.release(pages)
        assert (pool.num_used, pool.num_free) == (1, 2), f"{left} owners are left"
        with pytest.raises(OutOfPages):
            taken(pool, 3)
    pool.release(pages)
    assert (pool.num_used, pool.num_free) == (0, 3)
    pool.share(pool.find([b"a"]))
    assert (pool.num_used, pool.num_free) == (1, 2), "a cached page that is free is taken back by sharing it"


def test_pages_that_are_not_cached_are_reused_first_then_the_least_recently_used_and_a_sequences_tail_first():
    pool = pool_of(6)
    old, young = taken(pool, 3), taken(pool, 3)
    for pages, name in ((old, b"old"), (young, b"young")):
        for i, page in enumerate(pages[:2]):
            pool.publish(page, name + bytes([i]))
    pool.release(old)
    pool.release(young)
    order = [taken(pool, 1)[0] for _ in range(6)]
    assert order == [old[2], young[2], old[1], old[0], young[1], young[0]]


def test_a_hit_makes_a_page_recently_used():
    pool = pool_of(3)
    pages = taken(pool, 3)
    for i, page in enumerate(pages):
        pool.publish(page, bytes([i]))
    pool.release(pages)
    hit = pool.find([bytes([2])])
    pool.share(hit)
    pool.release(hit)
    assert [taken(pool, 1)[0] for _ in range(3)] == [pages[1], pages[0], pages[2]]


def test_a_page_that_is_reused_is_cached_no_more_and_can_be_cached_anew():
    pool = pool_of(1)
    for digest, gone in ((b"a", b""), (b"b", b"a"), (b"a", b"b")):
        pages = taken(pool, 1)
        assert not pool.find([gone])
        pool.publish(pages[0], digest)
        pool.release(pages)
        assert pool.find([digest]) == pages


def test_the_cost_of_found_pages_counts_those_that_are_free():
    pool = pool_of(6)
    pages = taken(pool, 3)
    for i, page in enumerate(pages):
        pool.publish(page, bytes([i]))
    found = pool.find([bytes([i]) for i in range(3)])
    assert pool.cost(found, 4 * PAGE + 1) == 2, "three are in use"
    pool.release(pages)
    pool.share(pages[:1])
    assert pool.cost(found, 4 * PAGE + 1) == 4, "one is in use"
    free = pool.num_free
    pool.share(found)
    pool.grow(found, 4 * PAGE + 1)
    assert free - pool.num_free == 4


def test_a_flush_forgets_every_page_and_takes_none_from_its_owner():
    pool = pool_of(4)
    kept, freed = taken(pool, 2), taken(pool, 1)
    for page, digest in ((kept[0], b"a"), (kept[1], b"b"), (freed[0], b"c")):
        pool.publish(page, digest)
    pool.release(freed)
    pool.flush()
    assert not pool.find([b"a"]) and not pool.find([b"b"]) and not pool.find([b"c"])
    assert (pool.num_used, pool.num_free) == (2, 2)
    assert not set(kept) & set(taken(pool, 2)), "a page in use was handed out"
    pool.release(kept)
    assert not pool.find([b"a"]) and not pool.find([b"b"]), "they came back with their last owner"
    assert pool.num_free == 2


# Keys of a page


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    return Sequence(Request("r", tuple(tokens), 8, cache_salt=salt), arrival=0)


def digests(tokens: list[int], salt: str = "") -> list[bytes]:
    seq = sequence(tokens, salt)
    return [seq.digest(page, PAGE) for page in range(len(tokens) // PAGE)]


def test_a_digest_depends_on_every_token_up_to_the_pages_end_and_on_none_behind_it():
    tokens = list(range(3 * PAGE))
    whole = digests(tokens)
    assert len(set(whole)) == 3
    for changed in range(len(tokens)):
        other = digests([*tokens[:changed], 99, *tokens[changed + 1 :]])
        same = [a == b for a, b in zip(whole, other, strict=True)]
        assert same == [page < changed // PAGE for page in range(3)]


def test_equal_pages_behind_different_ones_differ():
    assert digests([1, 2, 3, 4, 5, 5, 5, 5])[1] != digests([4, 3, 2, 1, 5, 5, 5, 5])[1]
    assert len(set(digests([5] * 4 * PAGE))) == 4


@pytest.mark.parametrize("other", ["a", "b", "aa", "\0", "ä"])
def test_the_salt_changes_every_digest(other: str):
    tokens = list(range(2 * PAGE))
    assert not set(digests(tokens, other)) & (set(digests(tokens)) | set(digests(tokens, "c")))


def test_tokens_that_run_together_do_not_make_equal_pages():
    assert digests([1, 0, 0, 0]) != digests([256, 0, 0, 0]) != digests([0, 1, 0, 0])
    assert digests([11, 1, 1, 1]) != digests([1, 11, 1, 1])


def test_each_page_is_hashed_once_however_often_it_is_looked_up(monkeypatch: pytest.MonkeyPatch):
    hashed = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(len(data)) or sha256(data))
    seq = sequence(list(range(3 * PAGE)))
    for _ in range(3):
        seq.digest(1, PAGE)
    assert hashed == [0] + [32 + 4 * PAGE] * 2, "the salt and two pages"
    seq.token_ids += range(2 * PAGE)
    assert seq.digest(4, PAGE) == digests(list(range(3 * PAGE)) + list(range(2 * PAGE)))[4]


# Hits


def cached_harness(**sizes: int) -> Harness:
    return Harness(prefix_caching=True, **{"page_size": PAGE, "block_size": 4, "spare_pages": 40} | sizes)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
def test_a_hit_covers_all_full_pages_but_that_of_the_last_token(length: int):
    harness = cached_harness()
    prompt = list(range(length))
    harness.add(length, 1, begins=prompt)
    harness.drain()
    again = harness.add(length, 5, begins=prompt)
    batch, deltas = harness.step()
    hit = (length - 1) // PAGE * PAGE
    assert [(rows.start, rows.count) for rows in batch.prefills] == [(hit, length - hit)]
    assert deltas[again].cached_tokens == harness.num_cached[again] == hit
    harness.drain()


def test_a_hit_up_to_the_last_token_runs_one_row_that_yields_a_token_and_drafts_nothing():
    harness = cached_harness()
    prompt = list(range(PAGE + 1))
    harness.add(PAGE + 1, 1, begins=prompt)
    harness.drain()
    again = harness.add(PAGE + 1, 6, begins=prompt)
    batch, deltas = harness.step()
    assert batch.kind == "prefill" and [rows.count for rows in batch.prefills] == [1]
    assert (len(deltas[again].token_ids), deltas[again].steps[0].n_verified) == (1, 0)
    harness.drain()


def test_requests_share_only_where_their_salts_are_equal():
    harness = cached_harness()
    prompt = list(range(3 * PAGE))
    found = []
    for salt in ("", "mine", "yours", "mine", "", "min"):
        request = harness.add(len(prompt), 1, begins=prompt, salt=salt)
        harness.drain()
        found.append(harness.num_cached[request])
    assert found == [0, 0, 0, 2 * PAGE, 2 * PAGE, 0]


@pytest.mark.parametrize("accepted", range(4))
def test_the_next_turn_of_a_conversation_finds_the_answer_too(accepted: int):
    """However many drafts were refused in the pages of the answer: none of their KV is behind a digest."""
    harness = cached_harness(max_model_len=64)
    first = harness.add(6, 17)
    harness.drain(lambda rows: min(accepted, rows.num_drafts))
    said = harness.done[first].script[: 6 + 17]
    second = harness.add(len(said) + 3, 4, begins=said)
    harness.step()
    assert harness.num_cached[second] == (6 + 17 - 1) // PAGE * PAGE, "the last token's KV was never computed"
    harness.drain()


def test_a_stop_token_inside_a_block_caches_nothing_behind_it():
    for place in range(1, 12):
        harness = cached_harness(max_model_len=64)
        script = [1, 2, 3, *([5] * place), 7, *([6] * 20)]
        harness.add(3, 20, begins=script, stop={7})
        harness.drain()
        harness.add(3 + place + 9, 2, begins=[*script[: 3 + place], *([6] * 20)])
        harness.step()
        assert harness.pages_found == (3 + place) // PAGE
        harness.drain()


def test_a_prompt_that_was_cut_short_by_an_abort_is_found_as_far_as_it_came():
    harness = cached_harness(max_num_seqs=2)  # 8 rows a step
    prompt = list(range(20))
    gone = harness.add(20, 2, begins=prompt)
    harness.step()
    harness.abort(gone)
    again = harness.add(20, 2, begins=prompt)
    harness.step()
    assert harness.num_cached[again] == 8
    harness.drain()


def test_without_prefix_caching_nothing_is_found_hashed_or_counted(monkeypatch: pytest.MonkeyPatch):
    harness = Harness(page_size=PAGE)
    monkeypatch.setattr(Sequence, "digest", None)
    prompt = list(range(3 * PAGE))
    for _ in range(3):
        harness.add(len(prompt), 4, begins=prompt)
    assert len(harness.step()[0].entries) > 1, "equal prompts do not wait for one another"
    harness.drain()
    assert harness.scheduler.prefix_cache_queries == harness.scheduler.prefix_cache_hits == harness.pages_found == 0


# Company


def test_a_request_waits_while_its_next_page_is_filled_and_then_shares_it():
    harness = cached_harness(spare_rows=40)
    prompt = list(range(10))
    requests = [harness.add(10, 12, begins=prompt) for _ in range(3)]
    assert [entry.seq.request.request_id for entry in harness.step()[0].entries] == requests[:1]
    batch, _ = harness.step()
    assert [(rows.start, rows.count) for rows in batch.prefills] == [(8, 2), (8, 2)]
    shared = [harness.sequence(request).pages[:2] for request in requests]
    assert shared[0] == shared[1] == shared[2]
    harness.drain()
    assert [harness.num_cached[request] for request in requests] == [0, 8, 8]


def test_no_sequence_overtakes_one_that_waits_for_a_page():
    harness = cached_harness(spare_rows=40)
    prompt = list(range(10))
    first, second = harness.add(10, 3, begins=prompt), harness.add(10, 3, begins=prompt)
    third = harness.add(2, 3)
    ran = [[entry.seq.request.request_id for entry in harness.step()[0].prefills] for _ in range(2)]
    assert ran == [[first], [second, third]]
    harness.drain()


def test_prompts_that_share_no_whole_page_run_together():
    harness = cached_harness(spare_rows=40)
    for tail in range(3):
        harness.add(10, 3, begins=[1, 2, 3, 100 + tail])
    harness.add(PAGE, 3, begins=[1, 2, 3, 100])  # its one full page is that of its last token
    assert len(harness.step()[0].prefills) == 4
    harness.drain()


def test_a_page_that_is_filled_for_another_salt_is_not_waited_for():
    harness = cached_harness(spare_rows=40)
    prompt = list(range(10))
    for salt in ("", "mine"):
        harness.add(10, 3, begins=prompt, salt=salt)
    assert len(harness.step()[0].prefills) == 2
    harness.drain()


@pytest.mark.parametrize(("length", "waits"), [(14, False), (17, False), (21, True), (30, True)])
def test_a_prompt_that_is_past_a_page_is_not_waited_for_though_it_is_not_done(length: int, waits: bool):
    harness = cached_harness(max_model_len=64)  # 16 rows a step
    prompt = list(range(40))
    harness.add(24, 2, begins=prompt)
    harness.step()
    other = harness.add(length, 2, begins=prompt)
    starts = [rows.start for rows in harness.step()[0].prefills]
    assert starts == ([16] if waits else [16, (length - 1) // PAGE * PAGE])
    harness.drain()
    assert harness.num_cached[other] == min(24, (length - 1) // PAGE * PAGE)


def test_an_abort_of_the_one_who_filled_lets_the_next_go_on_with_its_pages():
    harness = cached_harness(spare_rows=40)
    prompt = list(range(10))
    first, second, third = (harness.add(10, 3, begins=prompt) for _ in range(3))
    harness.step()
    harness.abort(first)
    assert [(rows.start, rows.count) for rows in harness.step()[0].prefills] == [(8, 2), (8, 2)]
    harness.drain()
    assert harness.num_cached == {first: 0, second: 8, third: 8}


def test_a_decoding_sequence_that_fills_the_page_with_its_next_row_is_waited_for_one_step():
    harness = cached_harness(spare_rows=40, max_model_len=64)
    script = list(range(100, 140))
    first = harness.add(5, 20, begins=script)
    harness.step()
    harness.step(lambda rows: 1)
    assert harness.sequence(first).num_tokens == 2 * PAGE
    second = harness.add(2 * PAGE + 1, 2, begins=script)
    assert harness.step()[0].prefills == []
    harness.step()
    assert harness.num_cached[second] == 2 * PAGE
    harness.drain()


def test_of_a_page_that_two_sequences_fill_in_one_step_the_first_ones_is_shared():
    harness = cached_harness(spare_rows=40, max_model_len=64)
    script = list(range(100, 140))
    first, second = harness.add(5, 20, begins=script), harness.add(5, 20, begins=script)
    while harness.scheduler.waiting or harness.sequence(second).num_computed < 3 * PAGE:
        harness.step(lambda rows: 0 if rows.seq.request.request_id == first else 1)
    mine, yours = harness.sequence(first).pages, harness.sequence(second).pages
    assert mine[0] == yours[0] and not set(mine[1:]) & set(yours[1:])
    third = harness.add(3 * PAGE + 1, 2, begins=script)
    harness.step()
    found = harness.sequence(third).pages[:3] if third in harness.live else None
    assert found is not None and set(found) <= set(mine) | set(yours) and harness.num_cached[third] == 3 * PAGE
    harness.drain()


def test_one_who_is_past_a_page_is_not_waited_for_even_where_its_page_is_not_the_cached_one():
    """Two sequences fill the same page. The first one's was cached, and is evicted while the second still runs."""
    harness = cached_harness(spare_rows=60, spare_pages=0, max_model_len=48)  # 14 pages
    script = list(range(100, 160))
    first, second = (harness.add(5, 40, begins=script, speculate=False) for _ in range(2))
    while harness.scheduler.waiting or harness.sequence(second).num_computed < 3 * PAGE:
        harness.step()
    harness.abort(first)
    harness.add(33, 1)  # 9 of 10 free pages, the last of which the first one has left in the cache
    harness.step()
    assert harness.pages_evicted == 1
    third = harness.add(3 * PAGE + 1, 2, begins=script)
    harness.step()
    assert harness.num_cached[third] == 2 * PAGE
    harness.drain()


def test_pages_in_use_cost_a_newcomer_nothing_and_free_ones_do():
    """The running sequence has 7 of 10 pages. Another one of 7 pages waits, and one that shares 6 of them runs."""
    prompt = list(range(24))
    for begins, runs in (([], False), (prompt, True)):
        harness = Harness(prefix_caching=True, page_size=4, block_size=4, max_model_len=32, spare_rows=80)
        harness.add(24, 4, begins=prompt)
        harness.step()
        assert harness.pool.num_free == 3
        newcomer = harness.add(25, 2, begins=begins)
        harness.step()
        assert (harness.sequence(newcomer) in harness.scheduler.running) == runs
        harness.drain()

    harness = Harness(prefix_caching=True, page_size=4, block_size=4, max_model_len=32, spare_rows=80)
    harness.add(24, 1, begins=prompt)
    harness.drain()
    harness.add(12, 4)  # 4 pages, so that 6 are free, cached ones among them
    newcomer = harness.add(24, 2, begins=prompt)
    harness.step()
    assert harness.sequence(newcomer) in harness.scheduler.waiting, "7 pages, though it finds 5 of them"
    harness.drain()


# Preemption


def test_a_preempted_sequence_finds_its_own_pages_and_reports_what_it_found_at_first():
    harness = cached_harness(page_size=1, max_model_len=16, max_num_seqs=2, spare_rows=30, spare_pages=0)  # 24 pages
    old, new = harness.add(6, 10, begins=range(20, 26)), harness.add(6, 10, begins=range(30, 36))
    while not harness.scheduler.num_preemptions:
        harness.step(lambda rows: 0)
    preempted = harness.sequence(new)
    known = preempted.num_tokens
    found = harness.pages_found
    while preempted in harness.scheduler.waiting:
        harness.step(lambda rows: 0)
    assert harness.pages_found - found > 0, "what the old one did not need"
    assert known > 7 and harness.num_cached == {old: 0, new: 0}
    harness.drain()
    assert harness.done[new].emitted == harness.done[new].expected[0]


# Flush


def test_after_a_flush_nothing_is_found_that_was_computed_or_begun_before_it():
    harness = cached_harness(max_model_len=64)
    script = list(range(100, 140))
    done = harness.add(12, 1, begins=range(200, 220))
    harness.drain()
    running = harness.add(9, 20, begins=script)
    harness.step()
    harness.flush()
    harness.step()
    harness.step()
    assert harness.sequence(running).num_computed > 4 * PAGE, "it has filled pages since"
    again = [harness.add(12, 1, begins=range(200, 220)), harness.add(17, 1, begins=script)]
    harness.drain()
    assert [harness.num_cached[request] for request in (done, running, *again)] == [0, 0, 0, 0]
    last = harness.add(17, 1, begins=script)
    harness.drain()
    assert harness.num_cached[last] == 16


def test_no_sequence_waits_for_a_page_of_one_that_ran_during_a_flush():
    harness = cached_harness(spare_rows=40, max_model_len=64)
    script = list(range(100, 140))
    first = harness.add(5, 20, begins=script, speculate=False)
    harness.step()
    harness.flush()
    harness.add(9, 1, begins=script)  # whose two pages are found
    while harness.sequence(first).num_tokens < 3 * PAGE:
        harness.step()
    second = harness.add(3 * PAGE + 1, 1, begins=script)
    assert [(rows.start, rows.count) for rows in harness.step()[0].prefills] == [(2 * PAGE, PAGE + 1)]
    assert harness.num_cached[second] == 2 * PAGE
    harness.drain()


def test_a_sequence_that_is_recomputed_after_a_flush_is_cached_like_any_other():
    harness = cached_harness(page_size=1, max_model_len=16, max_num_seqs=2, spare_rows=30, spare_pages=0)
    harness.add(6, 10, begins=range(20, 26)), harness.add(6, 10, begins=range(30, 36))
    harness.step()
    harness.flush()
    while not harness.scheduler.num_preemptions:
        harness.step(lambda rows: 0)
    harness.drain(lambda rows: 0)
    again = harness.add(6, 1, begins=range(30, 36))
    harness.drain()
    assert harness.num_cached[again] == 5


# Anything goes


class Tree:
    """Prompts that begin alike. Each grows out of another prompt, or out of a prompt and its answer."""

    def __init__(self, random: Random, longest: int) -> None:
        self._random = random
        self._longest = longest
        self._texts: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        random = self._random
        stem = random.choice(self._texts)
        stem = stem[: random.choice((len(stem), random.randint(0, len(stem))))]
        more = random.choice((0, 1, 1, 3, PAGE, 9))
        prompt = [*stem, *(random.randrange(VOCAB) for _ in range(more))][: self._longest] or [0]
        self.grow(prompt)
        return prompt

    def grow(self, text: list[int]) -> None:
        self._texts.append(text)
        del self._texts[1:-STEMS]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 4, "block_size": 4, "max_num_seqs": 4, "spare_rows": 0, "spare_pages": 0},
        {"page_size": 4, "block_size": 3, "max_num_seqs": 5, "spare_rows": 40, "spare_pages": 6},
        {"page_size": 1, "block_size": 4, "max_num_seqs": 3, "spare_rows": 9, "spare_pages": 10},
        {"page_size": 2, "block_size": 1, "max_num_seqs": 6, "spare_rows": 30, "spare_pages": 30},
        {"page_size": 8, "block_size": 6, "max_num_seqs": 4, "spare_rows": 5, "spare_pages": 1},
    ],
    ids=str,
)
def test_four_hundred_requests_over_a_tree_of_prefixes_leave_no_page_used(sizes: dict[str, int]):
    random = Random(str(sizes))
    harness = Harness(prefix_caching=True, max_model_len=40, **sizes)
    tree = Tree(random, longest=30)
    ended = 0
    for _ in range(400):
        prompt = tree.prompt()
        for _ in range(random.choice((1, 1, 1, 2))):
            harness.add(
                len(prompt),
                random.randint(1, 40 - len(prompt)),
                begins=prompt,
                stop={random.randrange(VOCAB)} if random.random() < 0.3 else (),
                speculate=random.random() < 0.8,
                salt=random.choice(("", "", "", "salt")),
            )
        if random.random() < 0.15:
            harness.abort(random.choice(list(harness.live)))
        if random.random() < 0.01:
            harness.flush()
        while len(harness.scheduler.waiting) > 3 or (harness.scheduler.has_work and random.random() < 0.5):
            harness.step(lambda rows: random.randint(0, rows.num_drafts))
        for scripted in list(harness.done.values())[ended:]:
            tree.grow([*scripted.request.token_ids, *scripted.emitted][:30])
        ended = len(harness.done)
    harness.drain()
    print(harness.pages_found, harness.pages_evicted, harness.waits, harness.scheduler.num_preemptions)
    assert harness.pages_found > 200 and harness.pages_evicted > 200 and harness.waits > 10
    assert harness.scheduler.num_preemptions > 5


# Counts


def test_queries_and_hits_are_prompt_tokens_of_first_admissions():
    scheduler = Scheduler(PagePool(50, PAGE), max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=1)
    counts = []
    for length in (10, 10, 13):
        scheduler.add(Request(f"r{length}", tuple(range(length)), 1))
        scheduler.commit(scheduler.schedule(), StepResult([[50]], [0]))
        counts.append((scheduler.prefix_cache_queries, scheduler.prefix_cache_hits))
    assert counts == [(10, 0), (20, 8), (33, 16)]
