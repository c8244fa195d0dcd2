"""With drafts that are right up to a chosen place, every step's tokens, counts and lengths are those of the plan.

`PlannedRun` compares after every step; the texts come from Transformers, one token at a time.
"""

from collections.abc import Callable
from functools import cache
from random import Random

import pytest
import torch

from app.engine.load.engine import Engine
from app.messages import Request
from tests.costs import fast_ones
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.planted import PlannedRun, make_engine
from tests.fast.engine.reference import ReferenceTarget, features, load_target, sampled

LONGEST_ANSWER = 36
BLOCKS = fast_ones([2, 5, 8], (5,))
PAGES = fast_ones([1, 4, 16], (4,))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), seed=3, block_size=8, max_position_embeddings=128)


@pytest.fixture(scope="module")
def target(pair: Pair) -> ReferenceTarget:
    return load_target(pair.target)


Text = Callable[..., list[int]]


@pytest.fixture(scope="module")
def text(pair: Pair, target: ReferenceTarget) -> Text:
    @cache
    def make(prompt_len: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """A prompt of that length and what the target says after it, a block further than any answer goes."""
        random = Random(prompt_len)
        prompt = [random.randrange(pair.vocab_size) for _ in range(prompt_len)]
        return prompt + sampled(target, prompt, LONGEST_ANSWER + 8, temperature, seed)

    return lambda *args: list(make(*args))


@pytest.fixture(scope="module", params=fast_ones([False, True], (False,)), ids=["cold", "cached"])
def engine_of(pair: Pair, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Engines are used again and again, so their pages are full of what others left behind; and with a prefix cache the
    same prompts come again and again. The plan of a text is the same in both."""
    return cache(lambda **sizes: make_engine(pair, prefix_caching=request.param, **sizes))


class Asked:
    """Requests with the texts they must follow."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self.requests: list[Request] = []
        self.texts: dict[str, list[int]] = {}

    def add(self, prompt_len: int, max_tokens: int, **options: object) -> Request:
        request_id = f"r{len(self.requests)}"
        whole = self._text(prompt_len, options.get("temperature", 0.0), options.get("seed", 0))
        request = flat_request(request_id, tuple(whole[:prompt_len]), max_tokens, **options)
        self.requests.append(request)
        self.texts[request_id] = whole
        return request


def counts(run: PlannedRun, request_id: str) -> list[tuple[int, int, int]]:
    """(tokens, verified, accepted) of every step of a request."""
    return [(len(d.token_ids), d.steps[0].n_verified, d.steps[0].n_accepted) for d in run.deltas[request_id]]


def counts_without_preemption(max_tokens: int, cut: int, block_size: int) -> list[tuple[int, int, int]]:
    expected, left = [(1, 0, 0)], max_tokens - 1
    while left:
        width = min(block_size, left)
        accepted = min(cut, width - 1)
        expected.append((accepted + 1, width - 1, accepted))
        left -= accepted + 1
    return expected


# Cuts


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_every_cut_gives_the_planned_tokens_counts_and_lengths_across_page_edges(
    engine_of, text, block_size, page_size
):
    engine = engine_of(block_size=block_size, page_size=page_size)
    for cut in range(block_size):
        asked = Asked(text)
        for prompt_len in (page_size - 1, page_size, page_size + 1, 17):
            asked.add(max(1, prompt_len), 22)
        run = PlannedRun(engine, asked.texts, cut)
        run.run(asked.requests)
        assert run.num_preemptions == 0
        for request in asked.requests:
            assert counts(run, request.request_id) == counts_without_preemption(22, cut, block_size)


def test_the_counts_of_one_request_worked_out_by_hand(engine_of, text):
    engine = engine_of(block_size=8)
    asked = Asked(text)
    request = asked.add(7, 14)
    run = PlannedRun(engine, asked.texts, 3)
    run.run(asked.requests)
    assert counts(run, request.request_id) == [(1, 0, 0), (4, 7, 3), (4, 7, 3), (4, 4, 3), (1, 0, 0)]
    assert [p.position for p in run.drafter.proposals] == [7, 11, 15]
    assert [step.stats.kind for step in run.steps] == ["prefill"] + ["decode"] * 4


def test_sequences_of_one_batch_are_accepted_each_for_itself(engine_of, text):
    engine = engine_of(block_size=5, max_num_seqs=6)
    asked = Asked(text)
    for cut in range(5):
        asked.add(6 + cut, 30)
    run = PlannedRun(engine, asked.texts, lambda request_id, n: int(request_id[1:]))
    run.run(asked.requests)
    for cut, request in enumerate(asked.requests):
        assert counts(run, request.request_id) == counts_without_preemption(30, cut, 5)


def test_the_drafts_context_is_made_of_the_accepted_tokens_features(engine_of, text, target, pair):
    """Behind a refused draft a row's features are of a token that never was; they must be overwritten."""
    engine = engine_of(block_size=5, max_num_seqs=2)
    asked = Asked(text)
    requests = [asked.add(19, 24), asked.add(5, 24, speculate=False)]
    run = PlannedRun(engine, asked.texts, lambda request_id, n: n % 5)
    for request in requests:
        run.add(request)
    for _ in range(7):
        run.step()
        for seq in run.scheduler.running:
            found = run.context_features(seq.request.request_id)
            expected = features(target, seq.token_ids[: seq.num_computed], pair.taps)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    run.run()


# What ends a text


@pytest.mark.parametrize("block_size", BLOCKS)
def test_a_stop_token_at_any_place_ends_the_text_there_and_nothing_behind_it_counts(engine_of, text, block_size):
    engine = engine_of(block_size=block_size, max_num_seqs=20)
    answer = text(9)[9:]
    places = [k for k in range(2 * block_size + 2) if answer[k] not in answer[:k]]
    assert len(places) > block_size and 0 in places
    for cut in range(block_size):
        asked = Asked(text)
        for place in places:
            asked.add(9, LONGEST_ANSWER, stop_token_ids=frozenset({answer[place]}))
        run = PlannedRun(engine, asked.texts, cut)
        emitted = run.run(asked.requests)
        for place, request in zip(places, asked.requests, strict=True):
            assert emitted[request.request_id] == answer[: place + 1]
            last = run.deltas[request.request_id][-1]
            assert last.finish_reason == "stop"
            into = (place - 1) % (cut + 1)  # which of the last step's tokens stops
            assert last.steps[0].n_accepted == (min(cut, into + 1) if place else 0)
            assert last.steps[0].n_verified == (min(block_size - 1, into + 1) if place else 0)


def test_of_several_stop_tokens_the_first_to_come_ends_the_text(engine_of, text):
    engine = engine_of(block_size=8)
    answer = text(9)[9:]
    asked = Asked(text)
    asked.add(9, LONGEST_ANSWER, stop_token_ids=frozenset(answer[4:12]))
    asked.add(9, LONGEST_ANSWER, stop_token_ids=frozenset(set(range(97)) - set(answer)))
    emitted = PlannedRun(engine, asked.texts, 7).run(asked.requests)
    first = min(answer.index(token) for token in answer[4:12])
    assert emitted == {"r0": answer[: first + 1], "r1": answer[:LONGEST_ANSWER]}


@pytest.mark.parametrize("block_size", BLOCKS)
def test_max_tokens_around_the_block_size_is_kept_to_exactly(engine_of, text, block_size):
    engine = engine_of(block_size=block_size, max_num_seqs=20)
    limits = sorted({1, 2, block_size - 1, block_size, block_size + 1, block_size + 2, 2 * block_size + 1})
    for cut in range(block_size):
        asked = Asked(text)
        for limit in limits:
            asked.add(9, limit)
        run = PlannedRun(engine, asked.texts, cut)
        run.run(asked.requests)
        for limit, request in zip(limits, asked.requests, strict=True):
            assert run.emitted[request.request_id] == text(9)[9 : 9 + limit]
            assert counts(run, request.request_id) == counts_without_preemption(limit, cut, block_size)
            assert run.deltas[request.request_id][-1].finish_reason == "length"


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("max_model_len", [31, 32, 33])
def test_the_block_is_never_cut_at_the_context_limit_of_the_smallest_pool(engine_of, text, page_size, max_model_len):
    block_size = 8
    num_pages = -(-(max_model_len + 2 * block_size) // page_size)
    sizes = {"max_model_len": max_model_len, "num_pages": num_pages, "max_num_seqs": 2}
    engine = engine_of(block_size=block_size, page_size=page_size, **sizes)
    for cut in (0, 3, 7):
        asked = Asked(text)
        for prompt_len in (9, 17, max_model_len - 1):
            asked.add(prompt_len, max_model_len - prompt_len)
        PlannedRun(engine, asked.texts, cut).run(asked.requests)
    with pytest.raises(ValueError, match=f"at most {max_model_len}"):
        engine.core.add(Request("too long", (1,) * 9, max_model_len - 8))


# Company


@pytest.mark.parametrize("block_size", BLOCKS)
def test_preemption_loses_no_token_and_no_count(engine_of, text, block_size):
    page_size, max_model_len = 4, 48
    num_pages = -(-(max_model_len + 2 * block_size) // page_size)
    engine = engine_of(block_size=block_size, page_size=page_size, max_model_len=max_model_len, num_pages=num_pages)
    for cut in range(block_size):
        asked = Asked(text)
        for prompt_len in (9, 5, 17, 4):
            asked.add(prompt_len, 26)
        run = PlannedRun(engine, asked.texts, cut)
        emitted = run.run(asked.requests)
        assert run.num_preemptions > 0
        for request in asked.requests:
            start = len(request.token_ids)
            assert emitted[request.request_id] == asked.texts[request.request_id][start : start + 26]
        untouched = asked.requests[0].request_id
        assert counts(run, untouched) == counts_without_preemption(26, cut, block_size), "the oldest never waits"


@pytest.mark.parametrize("cut", [0, 2, 4])
def test_plain_requests_beside_drafting_ones_run_one_row_and_never_meet_the_drafter(engine_of, text, cut):
    engine = engine_of(block_size=5)
    asked = Asked(text)
    for index, prompt_len in enumerate((9, 5, 17, 4)):
        asked.add(prompt_len, 20, speculate=index % 2 == 1)
    run = PlannedRun(engine, asked.texts, cut)
    run.run(asked.requests)
    for request in asked.requests:
        expected = counts_without_preemption(20, cut, 5) if request.speculate else [(1, 0, 0)] * 20
        assert counts(run, request.request_id) == expected
    assert {p.request_id for p in run.drafter.proposals} == {"r1", "r3"}


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_prompts_taken_in_chunks_beside_verify_rows_disturb_no_sequence(engine_of, text, cut):
    engine = engine_of(block_size=5, max_num_seqs=3, max_num_batched_tokens=15)
    engine.core.flush_cache()  # prompts that are found are not cut
    asked = Asked(text)
    run = PlannedRun(engine, asked.texts, cut)
    run.add(asked.add(5, 30))
    run.step()
    for prompt_len in (31, 23, 17, 1):
        run.add(asked.add(prompt_len, 12))
    emitted = run.run()
    assert run.num_preemptions == 0 and sum(step.stats.kind == "mixed" for step in run.steps) > 3
    for request in asked.requests:
        start = len(request.token_ids)
        assert emitted[request.request_id] == asked.texts[request.request_id][start : start + request.max_tokens]
    assert counts(run, "r0") == counts_without_preemption(30, cut, 5)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_sampled_text_depends_on_the_seed_alone(engine_of, text, block_size):
    sizes = {"max_model_len": 40, "num_pages": -(-(40 + 2 * block_size) // 4), "max_num_batched_tokens": 4 * block_size}
    engine = engine_of(block_size=block_size, **sizes)
    for cut in sorted({0, 1, block_size - 1}):
        asked = Asked(text)
        asked.add(9, 20, temperature=0.7, seed=1)
        asked.add(9, 20, temperature=0.7, seed=2**64 - 1)
        asked.add(9, 20)
        asked.add(9, 20, temperature=1.0, seed=2**40 + 5)
        asked.add(9, 20, temperature=0.7, seed=1, speculate=False)
        run = PlannedRun(engine, asked.texts, cut)
        emitted = run.run(asked.requests)
        assert run.num_preemptions > 0
        assert emitted["r0"] == emitted["r4"]
        assert len({tuple(tokens) for tokens in emitted.values()}) == 4


def test_an_abort_in_the_middle_frees_the_pages_and_disturbs_no_sequence(engine_of, text):
    engine = engine_of(block_size=5)
    asked = Asked(text)
    run = PlannedRun(engine, asked.texts, 2)
    for prompt_len in (9, 5, 17):
        run.add(asked.add(prompt_len, 24))
    for _ in range(3):
        run.step()
    used, gone = run.scheduler.pool.num_used, run.scheduler.running[1]
    owned = len(gone.pages)
    engine.core.abort("r1")
    assert run.scheduler.pool.num_used == used - owned
    for bookkeeping in (run.requests, run.emitted, run.deltas):
        del bookkeeping["r1"]
    run.add(asked.add(4, 12))
    emitted = run.run()
    assert {request_id: len(tokens) for request_id, tokens in emitted.items()} == {"r0": 24, "r2": 24, "r3": 12}
