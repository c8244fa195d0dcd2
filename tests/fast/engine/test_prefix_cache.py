"""A warm cache gives the same text and acceptance as a cold one, and no step changes a cached page.

`watch` checks every step of an engine. A cached or shared page has the same K and V after it, bit by bit, in the
target's and in the draft's pool. Cold engines, which give the expected texts, have no prefix cache.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.engine import process
from app.engine.load.engine import Engine
from app.engine.schedule.batch import Batch
from app.messages import Request, TokenDelta
from app.wire import FlushCache, Shutdown, Stepped, Submit
from tests.fast.engine.lossless import (
    LUCKY,
    Case,
    Prompt,
    Subject,
    cap,
    demo_folder,
    demo_prompts,
    make_engine,
    random_prompts,
)
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.watched_pages import watch

Counts = list[tuple[int, int, int]]
"""(tokens, verified, accepted) of every step of a request."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module", params=["lucky", pytest.param("demo", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest, folder: Path) -> Subject:
    """The lucky pair accepts drafts to every depth, the demo pair most of them."""
    if request.param == "demo":
        prompts = [prompt for domain in ("math", "copy") for prompt in demo_prompts(domain, 2, max_tokens=32)]
        return Subject("demo", demo_folder("target"), demo_folder("draft"), prompts)
    return lucky_subject(folder)


def lucky_subject(folder: Path) -> Subject:
    pair = make_pair(folder / "lucky", **LUCKY)
    return Subject("lucky", pair.target, pair.draft, random_prompts(pair.vocab_size, 9))


def engine_of(subject: Subject, *, cache: bool = True, **settings: Any) -> Engine:
    sizes = {"page_size": 16, "block_size": 16, "max_model_len": 256, "max_num_seqs": 8, "prefix_caching": cache}
    engine = make_engine(subject.target, subject.draft, **sizes | settings)
    watch(engine)
    return engine


class Answers(dict[str, list[int]]):
    """Request id -> the tokens it emitted; with the counts of its steps and how many tokens were cached."""

    def __init__(self) -> None:
        self.counts: dict[str, Counts] = defaultdict(list)
        self.cached: dict[str, int] = {}

    def take(self, delta: TokenDelta) -> None:
        self.setdefault(delta.request_id, []).extend(delta.token_ids)
        self.counts[delta.request_id].append(
            (len(delta.token_ids), delta.steps[0].n_verified, delta.steps[0].n_accepted)
        )
        assert self.cached.setdefault(delta.request_id, delta.cached_tokens) == delta.cached_tokens

    def add(self, others: "Answers") -> None:
        self.update(others), self.counts.update(others.counts), self.cached.update(others.cached)


def ask(engine: Engine, *requests: Request) -> Answers:
    answers = Answers()
    engine.core.run(list(requests), lambda step: [answers.take(delta) for delta in step.deltas])
    assert engine.core.scheduler.pool.num_used == 0
    engine.core.scheduler.check()
    return answers


def full_pages(prompt: tuple[int, ...], page_size: int) -> int:
    return (len(prompt) - 1) // page_size * page_size


# Cold and warm


MIXED = Case(temperature=None)


def with_prompts(subject: Subject, prompts: list[Prompt]) -> Subject:
    return Subject(subject.name, subject.target, subject.draft, prompts)


def assert_lossless(subject: Subject, answers: Answers, case: Case = MIXED) -> None:
    """The rule of lossless.py, for answers to all of `subject.requests(case)`."""
    comparison = subject.compare([answers[str(index)] for index in range(len(subject.prompts))], case)
    assert not comparison.wrong and len(comparison.differences) <= cap(comparison.tokens)


def assert_accepts(found: Answers, wanted: Answers) -> None:
    """Step by step the same, wherever the text is."""
    assert found.keys() == wanted.keys()
    assert all(found.counts[key] == wanted.counts[key] for key in found if found[key] == wanted[key])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("page_size", "eager"), [(1, True), (4, True), (16, True), (4, False)])
def test_a_warm_request_says_and_accepts_what_a_cold_one_does(subject: Subject, page_size: int, eager: bool):
    settings = {"page_size": page_size, "enforce_eager": eager}
    cold, warm = (engine_of(subject, cache=cache, **settings) for cache in (False, True))
    wanted, first, second = Answers(), Answers(), Answers()
    for request in subject.requests(MIXED):
        wanted.add(ask(cold, request)), first.add(ask(warm, request)), second.add(ask(warm, request))
        assert second.cached[request.request_id] == full_pages(request.token_ids, page_size)
    for found in (first, second):
        assert_lossless(subject, found)
        assert_accepts(found, wanted)
    assert set(wanted.cached.values()) == {0}


@pytest.mark.exhaustive
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_plain_stretches_leave_a_context_that_drafts_hit_on(subject: Subject, eager: bool):
    half = Case(temperature=None, speculation="half")
    cold, warm = (engine_of(subject, cache=cache, enforce_eager=eager, page_size=4) for cache in (False, True))
    said = ask(warm, *(replace(r, speculate=not r.speculate) for r in subject.requests(half)))
    assert_lossless(subject, said)
    turns = with_prompts(
        subject,
        [
            replace(prompt, token_ids=prompt.token_ids + tuple(said[str(index)]), stop_token_ids=frozenset())
            for index, prompt in enumerate(subject.prompts)
        ],
    )
    wanted, found = Answers(), Answers()
    for request in turns.requests(half):
        wanted.add(ask(cold, request)), found.add(ask(warm, request))
        assert found.cached[request.request_id] == full_pages(request.token_ids, 4)
    assert_lossless(turns, found)
    assert_accepts(found, wanted)


@pytest.mark.exhaustive
def test_a_preempted_sequence_goes_on_from_its_own_pages(subject: Subject, monkeypatch: pytest.MonkeyPatch):
    endless = with_prompts(subject, [replace(prompt, stop_token_ids=frozenset()) for prompt in subject.prompts])
    pages = 1 + -(-(endless.max_model_len + 32) // 4)
    tight = engine_of(endless, page_size=4, max_model_len=endless.max_model_len, kv_pages=pages)
    scheduler, recomputed = tight.core.scheduler, []
    schedule = scheduler.schedule

    def noted() -> Batch:
        batch = schedule()
        admitted = (entry.seq for entry in batch.prefills if entry.seq.request.request_id in batch.begun)
        recomputed.extend(seq.num_reused for seq in admitted if seq.num_ended_runs)
        return batch

    monkeypatch.setattr(scheduler, "schedule", noted)
    assert_lossless(endless, ask(tight, *endless.requests(MIXED)))
    assert scheduler.num_preemptions == len(recomputed) > 0 and max(recomputed) > 0


def test_requests_with_different_salts_share_nothing(folder: Path):
    subject = lucky_subject(folder)
    engine = engine_of(subject)
    request = replace(subject.requests(Case())[0], cache_salt="mine")
    cached = []
    for salt in ("mine", "yours", "", "mine"):
        answers = ask(engine, replace(request, cache_salt=salt))
        cached.append(answers.cached[request.request_id])
    assert cached == [0, 0, 0, full_pages(request.token_ids, 16)]


# Any tree of prefixes


def tree_of_prompts(subject: Subject, count: int, rng: random.Random) -> list[Prompt]:
    """Half of them grow out of one another; the others go on where one of these and its answer end."""
    vocab_size = subject.reference.config.vocab_size

    def grown(stem: tuple[int, ...]) -> Prompt:
        more = tuple(rng.randrange(vocab_size) for _ in range(rng.choice((0, 1, 4, 9, 20))))
        token_ids = ((*stem, *more) or (0,))[:90]
        stop = frozenset([rng.randrange(vocab_size)] if rng.random() < 0.2 else [])
        return Prompt(token_ids, rng.choice((1, 3, 8, 17)), stop)

    prompts: list[Prompt] = [grown(())]
    while len(prompts) < count // 2:
        stem = rng.choice(prompts[-20:]).token_ids
        prompts.append(grown(stem if rng.random() < 0.5 else stem[: rng.randint(0, len(stem))]))
    answers = with_prompts(subject, prompts).off(0.0)
    for _ in range(count - len(prompts)):
        index = rng.randrange(len(answers))
        prompts.append(grown((*prompts[index].token_ids, *answers[index])))
    rng.shuffle(prompts)
    return prompts


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "eager", "count"),
    [
        ("lucky", True, 60),
        ("lucky", False, 160),
        pytest.param("lucky", False, 400, marks=pytest.mark.slow),
        pytest.param("grouped", True, 400, marks=pytest.mark.slow),
        pytest.param("demo", True, 400, marks=pytest.mark.slow),
    ],
)
def test_requests_over_a_tree_of_prefixes_get_no_wrong_token_and_leave_no_page(folder, name, eager, count):
    rng = random.Random(f"{name} {count}")
    if name == "demo":
        subject = Subject("demo", demo_folder("target"), demo_folder("draft"), [])
    else:
        shape = LUCKY if name == "lucky" else {"seed": 1, "block_size": 16}
        pair = make_pair(folder / name, **shape)
        subject = Subject(name, pair.target, pair.draft, [])
    subject.prompts = tree_of_prompts(subject, count, rng)
    case = Case(temperature=None, speculation="half")
    waiting, answers, aborted = list(subject.requests(case)), Answers(), set()
    engine = engine_of(
        subject,
        page_size=4,
        max_model_len=subject.max_model_len,
        max_num_seqs=6,
        max_num_batched_tokens=6 * 16,
        kv_pages=-(-(subject.max_model_len + 32) // 4) + (8 if eager else 8 + 6 * 16 // 4),  # and scratch pages
        enforce_eager=eager,
    )
    core, live = engine.core, set()
    while waiting or core.has_work:
        for request in [waiting.pop() for _ in range(min(len(waiting), rng.randint(0, 4)))]:
            core.add(request)
            live.add(request.request_id)
        if live and rng.random() < 0.05:
            gone = rng.choice(sorted(live))
            core.abort(gone)
            live.remove(gone)
            aborted.add(gone)
        while core.has_work and (len(live) > 12 or not waiting or rng.random() < 0.7):
            for delta in core.step().deltas:
                answers.take(delta)
                if delta.finish_reason:
                    live.remove(delta.request_id)
    scheduler = core.scheduler
    assert not live and scheduler.pool.num_used == 0
    scheduler.check()
    texts = []
    for index in range(count):
        expected = subject.off(case.temperature_of(index))[index]
        text = answers.get(str(index), [])
        texts.append(text + expected[len(text) :] if str(index) in aborted else text)
    comparison = subject.compare(texts, case)
    hits, queries = scheduler.prefix_cache_hits, scheduler.prefix_cache_queries
    print(f"{hits} of {queries} prompt tokens found, {scheduler.num_preemptions} preemptions, {len(aborted)} aborts")
    assert not comparison.wrong and len(comparison.differences) <= cap(comparison.tokens)
    assert hits > queries / 10 and scheduler.num_preemptions > 0 and aborted


@pytest.mark.parametrize("prompt", [[0], list(range(4)) * 5], ids=["too short for a hit", "with a hit"])
def test_a_request_that_ends_in_its_first_step_has_begun_in_it(folder: Path, prompt: list[int]):
    core = engine_of(lucky_subject(folder), page_size=4).core
    for name in ("cold", "warm"):
        core.add(Request(name, prompt, 1))
        step = core.step()
        assert [delta.request_id for delta in step.deltas if delta.finish_reason] == [name]
        assert step.scheduled == [name]


# The engine process


def test_the_warm_up_leaves_nothing_in_the_cache(folder: Path):
    scheduler = engine_of(lucky_subject(folder), page_size=1).core.scheduler
    assert not scheduler.pool.cached and scheduler.pool.num_used == 0
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (0, 0)


class StandInLink:
    """Hands out commands, a list at a time, and keeps the replies."""

    def __init__(self, commands: list[list[Any]]) -> None:
        self._commands: Iterator[list[Any]] = iter(commands)
        self.sent: list[Stepped] = []

    def receive(self, wait_ms: int | None) -> list[Any]:
        return next(self._commands) if wait_ms is None else []

    def send(self, reply: Stepped) -> None:
        self.sent.append(reply)


def test_a_flush_is_answered_and_what_was_cached_is_computed_again(folder: Path):
    engine = engine_of(lucky_subject(folder), page_size=4, cache_events=True)
    prompt = list(range(4)) * 5

    def submit(request_id: str) -> list[Any]:
        return [Submit(Request(request_id, prompt, 4))]

    link = StandInLink([submit("a"), submit("b"), [FlushCache()], submit("c"), submit("d"), [Shutdown()]])
    process.serve(link, engine)
    cached = {delta.request_id: delta.cached_tokens for reply in link.sent for delta in reply.output.deltas}
    assert cached == {"a": 0, "b": 16, "c": 0, "d": 16}
    [flushed] = [reply.output for reply in link.sent if not reply.output.deltas]
    assert flushed.stats.kind == "idle" and flushed.stats.used_pages == 0
    assert [event.kind for event in flushed.cache_events] == ["cleared"], "no step follows that would publish it"
    last = link.sent[-1].output.stats
    assert (last.prefix_cache_queries, last.prefix_cache_hits) == (80, 32)
