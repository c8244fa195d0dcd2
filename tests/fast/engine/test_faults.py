"""A fault of one sequence ends it, with an error that gives the reason. The texts of its neighbours do not change."""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from app.engine.load.engine import Engine
from app.engine.npu.error_codes import explain
from app.engine.step.inputs import Layout
from app.messages import Request, SamplingParams
from tests.costs import fast_ones
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.lossless import LUCKY
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.pending_context import pending_steps
from tests.fast.engine.planted_faults import (
    BAD_TOKEN,
    NAN,
    PAGE,
    PHASES,
    Planted,
    Run,
    during,
    engine_of,
    names,
    overlapping,
    requests,
    undisturbed,
)
from tests.fast.engine.steady import steady_costs

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 7},
    "filtered": {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9},
    "penalised": {"temperature": 0.6, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), seed=1, block_size=8)


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Its drafts are accepted now and then."""
    return make_pair(tmp_path_factory.mktemp("lucky"), **LUCKY)


def test_a_feature_that_is_not_finite_leaves_finite_context_kv(pair: Pair) -> None:
    drafter = engine_of(pair).core.runner.forward.drafter
    assert drafter is not None
    features = torch.zeros(3, drafter.model.fc.shape[1])
    features[0, 1], features[1, 2], features[2] = NAN, float("inf"), NAN
    rows = torch.arange(3, dtype=torch.int32)
    with torch.inference_mode():
        drafter.write_context(features, rows, PAGE + rows)
    assert all(part.isfinite().all() for kv in drafter.pool.layers for part in (kv.k, kv.v))


# Logits that are not finite


@pytest.mark.parametrize(
    "case",
    fast_ones([*itertools.product(("eager", "graphs"), WAYS), ("overlap", "greedy")], [("eager", "penalised")]),
    ids=", ".join,
)
def test_a_sequence_whose_logits_are_nan_ends_with_an_error_and_never_spreads(pair: Pair, case: tuple[str, str]):
    path, way = case
    scratch = 1 if path == "eager" else -(-(4 * 8 + 1) // PAGE)
    settings: dict[str, Any] = {"enforce_eager": path == "eager", "kv_pages": 48 + scratch}
    make = overlapping if path == "overlap" else engine_of
    asked = requests(pair, 12, **WAYS[way])
    plain = undisturbed(engine_of(pair, **settings), asked)
    run = Run(make(pair, **settings), asked).until(6)
    run.poison(run.sequence("r1").pages[:1].tolist())
    run.to_the_end()
    assert list(run.errors()) == ["r1"] and "not finite" in run.errors()["r1"]
    said = run.texts.pop("r1")
    assert 6 <= len(said) < 24 and said == plain.pop("r1")[: len(said)]
    assert run.texts == plain, "eight later ones have had its pages"
    assert (run.scheduler.num_not_finite, run.scheduler.num_faults) == (1, 0)


@pytest.mark.parametrize("way", fast_ones(WAYS, ("greedy",)))
def test_a_prompt_that_gives_nan_gets_no_token(pair: Pair, way: str):
    good = requests(pair, 4, **WAYS[way])
    bad = flat_request("bad", (3, 4, BAD_TOKEN, 5), 9, **WAYS[way])
    plain = undisturbed(engine_of(pair, kv_pages=40), good)
    run = Run(engine_of(pair, kv_pages=40), [good[0], bad, *good[1:]]).to_the_end()
    assert list(run.errors()) == ["bad"] and "0 tokens into the answer" in run.errors()["bad"]
    assert run.texts.pop("bad") == []
    assert run.texts == plain


def test_the_pages_of_who_leaves_before_its_logits_are_known_are_scrubbed_too(pair: Pair):
    good = requests(pair, 6)
    settings: dict[str, Any] = {"max_num_batched_tokens": 32, "kv_pages": 40}
    plain = undisturbed(engine_of(pair, **settings), good)
    run = Run(engine_of(pair, **settings), [Request("bad", (BAD_TOKEN,) * 60, 9)])
    run.step()
    assert run.sequence("bad").num_computed == 32
    run.core.abort("bad")
    del run.texts["bad"]
    for request in good:
        run.texts[request.request_id] = []
        run.core.add(request)
    run.to_the_end()
    assert run.errors() == {} and run.texts == plain


def test_pages_that_may_hold_nan_are_found_by_no_sequence(pair: Pair):
    """They were cached when the prompt's first chunks were computed, before anyone could know."""
    engine = engine_of(pair, max_num_batched_tokens=32, prefix_caching=True)
    bad = Request("bad", (1, 2, BAD_TOKEN) * 16, 9)
    run = Run(engine, [bad])
    run.step()
    assert run.scheduler.pool.cached
    run.to_the_end()
    assert list(run.errors()) == ["bad"] and not run.scheduler.pool.cached


@pytest.mark.parametrize(("live_part", "make"), [(True, engine_of), (False, engine_of), (True, overlapping)])
def test_who_shares_pages_with_nan_is_computed_anew_and_says_what_it_would_have_said(pair, live_part, make):
    sampling = SamplingParams(temperature=0.7, seed=4, frequency_penalty=0.5 * (make is overlapping))
    first, second = (Request(name, (*range(20), last), 16, sampling) for name, last in (("first", 30), ("second", 31)))
    plain = undisturbed(engine_of(pair), [second])
    run = Run(make(pair, prefix_caching=True), [first]).until(3, "first")
    pages = run.sequence("first").pages[:5].tolist()
    if not live_part:
        run.to_the_end()
        run.poison(pages)
    run.texts["second"] = []
    run.core.add(second)
    if live_part:
        run.until(4, "second")
        run.poison(pages)
    run.to_the_end()
    assert run.scheduler.prefix_cache_hits == 20
    assert list(run.errors()) == (["first"] if live_part else [])
    assert run.texts["second"] == plain["second"]
    assert run.scheduler.num_not_finite == live_part


def test_features_that_are_not_finite_spoil_no_drafts_but_their_own(lucky: Pair):
    asked = requests(lucky, 10, max_tokens=40)

    def accepted(spoil: bool) -> tuple[dict[str, list[int]], dict[str, int]]:
        engine = engine_of(lucky, kv_pages=60)
        drafter = engine.core.runner.forward.drafter
        write = drafter.write_context

        def spoilt(features: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, *rotation: Any) -> None:
            if spoil and any(seq.request.request_id == "r1" for seq in engine.core.scheduler.running):
                (seq,) = (seq for seq in engine.core.scheduler.running if seq.request.request_id == "r1")
                own = torch.isin(slot_mapping // PAGE, torch.tensor(seq.pages.tolist()))
                features = features.masked_fill(own[:, None], NAN)
            write(features, positions, slot_mapping, *rotation)

        drafter.write_context = spoilt
        found = dict.fromkeys((request.request_id for request in asked), 0)
        texts: dict[str, list[int]] = {request.request_id: [] for request in asked}
        for request in asked:
            engine.core.add(request)
        while engine.core.has_work:
            for delta in engine.core.step().deltas:
                found[delta.request_id] += delta.steps[0].n_accepted
                texts[delta.request_id] += delta.token_ids
        return texts, found

    texts, found = accepted(False)
    spoilt_texts, spoilt = accepted(True)
    assert spoilt_texts == texts
    assert {**spoilt, "r1": 0} == {**found, "r1": 0} and sum(found.values()) > 50


# Exceptions

CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 40, "prefix_caching": True}


@pytest.fixture(scope="module")
def plain_texts(pair: Pair) -> Callable[[bool], dict[str, list[int]]]:
    """Texts of six penalised requests that nothing disturbs, with drafts or without."""

    @cache
    def texts(speculate: bool) -> dict[str, list[int]]:
        asked = requests(pair, 6, speculate=speculate, **WAYS["penalised"])
        return undisturbed(engine_of(pair, **CHUNKED), asked)

    return texts


FAST_CASES = [f"{phase}, drafts" for phase in ("admission", "build", "counts", "accept")]


@pytest.mark.parametrize(
    "case",
    fast_ones(
        [f"{phase}, {way}" for phase in PHASES for way in ("drafts", "plain")[: 1 + (phase != "draft")]], FAST_CASES
    ),
)
def test_a_sequence_that_raises_is_dropped_and_its_neighbours_say_the_same(pair, plain_texts, case, monkeypatch):
    phase, way = case.split(", ")
    speculate = way == "drafts"
    asked = {"speculate": speculate, **WAYS["penalised"]}
    good = requests(pair, 6, **asked)
    engine = engine_of(pair, **CHUNKED)
    bad = flat_request("bad", (9, 8, 7) * 10, 30, **asked)
    run = Run(engine, good[:2])
    run.until(5)
    PHASES[phase](monkeypatch, engine.core)
    for request in (bad, *good[2:]):
        run.texts[request.request_id] = []
        run.core.add(request)
    run.to_the_end()
    assert list(run.errors()) == ["bad"]
    assert "dropped because its step failed" in run.errors()["bad"]
    del run.texts["bad"]
    assert run.texts == plain_texts(speculate)
    assert (run.scheduler.num_faults, run.scheduler.num_not_finite) == (1, 0)


def test_context_kv_that_waits_survives_the_step_that_fails(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    """It is of steps that were committed. Two decode plainly, so that it waits, and one raises; then the other's
    context is whole."""
    engine = engine_of(lucky)
    with torch.inference_mode():
        engine.core.runner.pools[1].all_layers.k.zero_()  # what the warm-up has left
    asked = [Request(name, (1, 2, 3), 20, speculate=False) for name in ("r0", "bad")]
    forward = engine.core.runner.forward
    pending = pending_steps(forward.pending_context)
    run = Run(engine, asked).until(6, "r0")
    assert len(pending) > 2
    with monkeypatch.context() as patch:
        during("deciding", behind=True)(patch, engine.core)
        run.step()
    forward.pending_context.write()
    seq = run.sequence("r0")
    slot_mapping = torch.tensor([seq.pages[p // PAGE] * PAGE + p % PAGE for p in range(seq.num_computed)])
    k = engine.core.runner.pools[1].layers[0].k.flatten(0, 1)
    assert k[slot_mapping].flatten(1).any(dim=1).all()
    run.to_the_end()


def test_several_that_raise_at_once_are_all_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    good, settings = requests(pair, 2), {"max_num_seqs": 8}
    plain = undisturbed(engine_of(pair, **settings), good)
    engine = engine_of(pair, **settings)
    build = Layout.build

    def spoilt(layout: Layout, batch: Any) -> Any:
        if any(name.startswith("bad") for name in names(batch.entries)):
            raise Planted
        return build(layout, batch)

    monkeypatch.setattr(Layout, "build", spoilt)
    bad = [Request(f"bad {i}", (1, 2), 4) for i in range(5)]
    run = Run(engine, [*bad[:3], good[0], bad[3], good[1], bad[4]]).to_the_end()
    assert len(run.errors()) == 5
    assert {name: run.texts[name] for name in plain} == plain


def test_an_engine_whose_warm_up_fails_does_not_start(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Layout, "build", lambda *_, **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine_of(pair)


@pytest.mark.parametrize("count", [1, 4])
def test_an_exception_that_everyone_raises_ends_the_engine(pair: Pair, count: int, monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(pair)

    def broken(*_: Any, **settings: Any) -> Any:
        raise Planted("all is lost")

    monkeypatch.setattr(Layout, "build", broken)
    with pytest.raises(Planted, match="all is lost"):
        for i in range(3):
            for request in requests(pair, count):
                engine.core.add(Request(f"{i} {request.request_id}", request.token_ids, 3))
            engine.core.step()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        MemoryError(),
        RuntimeError("NPU function error: AclrtSynchronizeDevice, error code is 507015"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_device_ends_the_engine_at_once(pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(pair)
    backend = engine.core.runner.backend
    monkeypatch.setattr(backend, "explain", lambda error: explain(str(error)))
    launches = []

    def broken(layout: Layout, batch: Any) -> Any:
        launches.append(batch)
        raise error

    monkeypatch.setattr(Layout, "build", broken)
    for request in requests(pair, 4):
        engine.core.add(request)
    with pytest.raises(type(error)):
        engine.core.step()
    assert len(launches) == 1


# Sequences that end


@pytest.fixture(params=["plenty", "scarce"])
def crowded(request: pytest.FixtureRequest, lucky: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    steady_costs(monkeypatch)
    pages = {"plenty": None, "scarce": 30}[request.param]
    yield engine_of(lucky, kv_pages=pages, prefix_caching=True, max_num_batched_tokens=40, verify="auto")


@pytest.mark.exhaustive
def test_a_thousand_random_aborts_leave_nothing_behind(crowded: Engine):
    core, scheduler, rng = crowded.core, crowded.core.scheduler, random.Random(1)
    live: list[str] = []
    aborted = count = 0
    phases, ever_preempted = set[str](), set[str]()
    while aborted < 1000:
        for _ in range(rng.choice((0, 0, 1, 3))):
            prompt = tuple(rng.choices(range(5), k=3)) * rng.choice((1, 1, 2, 5, 20))
            for sibling in range(rng.choice((1, 1, 3))):
                live.append(f"{count} {sibling}")
                core.add(
                    Request(
                        live[-1],
                        prompt,
                        30,
                        sampling=SamplingParams(seed=sibling, temperature=0.7),
                        speculate=rng.random() < 0.7,
                    )
                )
            count += 1
        if core.has_work:
            ended = {delta.request_id for delta in core.step().deltas if delta.finish_reason}
            live = [name for name in live if name not in ended]
        preempted = [seq.request.request_id for seq in scheduler.waiting if seq.num_cached is not None]
        ever_preempted.update(preempted)
        gone = rng.sample(live, min(len(live), rng.choice((0, 0, 0, 1, 2)) if len(live) < 40 else len(live)))
        for name in dict.fromkeys((*gone, *(name for name in preempted if rng.random() < 0.5))):
            seq = next(seq for seq in (*scheduler.running, *scheduler.waiting) if seq.request.request_id == name)
            place = "preempted" if seq.num_cached is not None and seq.batch_slot < 0 else "queued"
            phases.add(place if seq.batch_slot < 0 else "decoding" if seq.is_decoding else "prefilling")
            if seq.batch_slot >= 0 and name in ever_preempted:
                phases.add("resumed")
            used, owned = scheduler.pool.num_used, set(seq.pages)
            others = {page for other in scheduler.running if other is not seq for page in other.pages}
            core.abort(name)
            live.remove(name)
            aborted += 1
            assert scheduler.pool.num_used == used - len(owned - others)
        scheduler.check()
    for name in live:
        core.abort(name)
    scarce = scheduler.pool.num_usable < 50
    assert phases == {"queued", "prefilling", "decoding"} | ({"preempted", "resumed"} if scarce else set())
    assert scheduler.prefix_cache_hits > 0
    assert not core.has_work and scheduler.pool.num_used == 0
    scheduler.check()
    policy = scheduler.policy
    assert not policy.histories
    good = Request("last", (1, 2, 3), 5)
    assert len(core.run([good])["last"]) == 5
