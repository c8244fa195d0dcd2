"""A hybrid target's prefix cache: a hit begins with a checkpoint of the state, and the text is that of a cold engine.

`WatchedStates` holds every checkpoint against a recomputation, and asserts that no step writes one.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine
from app.engine.load.memory import checkpoints_in
from app.engine.schedule.state_slots import StateSlots
from app.messages import Request
from tests.costs import fast_ones
from tests.fast.engine.device_lengths import device_lengths
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.hybrid_reference import HybridReference, hybrid_subject
from tests.fast.engine.launch_log import Log
from tests.fast.engine.lossless import Case, Subject, assert_lossless, make_engine
from tests.fast.engine.pairs import Pair
from tests.fast.engine.planted import PlannedRun
from tests.fast.engine.planted import make_engine as make_planted_engine
from tests.fast.engine.planted_faults import NAN, Planted, Run, names
from tests.fast.engine.reference import greedy
from tests.fast.engine.watched_states import WatchedStates

torch.set_num_threads(1)
BLOCK = 8
PAGE = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_hybrid_pair(tmp_path_factory.mktemp("hybrid"), seed=2, block_size=BLOCK, max_position_embeddings=256)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> HybridReference:
    return HybridReference(pair.target)


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut prompts every few pages, because those of tests are short."""

    def make(states: Any, sizes: Any) -> StateSlots:
        return StateSlots(sizes.max_num_seqs, states.num_checkpoints, 3 * sizes.page_size)

    monkeypatch.setattr("app.engine.load.engine.make_state_slots", make)


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = Random(1000 * seed + length)
    return tuple(draw.randrange(97) for _ in range(length))


def engine_of(pair: Pair, **settings: Any) -> Engine:
    sizes = {"page_size": PAGE, "max_model_len": 160, "max_num_seqs": 4, "block_size": BLOCK}
    return make_engine(pair.target, pair.draft, **sizes | settings)


class Chat:
    """Requests to one engine, one after another. `cached` has what was found for each."""

    def __init__(self, engine: Engine, reference: HybridReference) -> None:
        self.engine, self.reference = engine, reference
        self.watch = WatchedStates(engine, reference)
        self.cached: list[int] = []

    def ask(self, prompt: tuple[int, ...], max_tokens: int = 10, **fields: Any) -> tuple[int, ...]:
        """Return the answer, which must be the reference's."""
        request = Request(f"r{len(self.cached)}", prompt, max_tokens, **fields)
        found = set[int]()

        def note(step: Any) -> None:
            found.update(delta.cached_tokens for delta in step.deltas)
            self.watch.check()

        said = self.engine.core.run([request], note)[request.request_id]
        assert said == greedy(self.reference, list(prompt), max_tokens)
        self.engine.core.scheduler.check()
        assert self.engine.core.scheduler.states.num_used == 0
        (cached,) = found
        self.cached.append(cached)
        return tuple(said)


def last_full_page(length: int) -> int:
    return (length - 1) // PAGE * PAGE


# Hits


@pytest.mark.parametrize("length", [1, 5, 24])
def test_a_prompt_that_comes_again_hits_up_to_its_last_page(pair: Pair, reference: HybridReference, length: int):
    chat = Chat(engine_of(pair), reference)
    for _ in range(2):
        chat.ask(tokens_of(length))
    assert chat.cached == [0, last_full_page(length)]


@pytest.mark.parametrize("length", [3, 22])
def test_a_conversation_hits_up_to_the_last_page_of_the_answer(pair: Pair, reference: HybridReference, length: int):
    chat = Chat(engine_of(pair), reference)
    text, expected = tokens_of(length), [0]
    for turn in range(3):
        text += chat.ask(text, 7 + 3 * turn)
        expected.append(last_full_page(len(text)))
        text += tokens_of(2 + turn)
    chat.ask(text)
    assert chat.cached == expected
    assert chat.watch.num_checked >= 6


@pytest.mark.parametrize("max_tokens", fast_ones(range(4, 10), (6, 7)))
@pytest.mark.parametrize("speculate", [True, False])
def test_steps_that_overlap_leave_the_same_checkpoints(pair, reference, max_tokens, speculate):
    with device_lengths():
        engine = engine_of(pair, enforce_eager=False, max_graphs=4)
    assert engine.core.overlap
    chat, text = Chat(engine, reference), tokens_of(6)
    text += chat.ask(text, max_tokens, speculate=speculate)
    chat.ask((*text, 1))
    assert chat.cached == [0, (len(text) - 1) // PAGE * PAGE]


@pytest.mark.parametrize("length", [24, 26])
def test_a_prompt_with_a_step_launched_behind_it_leaves_its_checkpoints(pair, reference, length):
    """That of its last page too, if the prompt ends with it: the step behind the prompt writes another slot."""
    with device_lengths():
        engine = engine_of(pair, enforce_eager=False, max_graphs=4)
    chat, log, prompt = Chat(engine, reference), Log(engine.core), tokens_of(length)
    chat.ask(prompt, 3, speculate=False)
    assert log.batches[0].prefills and 1 in log.overlapped
    chat.ask((*prompt, *tokens_of(5)))
    assert chat.cached == [0, 24]


@pytest.mark.parametrize("caching", [False, True])
def test_a_prompt_that_fails_between_its_chunks_gives_the_spare_slot_back(pair, caching, monkeypatch):
    engine = engine_of(pair, max_num_batched_tokens=32, prefix_caching=caching, enforce_eager=True)
    run = Run(engine, [flat_request("bad", tokens_of(60), 9)])
    run.step()
    launch = engine.core.launch

    def fails(batch: Any) -> Any:
        if "bad" in names(batch.entries):
            raise Planted
        return launch(batch)

    monkeypatch.setattr(engine.core, "launch", fails)
    run.step()
    engine.core.scheduler.check()
    assert list(run.errors()) == ["bad"]
    run.texts["next"] = []
    engine.core.add(flat_request("next", tokens_of(59), 9))
    for _ in range(40):
        if engine.core.has_work:
            run.step()
    assert not engine.core.has_work, "a later prompt waits for ever"


@pytest.mark.parametrize("cut", fast_ones(range(BLOCK), (3,)))
def test_an_answer_of_any_accepted_count_is_continued(pair: Pair, reference: HybridReference, cut: int):
    engine = make_planted_engine(pair, page_size=PAGE, max_model_len=96, max_num_seqs=2, prefix_caching=True)
    watch, prompt = WatchedStates(engine, reference), tokens_of(9)
    text = [*prompt, *greedy(reference, list(prompt), 40 + 2 * BLOCK)]
    run = PlannedRun(engine, {"first": text, "next": text}, cut)
    run.add(Request("first", prompt, 17 + cut))
    while engine.core.has_work:
        run.step()
        watch.check()
    known = len(prompt) + 17 + cut
    run.run([Request("next", tuple(text[: known + 1]), 40 - 18 - cut)])
    assert run.emitted["next"] == text[known + 1 : len(prompt) + 40]
    assert {delta.cached_tokens for delta in run.deltas["next"]} == {last_full_page(known)}


def test_a_hit_where_a_prompt_was_cut_gives_the_bits_of_a_cold_prefill(pair: Pair):
    """The chunks behind the cut have the same rows, so each operator has the same shapes."""
    stem, sizes = tokens_of(130), {"max_model_len": 200, "max_num_seqs": 1, "state_cache_memory": 1 << 20}
    question = Request("r", (*stem[:129], *tokens_of(50, seed=1)), 20)
    cold, warm = engine_of(pair, **sizes), engine_of(pair, **sizes)
    kept = []
    for engine in (cold, warm):
        engine.core.scheduler.states.interval = 64
        if engine is warm:
            engine.core.run([Request("stem", (*stem, *tokens_of(9, seed=2)), 4)])
        seen, target = [], engine.core.runner.forward.target
        target.forward = partial(recorded, target.forward, seen)
        answer = engine.core.run([question])["r"]
        kept.append((answer, seen))
    assert warm.core.scheduler.prefix_cache_hits == 128
    assert kept[0][0] == kept[1][0]
    assert len(kept[0][1]) == len(kept[1][1]) + 2, "two chunks of 64 rows were found"
    assert all(map(torch.equal, kept[0][1][2:], kept[1][1]))


def recorded(forward: Any, seen: list[torch.Tensor], *args: Any) -> Any:
    out = forward(*args)
    seen.append(out[0].clone())
    return out


def test_requests_that_begin_alike_wait_for_the_checkpoint(pair: Pair, reference: HybridReference):
    engine = engine_of(pair)
    watch = WatchedStates(engine, reference)
    requests = [Request(f"r{i}", tokens_of(30), 6) for i in range(3)]
    said = engine.core.run(requests, lambda _: watch.check())
    assert set(map(tuple, said.values())) == {tuple(greedy(reference, list(tokens_of(30)), 6))}
    assert engine.core.scheduler.prefix_cache_hits == 2 * 28


# Isolation, flush, eviction


def test_salts_share_no_state(pair: Pair, reference: HybridReference):
    chat = Chat(engine_of(pair, state_cache_memory=1 << 20), reference)
    for salt in ("mine", "yours", "", "mine"):
        chat.ask(tokens_of(22), cache_salt=salt)
    assert chat.cached == [0, 0, 0, 20]


def test_a_flush_forgets_all_states(pair: Pair, reference: HybridReference):
    engine = engine_of(pair)
    chat = Chat(engine, reference)
    chat.ask(tokens_of(22))
    engine.core.flush_cache()
    assert engine.core.scheduler.states.num_used_checkpoints == 0
    chat.ask(tokens_of(22))
    assert chat.cached == [0, 0]


def test_a_flush_leaves_running_sequences_what_they_read(pair: Pair, reference: HybridReference):
    engine = engine_of(pair)
    chat = Chat(engine, reference)
    text = tokens_of(21) + chat.ask(tokens_of(21))
    engine.core.add(Request("running", text, 12))
    said = list[int]()
    while engine.core.has_work:
        said += [token for delta in engine.core.step().deltas for token in delta.token_ids]
        engine.core.flush_cache()
        engine.core.scheduler.check()
    assert said == greedy(reference, list(text), 12)
    assert engine.core.scheduler.states.num_used_checkpoints == 0


def bytes_of(engine: Engine, checkpoints: int) -> int:
    assert engine.states is not None
    return checkpoints * (engine.states.slot_bytes + engine.states.pending_bytes)


def test_the_least_recently_used_checkpoint_is_evicted(pair: Pair, reference: HybridReference):
    size = bytes_of(engine_of(pair), 1)
    engine = engine_of(pair, state_cache_memory=3 * size + 1, max_num_seqs=1)
    assert engine.core.scheduler.states.num_checkpoints == 3
    chat, prompts = Chat(engine, reference), [tokens_of(21, seed=i) for i in range(4)]
    for chosen in (0, 1, 0, 2, 3, 0, 1):  # of one token, so each leaves the checkpoint of its prompt alone
        chat.ask(prompts[chosen], 1)
    assert chat.cached == [0, 0, 20, 0, 0, 20, 0]


@pytest.mark.exhaustive
def test_one_checkpoint_is_enough_for_many_sequences(pair: Pair, reference: HybridReference, short_interval: None):
    size = bytes_of(engine_of(pair), 1)
    engine = engine_of(pair, state_cache_memory=size, max_num_seqs=4, max_num_batched_tokens=4 * BLOCK)
    watch = WatchedStates(engine, reference)
    prompts = {f"r{i}": tokens_of(10 + 7 * i, seed=i % 3) for i in range(7)}
    said = engine.core.run([Request(name, prompt, 9) for name, prompt in prompts.items()], lambda _: watch.check())
    assert said == {name: greedy(reference, list(prompt), 9) for name, prompt in prompts.items()}


def test_a_checkpoint_goes_with_its_page(pair: Pair, reference: HybridReference):
    pages = -(-(64 + 2 * BLOCK) // PAGE) + 1
    engine = engine_of(pair, max_model_len=64, max_num_seqs=1, kv_pages=pages, state_cache_memory=1 << 20)
    chat = Chat(engine, reference)
    chat.ask(tokens_of(21), 4)
    assert engine.core.scheduler.states.num_used_checkpoints > 0
    chat.ask(tokens_of(50, seed=1), 8)  # takes all pages but a few
    chat.ask(tokens_of(21), 4)
    assert chat.cached == [0, 0, 0]
    assert set(engine.core.scheduler.states.checkpoints) <= set(engine.core.scheduler.pool.cached)


def test_no_checkpoint_follows_a_page_that_was_cached_from_another_sequence_and_evicted(pair: Pair) -> None:
    """Of two prompts that are alike the second computes the last page again, where it decodes at once. The first one's
    page is evicted in the step before."""
    pages = -(-(64 + 2 * BLOCK) // PAGE) + 1
    sizes = {"max_model_len": 64, "max_num_seqs": 3, "kv_pages": pages, "enforce_eager": True}
    core = engine_of(pair, **sizes, state_cache_memory=1 << 20).core
    for name, max_tokens in (("ends", 1), ("goes on", 20)):
        core.add(Request(name, tokens_of(5 * PAGE), max_tokens))
    core.step()
    core.add(Request("evicts", tokens_of(41, seed=1), 8))
    while core.has_work:
        core.step()
        core.scheduler.check()


def test_apreempted_sequence_goes_on_from_a_checkpoint(pair: Pair, reference: HybridReference):
    engine = engine_of(pair)
    watch, scheduler = WatchedStates(engine, reference), engine.core.scheduler
    prompts = {f"r{i}": tokens_of(9 + 6 * i, seed=i) for i in range(2)}
    for name, prompt in prompts.items():
        engine.core.add(Request(name, prompt, 14))
    said, resumed = dict[str, list[int]](), []
    for number in itertools.count():
        if not engine.core.has_work:
            break
        if number == 5:
            scheduler.preempt(preempted := scheduler.running[-1])
        for delta in engine.core.step().deltas:
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
        watch.check()
        if number == 5:
            resumed.append(preempted.num_reused)
    assert said == {name: greedy(reference, list(prompt), 14) for name, prompt in prompts.items()}
    assert resumed[0] >= 16, "more than the prompt was found"


# On == off


CASES = [
    Case(concurrency=4, page_size=4, block_size=8, cached=True),
    Case(concurrency=4, page_size=1, chunked=True, preempted=True, temperature=None, sampling="all", cached=True),
    Case(concurrency=4, page_size=16, speculation="half", block_size=4, temperature=0.7, path="graphs", cached=True),
    Case(concurrency=4, page_size=4, block_size=8, path="overlap", cached=True),
    Case(concurrency=1, page_size=1, block_size=16, path="overlap", chunked=True, cached=True),
]


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return hybrid_subject(tmp_path_factory.mktemp("lucky"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dflash_and_a_cache_change_no_token(lucky: Subject, case: Case, short_interval: None):
    engine = lucky.engine(case)
    watch, emitted = WatchedStates(engine, lucky.reference), dict[str, list[int]]()  # type: ignore[arg-type]
    requests = lucky.requests(case)
    emitted = engine.core.run(requests, lambda _: watch.check())
    assert_lossless(lucky.compare([emitted[request.request_id] for request in requests], case))
    scheduler = engine.core.scheduler
    assert scheduler.prefix_cache_hits > 0 and watch.num_checked > 0
    assert (scheduler.num_preemptions > 0) == case.preempted


# Faults


def remembered(engine: Engine) -> Iterator[torch.Tensor]:
    """State and conv inputs of every checkpoint that can be found."""
    slots = torch.tensor(sorted(engine.core.scheduler.states.checkpoints.values()), dtype=torch.long)
    for number in engine.core.runner.forward.target.config.gated_delta.layers:
        memory = engine.core.runner.pools[0].layers[number]
        yield from (memory.matrix[slots], memory.conv[slots])


@torch.inference_mode()
def poison(engine: Engine, slot: int) -> None:
    for number in engine.core.runner.forward.target.config.gated_delta.layers:
        engine.core.runner.pools[0].layers[number].matrix[slot] = NAN


def test_nan_in_a_state_is_in_no_checkpoint(pair: Pair, reference: HybridReference):
    engine = engine_of(pair, enforce_eager=True)
    asked = [flat_request(f"r{i}", tokens_of(9 + 4 * i, seed=i), 24) for i in range(3)]
    run = Run(engine, asked).until(4)
    bad = run.sequence("r1")
    poison(engine, bad.state_slot)
    while engine.core.has_work:
        run.step()
        assert all(x.isfinite().all() for x in remembered(engine)) or run.errors() == {}
        engine.core.scheduler.check()
    assert list(run.errors()) == ["r1"]
    assert all(x.isfinite().all() for x in remembered(engine))
    again = engine.core.run([replace(request, request_id=f"{request.request_id} again") for request in asked])
    wanted = {f"{r.request_id} again": greedy(reference, list(r.token_ids), r.max_tokens) for r in asked}
    assert again == wanted


def test_a_request_that_finds_nan_is_recomputed_without_the_cache(pair: Pair, reference: HybridReference):
    engine, prompt = engine_of(pair, enforce_eager=True), tokens_of(22)
    engine.core.run([Request("first", prompt, 1)])
    for slot in list(engine.core.scheduler.states.checkpoints.values()):
        poison(engine, slot)
    assert engine.core.run([Request("second", prompt, 9)])["second"] == greedy(reference, list(prompt), 9)
    assert all(x.isfinite().all() for x in remembered(engine))
    engine.core.scheduler.check()


# Sizes


def test_there_are_two_checkpoints_for_each_sequence_unless_their_memory_is_given(pair: Pair):
    engine = engine_of(pair, max_num_seqs=3)
    assert engine.states is not None and engine.states.num_checkpoints == 6
    stats = engine.core.scheduler.stats()
    assert (stats.num_state_slots, stats.used_state_checkpoints, stats.num_state_checkpoints) == (4, 0, 6)
    given = engine_of(pair, max_num_seqs=3, state_cache_memory=5 * bytes_of(engine, 1) + 1)
    assert given.states is not None and given.states.num_checkpoints == 5
    assert given.states.checkpoint_bytes == bytes_of(engine, 5)
    assert given.states.nbytes - given.states.checkpoint_bytes == bytes_of(engine, 5), "scratch, 3 and a spare one"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_cache_memory": 1}, "--state-cache-memory 0MiB holds no recurrent state, which takes 1 MiB"),
        ({"state_cache_memory": 1 << 60}, r"--state-cache-memory \d+MiB does not fit: \d+ MiB are free"),
        ({"state_cache_memory": 1 << 20, "prefix_caching": False}, "--no-prefix-caching turns off"),
    ],
)
def test_memory_that_cannot_be_used_is_refused(pair: Pair, settings: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        engine_of(pair, **settings)


def test_checkpoints_take_a_quarter_of_free_memory_at_most():
    config, sizes = SimpleNamespace(state_cache_memory=None), SimpleNamespace(max_num_seqs=100)
    assert checkpoints_in(config, sizes, 10, 400, None) == 10  # type: ignore[arg-type]
