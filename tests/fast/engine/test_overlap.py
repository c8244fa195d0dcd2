"""A device that reads lengths itself gets a step before the last one is read, and no result changes.

The device is a double, see device_lengths.py. test_lossless.py shows that no token changes under any setting.
"""

import random
from typing import Any

import pytest
import torch

from app.engine.schedule.batch import Batch
from app.engine.sequence import NOT_FINITE
from app.messages import Request
from tests.costs import fast_ones
from tests.fast.engine.device_lengths import DeviceLengthsBackend, device_lengths
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.launch_log import Log
from tests.fast.engine.lossless import LUCKY
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.planted_faults import BAD_TOKEN, NAN, PHASES, Planted, Run, names, overlapping, undisturbed
from tests.fast.engine.planted_faults import engine_of as eager
from tests.fast.engine.steady import steady_costs
from tests.fast.engine.watched_pages import watch

BLOCK = 8


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Five tokens, and its drafts are accepted now and then, to every depth."""
    return make_pair(tmp_path_factory.mktemp("lucky"), **LUCKY)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), seed=1, block_size=BLOCK)


def requests(count: int, vocab_size: int = 5, **asked: Any) -> list[Request]:
    rng = random.Random(3)
    prompts = [tuple(rng.choices(range(min(vocab_size, BAD_TOKEN)), k=rng.randint(2, 30))) for _ in range(count)]
    return [flat_request(f"r{i}", prompt, **{"max_tokens": 24} | asked) for i, prompt in enumerate(prompts)]


def test_the_next_step_is_launched_before_a_step_is_read(lucky: Pair):
    engine = overlapping(lucky)
    log = Log(engine.core)
    (request,) = requests(1)
    run = Run(engine, [request]).to_the_end()
    last = len(log.batches) - 1
    assert last >= 5 and log.batches[0].prefills and log.overlapped == list(range(1, last + 1))
    reads = [event for event in log.events if event[0] == "read"]
    assert reads[:last] == [("read", n) for n in range(last)], "in order, and each once"
    assert run.texts == undisturbed(eager(lucky), [request])


def test_without_graphs_nothing_overlaps(lucky: Pair):
    for settings in ({"enforce_eager": True}, {"draft_enforce_eager": True}):
        with device_lengths():
            assert not eager(lucky, **{"enforce_eager": False, "max_graphs": 4} | settings).core.overlap
    assert not eager(lucky, enforce_eager=False, max_graphs=4).core.overlap, "lengths are the host's"


def test_steps_count_why_the_next_one_was_not_ahead(lucky: Pair):
    reasons = set[str]()
    overlapping(lucky).core.run(requests(2), lambda step: reasons.add(step.stats.not_ahead))
    assert reasons == {"", "end"}
    long = Request("long", tuple(range(5)) * 9, 4)
    overlapping(lucky, max_num_batched_tokens=40).core.run([long], lambda step: reasons.add(step.stats.not_ahead))
    assert reasons == {"", "prefill", "end"}, "a prompt's last part is known to be one"
    reasons.clear()
    eager(lucky).core.run(requests(2), lambda step: reasons.add(step.stats.not_ahead))
    assert reasons == {""}, "only engines that overlap count them"


ASKED: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.8},
    "short": {"temperature": 0.8, "top_k": 3, "top_p": 0.9},
    "open": {"temperature": 1.2, "top_p": 0.7, "min_p": 0.05},
    "counted": {"frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "all": {"temperature": 0.9, "top_k": 4, "presence_penalty": 0.6},
}


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("asked", [*ASKED, "together"])
def test_who_draws_his_tokens_or_counts_them_overlaps(lucky: Pair, speculate: bool, asked: str):
    every = [{}, ASKED[asked]] if asked != "together" else [{}, *ASKED.values()]
    mine = [
        flat_request(f"r{i}", (i % 5, 1, 2), 14 + i, seed=i, speculate=speculate, **each)
        for i, each in enumerate(every)
    ]
    engine = overlapping(lucky, max_num_seqs=6)
    log = Log(engine.core)
    run = Run(engine, mine).to_the_end()
    assert log.overlapped == list(range(1, len(log.batches)))
    assert run.texts == undisturbed(eager(lucky, max_num_seqs=6), mine)


BY_HOST: list[dict[str, Any]] = [
    {"logit_bias": ((1, 2.0),), "presence_penalty": 0.4},
    {"temperature": 1.0, "top_k": 200},
    {"temperature": 1.0, "min_tokens": 9, "frequency_penalty": 0.4},
]


@pytest.mark.parametrize("asked", BY_HOST[:2], ids=str)
def test_who_needs_the_host_is_waited_for(lucky: Pair, asked: dict[str, Any]):
    mine = [*requests(1), flat_request("host", (1, 2), 8, seed=3, **asked)]
    engine = overlapping(lucky)
    log = Log(engine.core)
    run = Run(engine, mine).to_the_end()
    both = [n for n, batch in enumerate(log.batches) if len(batch.entries) == 2]
    assert log.overlapped and not set(both) & set(log.overlapped)
    assert run.texts == undisturbed(eager(lucky), mine)


def test_where_graphs_hold_no_draws_they_are_waited_for(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    """As on several ranks, and with --batch-invariant."""
    mine = [*requests(1), flat_request("drawn", (1, 2), 8, seed=3, **ASKED["all"])]
    expected = undisturbed(eager(lucky), mine)
    monkeypatch.setattr(DeviceLengthsBackend, "batch_invariant", True)
    engine = overlapping(lucky)
    log = Log(engine.core)
    run = Run(engine, mine).to_the_end()
    both = [n for n, batch in enumerate(log.batches) if len(batch.entries) == 2]
    assert log.overlapped and not set(both) & set(log.overlapped)
    assert run.texts == expected


# Ends, which are known a step late


def test_who_is_sure_to_end_is_not_launched_again(lucky: Pair):
    engine = overlapping(lucky)
    log = Log(engine.core)
    short, long = (Request(name, (1, 2, 3), most, speculate=False) for name, most in (("short", 4), ("long", 12)))
    Run(engine, [short, long]).to_the_end()
    assert sum("short" in names(batch.entries) for batch in log.batches) == 4
    assert sum("long" in names(batch.entries) for batch in log.batches) == 12


# Sequences that come and end


def test_a_newcomer_ends_the_overlap_and_is_admitted_in_the_next_step(lucky: Pair):
    first, second = requests(2)
    expected = undisturbed(eager(lucky), [first, second])
    engine = overlapping(lucky)
    log = Log(engine.core)
    run = Run(engine, [first]).until(6, "r0")
    ahead = len(log.batches) - 1
    run.texts["r1"] = []
    run.core.add(second)
    run.step()
    assert log.events[-1] == ("read", ahead) and len(log.batches) == ahead + 1, "nothing is launched behind it"
    run.step()
    assert names(log.batches[ahead + 1].prefills) == {"r1"}
    run.to_the_end()
    assert run.texts == expected and log.overlapped[-1] > ahead + 2


def test_who_cannot_be_admitted_leaves_the_overlap_alone(lucky: Pair):
    asked = requests(4)
    engine = overlapping(lucky, max_num_seqs=2)
    log = Log(engine.core)
    run = Run(engine, asked).until(8, "r0")
    assert run.scheduler.waiting and log.overlapped
    assert run.to_the_end().texts == undisturbed(eager(lucky), asked)


@pytest.mark.exhaustive
@pytest.mark.parametrize("everyone", [False, True])
def test_who_is_aborted_with_a_step_in_flight_frees_its_pages_at_once(lucky: Pair, everyone: bool):
    asked = requests(5, max_tokens=50)
    expected = undisturbed(eager(lucky), asked)
    engine = overlapping(lucky, kv_pages=66 + 9)  # so few that a later sequence gets the freed ones
    log, run = Log(engine.core), Run(engine, asked[:3]).until(6)
    gone = ["r0", "r1", "r2"] if everyone else ["r1"]
    assert run.core.in_flight is not None
    for name in gone:
        pages = set(run.sequence(name).pages)
        used = run.scheduler.pool.num_used
        run.core.abort(name)
        assert run.scheduler.pool.num_used == used - len(pages)
        run.scheduler.check()
        del run.texts[name]
    assert run.core.has_work != everyone
    for request in asked[3:]:
        run.texts[request.request_id] = []
        run.core.add(request)
    before = len(log.batches)
    run.step()
    assert any(batch.prefills for batch in log.batches[before:]) == everyone, "none waits for a step of ended ones"
    run.to_the_end()
    assert run.texts == {name: text for name, text in expected.items() if name not in gone}


@pytest.mark.exhaustive
@pytest.mark.parametrize("verify", ["full", "auto"])
def test_whatever_comes_and_goes_all_say_what_they_say_alone(lucky: Pair, verify: str, monkeypatch: pytest.MonkeyPatch):
    steady_costs(monkeypatch)
    rng = random.Random(7)
    alone = eager(lucky, prefix_caching=False)
    engine = overlapping(lucky, kv_pages=44, prefix_caching=True, max_num_batched_tokens=40, verify=verify)
    watch(engine)
    core, scheduler, log = engine.core, engine.core.scheduler, Log(engine.core)
    asked: dict[str, Request] = {}
    texts: dict[str, list[int]] = {}
    live: list[str] = []
    aborted = set[str]()
    while len(asked) < 80 or core.has_work:
        if len(asked) < 80 and len(live) < 8 and rng.random() < 0.3:
            prompt = tuple(rng.choices(range(2), k=3)) * rng.choice((1, 2, 8, 9))
            name = f"{len(asked)}"
            stop = frozenset([rng.randrange(5)] if rng.random() < 0.3 else [])
            sampling = rng.choice([{}, *ASKED.values(), *BY_HOST]) | {"seed": len(asked)}
            speculate, most = rng.random() < 0.8, rng.randint(1, 40)
            asked[name] = flat_request(name, prompt, most, stop_token_ids=stop, speculate=speculate, **sampling)
            texts[name] = []
            live.append(name)
            core.add(asked[name])
        if live and rng.random() < 0.05:
            aborted.add(name := rng.choice(live))
            live.remove(name)
            core.abort(name)
        if rng.random() < 0.02:
            core.flush_cache()
        if core.has_work:
            for delta in core.step().deltas:
                assert delta.request_id in live and delta.error is None
                texts[delta.request_id] += delta.token_ids
                if delta.finish_reason:
                    live.remove(delta.request_id)
        scheduler.check()
    assert scheduler.pool.num_used == 0
    expected = undisturbed(alone, list(asked.values()))
    for name, text in texts.items():
        assert text == (expected[name][: len(text)] if name in aborted else expected[name])
    assert len(log.overlapped) > 50 and aborted and scheduler.num_preemptions and scheduler.prefix_cache_hits
    policy = scheduler.policy
    assert not policy.histories


@pytest.mark.exhaustive
def test_where_pages_are_short_it_waits_and_no_sequence_ispreempted_behind_a_step_in_flight(lucky: Pair):
    asked = requests(6, max_tokens=50)
    engine = overlapping(lucky, kv_pages=29 + 9)
    log, preempt = Log(engine.core), engine.core.scheduler.preempt

    def watched(seq: Any) -> None:
        assert engine.core.in_flight is None
        preempt(seq)

    engine.core.scheduler.preempt = watched  # type: ignore[method-assign]
    run = Run(engine, asked).to_the_end()
    assert run.scheduler.num_preemptions > 0 and log.overlapped
    assert run.texts == undisturbed(eager(lucky), asked)


# Faults


@pytest.mark.exhaustive
def test_what_refused_drafts_leave_is_scrubbed_and_not_what_was_written_since(pair, monkeypatch):
    """Now and then the drafts of "r1" leave NaN where they are refused; the step behind is in flight by then, and has
    written its own KV there."""
    asked = requests(12, pair.vocab_size)
    settings = {"kv_pages": 48 + 9}
    expected = undisturbed(eager(pair, **settings), asked)
    engine = overlapping(pair, **settings)
    runner, scheduler, log, scrubbed = engine.core.runner, engine.core.scheduler, Log(engine.core), set[int]()
    launch, scrub, ends = engine.core.launch, runner.scrub, [0]
    run = Run(engine, asked)

    def spoilt(batch: Batch) -> Any:
        pending = launch(batch)
        line = next((i for i, rows in enumerate(batch.sampling) if rows.seq.request.request_id == "r1"), None)
        if line is None:
            return pending
        rows, verified = batch.sampling[line], runner.graphs.verified
        start = ends[0] if rows.prev_row >= 0 else rows.end - rows.num_drafts - 1
        accepted = int(verified[line, -1])
        ends[0] = start + accepted + 1
        if len(log.batches) % 3 == 0 and accepted < rows.num_drafts:
            pages = rows.seq.pages
            places = [pages[p // 4] * 4 + p % 4 for p in range(ends[0], len(pages) * 4)]
            for pool in runner.pools:
                pool.layers[0].k.flatten(0, 1)[places] = NAN
                pool.layers[0].v.flatten(0, 1)[places] = NAN
            read = pending.read

            def not_finite() -> Any:
                result = read()
                result.tokens[line][accepted + 1 :] = [NOT_FINITE] * (rows.num_drafts - accepted)
                return result

            pending.read = not_finite
        return pending

    def noted(slots: list[list[int]]) -> None:
        (slot_mapping,) = slots
        known = {seq.pages[p // 4] * 4 + p % 4 for seq in scheduler.running for p in range(seq.num_computed)}
        assert not known & set(slot_mapping)
        scrubbed.update(slot_mapping)
        scrub(slots)

    monkeypatch.setattr(engine.core, "launch", spoilt)
    monkeypatch.setattr(runner, "scrub", noted)
    run.to_the_end()
    assert run.errors() == {} and run.texts == expected
    assert scrubbed and log.overlapped


CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 40, "prefix_caching": True}


@pytest.fixture(scope="module")
def undisturbed_texts(lucky: Pair) -> dict[str, list[int]]:
    return undisturbed(eager(lucky, **CHUNKED), requests(6))


@pytest.mark.parametrize("phase", fast_ones([phase for phase in PHASES if phase != "counts"], ("draft", "read")))
def test_a_sequence_that_raises_is_dropped_and_its_neighbours_say_the_same(
    lucky: Pair, undisturbed_texts: dict[str, list[int]], phase: str, monkeypatch: pytest.MonkeyPatch
):
    good = requests(6)
    engine = overlapping(lucky, **CHUNKED)
    log = Log(engine.core)
    run = Run(engine, good[:2]).until(5)
    PHASES[phase](monkeypatch, engine.core)
    for request in (Request("bad", (1, 0) * 15, 30), *good[2:]):
        run.texts[request.request_id] = []
        run.core.add(request)
    run.to_the_end()
    assert list(run.errors()) == ["bad"] and log.overlapped
    del run.texts["bad"]
    assert run.texts == undisturbed_texts
    assert run.scheduler.num_faults == 1


@pytest.mark.parametrize("where", ["launch", "read"])
@pytest.mark.parametrize("ahead", [True, False], ids=["the step ahead", "the one that is read"])
def test_a_fault_that_passes_costs_no_sequence_a_token(lucky, where, ahead, monkeypatch):
    asked = requests(4)
    expected = undisturbed(eager(lucky), asked)
    engine = overlapping(lucky)
    log, run = Log(engine.core), Run(engine, asked).until(5)
    launch, planted = engine.core.launch, []

    def once(batch: Batch) -> Any:
        pending = launch(batch)
        if not planted and batch.decodes and (batch.decodes[0].prev_row >= 0) == ahead:
            planted.append(batch)
            if where == "launch":
                raise Planted
            pending.read = broken
        return pending

    def broken() -> Any:
        if behind := engine.core.in_flight:  # it stands on what there will never be
            behind.pending.read = lambda: pytest.fail("is read all the same")  # type: ignore[method-assign]
        raise Planted

    if not ahead:
        run.core.add(Request("late", (1, 2), 3))  # so that a step begins with nothing in flight
        run.texts["late"] = []
    monkeypatch.setattr(engine.core, "launch", once)
    run.to_the_end()
    assert planted and run.errors() == {} and log.overlapped[-1] > log.batches.index(planted[0]) + 1
    run.texts.pop("late", None)
    assert run.texts == expected


def test_who_runs_alone_is_not_blamed_for_a_step_that_cannot_be_launched_ahead(lucky, monkeypatch):
    asked = requests(1)
    run = Run(overlapping(lucky), asked).until(4, "r0")
    launch, failed = run.core.launch, []

    def spoilt(batch: Batch) -> Any:
        if batch.decodes and batch.decodes[0].prev_row >= 0:
            failed.append(batch)
            raise Planted
        return launch(batch)

    monkeypatch.setattr(run.core, "launch", spoilt)
    assert run.to_the_end().texts == undisturbed(eager(lucky), asked) and failed and not run.errors()


def test_an_error_of_the_device_behind_a_step_in_flight_ends_the_engine(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    run = Run(overlapping(lucky), requests(2)).until(4)

    def broken(_: Batch) -> Any:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(run.core, "launch", broken)
    with pytest.raises(torch.AcceleratorError):
        run.step()
