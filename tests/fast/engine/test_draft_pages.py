"""A draft whose layers all have windows has few, separate pages. Its drafts are those of one that keeps all KV."""

import logging
import random
import re
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.dflash.draft_pages import num_draft_pages, window_pages
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine
from app.engine.load.memory import with_pages
from app.engine.load.plan import Plan, Sizes
from app.engine.sequence import Sequence
from app.messages import Request
from tests import ROOT, UNTIMED
from tests.fast.engine.device_lengths import device_lengths
from tests.fast.engine.dialects import SLIDING, WINDOW, Dialect, as_dflash2
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.launch_log import Log
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import Pair
from tests.fast.engine.thread_ranks import ThreadRanks
from tests.fast.engine.watched_pages import watch
from tests.fast.schedule.scheduler_harness import Harness, held

torch.set_num_threads(1)
PAGE = (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")

SLIDES = {"layer_types": [SLIDING] * 2, "sliding_window": WINDOW, "is_causal": False}
SETTINGS: dict[str, Any] = {"max_model_len": 180, "page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 29}


def engine_of(pair: Pair, **settings: Any) -> Engine:
    engine = make_engine(pair.target, pair.draft, **SETTINGS | settings)
    assert engine.sizes.draft_window >= 32 and engine.core.scheduler.draft_pages
    return engine


def run_watched(core: EngineCore, requests: list[Request]) -> tuple[list[Any], list[int]]:
    """Return the blocks that were drafted, and after each step the pages of the draft that sequences hold."""
    used: list[int] = []
    schedule = core.scheduler.schedule

    def watched() -> Any:
        core.scheduler.check()
        batch = schedule()
        used.append(max((len(held(seq)) for seq in core.scheduler.running), default=0))
        return batch

    core.scheduler.schedule = watched  # type: ignore[method-assign]
    return drafted_by(core, requests), used


KINDS: dict[str, Callable[[Any], Pair]] = {
    "v1": Dialect(SLIDES).make,
    "causal": Dialect(SLIDES | {"is_causal": True}).make,
    "DFlash2": Dialect(SLIDES, as_dflash2).make,
    "window of 40": Dialect(SLIDES | {"sliding_window": 40}).make,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["eager", "graphs", "device"])
def test_drafts_of_long_answers_are_the_references(tmp_path, kind: str, path: str):
    """Answers go on for several windows, and prompts are cut into chunks beside decoding rows."""
    pair = KINDS[kind](tmp_path)
    graphs = {"enforce_eager": False, "max_graphs": 4} if path != "eager" else {}
    if path == "device":
        with device_lengths():
            engine = engine_of(pair, **graphs)
    else:
        engine = engine_of(pair, **graphs)
    engine.core.overlap = False  # `drafted_by` reads the drafts of a step before the next is launched
    blocks, used = run_watched(engine.core, requests_about_the_window(2, 75))
    assert max(len(block.token_ids) for block in blocks) > 3 * 32
    assert share_of_right_drafts(blocks[::5], pair) == 1.0
    assert max(used) <= (engine.sizes.draft_window + 2 * 8 + 29) // 4 + 3 < 105 // 4


@pytest.mark.parametrize("num_seqs", [1, 10])
def test_tables_of_graphs_are_as_wide_whether_a_step_is_padded_or_not(tmp_path, num_seqs: int):
    """Ten sequences have more scratch pages than a window needs pages, and one fills its graph."""
    pair = KINDS["v1"](tmp_path)
    with device_lengths():
        engine = engine_of(pair, enforce_eager=False, max_graphs=12, max_num_seqs=10, max_num_batched_tokens=96)
    assert engine.sizes.scratch_pages > engine.sizes.window_pages
    engine.core.overlap = False
    blocks = drafted_by(engine.core, [replace(r, max_tokens=40) for r in requests_about_the_window(num_seqs, 8)])
    assert share_of_right_drafts(blocks[:: 4 * num_seqs], pair) == 1.0


def test_drafts_are_the_references_after_preemption_and_prefix_hits(tmp_path):
    """Found pages have the draft's KV as far back as its window goes."""
    pair = KINDS["v1"](tmp_path)
    engine = engine_of(pair, kv_pages=88, max_num_seqs=4, max_num_batched_tokens=32)
    blocks, _ = run_watched(engine.core, requests_about_the_window(4, 85, shared=17))
    assert engine.core.scheduler.num_preemptions > 0 and engine.core.scheduler.prefix_cache_hits > 0
    assert share_of_right_drafts(blocks[::9], pair) == 1.0


def test_a_conversation_goes_on_with_the_drafts_kv_of_its_last_turn(tmp_path):
    pair = KINDS["v1"](tmp_path)
    engine = engine_of(pair)
    (first,) = requests_about_the_window(1, 60)
    said = engine.core.run([first])["0"]
    blocks = drafted_by(engine.core, [Request("1", (*first.token_ids, *said, 5, 6, 7), 30)])
    assert engine.core.scheduler.prefix_cache_hits > 80
    assert share_of_right_drafts(blocks, pair) == 1.0


def test_a_hit_whose_draft_pages_are_gone_is_still_a_hit(tmp_path):
    """The draft sees what is computed from then on, and nothing that another sequence has left."""
    pair = KINDS["v1"](tmp_path)
    engine = engine_of(pair)
    scheduler, (first,) = engine.core.scheduler, requests_about_the_window(1, 60)
    said = engine.core.run([first])["0"]
    again = Request("1", (*first.token_ids, *said, 5, 6, 7), 60)
    assert scheduler.draft_pages
    scheduler.draft_pages.pool.flush()
    for pool in engine.core.runner.pools[1:]:  # what is left there is not to be read
        for kv in pool.layers:
            kv.k.fill_(float("nan")), kv.v.fill_(float("nan"))
    blocks = drafted_by(engine.core, [again])
    assert scheduler.prefix_cache_hits > 80
    later = [block for block in blocks if len(block.token_ids) > len(again.token_ids) + WINDOW]
    assert len(later) > 10 and share_of_right_drafts(later[::4], pair) == 1.0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_text_is_that_without_a_draft_and_no_step_writes_what_others_have(tmp_path, overlap: bool):
    pair = Dialect(SLIDES).make(tmp_path, **LUCKY, taps=(1, 2))
    wanted = [
        replace(request, token_ids=tuple(token % 5 for token in request.token_ids))
        for request in requests_about_the_window(5, 60, shared=9)
    ]
    wide = {"max_num_batched_tokens": 56}
    plain = make_engine(pair.target, None, **SETTINGS | wide).core.run(wanted)
    if overlap:
        with device_lengths():
            engine = engine_of(pair, enforce_eager=False, max_graphs=2, **wide)
        assert engine.core.overlap
        log, launch = Log(engine.core), engine.core.launch

        def checked(batch: Any) -> Any:
            pending = launch(batch)
            engine.core.scheduler.check()
            return pending

        engine.core.launch = checked  # type: ignore[method-assign]
        assert engine.core.run(wanted) == plain and len(log.overlapped) > 20
    else:
        engine = engine_of(pair, **wide)
        watch(engine)
        assert engine.core.run(wanted) == plain


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_are_launched_ahead_of_prompts_longer_than_a_real_window(tmp_path, num_ranks: int):
    """After a prompt's last chunk the step in flight has the pages of the chunk too, more than a window of 512 has."""
    pair = Dialect(SLIDES | {"sliding_window": 512}).make(
        tmp_path, **LUCKY | {"vocab_size": 4}, num_layers=2, taps=(0,), max_position_embeddings=1300
    )
    real = {"page_size": 16, "block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 640, "max_model_len": 1300}
    graphs = {"enforce_eager": False, "max_graphs": 2, "prefix_caching": False}
    with device_lengths():
        if num_ranks == 1:
            ranks, engine = None, make_engine(pair.target, pair.draft, **real, **graphs)
        else:
            shared = {"tensor_parallel_size": num_ranks, "device": "cpu", "dtype": "float32"}
            ranks = ThreadRanks(EngineConfig(pair.target, pair.draft, **UNTIMED | real | graphs | shared))
            engine = ranks.engine
    assert engine.core.overlap and engine.sizes.window_pages == (512 + 2 * 8) // 16 + 3 < 600 // 16
    rng, reasons = random.Random(2), set[str]()
    requests = [Request(str(size), tuple(rng.choices(range(4), k=size)), 12) for size in (600, 20, 620)]
    log = Log(engine.core)
    texts = engine.core.run(requests, lambda step: reasons.add(step.stats.not_ahead))
    after_prompts = {n + 1 for n, batch in enumerate(log.batches) if batch.prefills}
    assert len(after_prompts) == 2 and after_prompts <= set(log.overlapped) and reasons == {"", "end"}
    engine.core.overlap = False
    assert engine.core.run(requests) == texts
    if ranks:
        ranks.close()
        ranks.check_alike()


@pytest.mark.parametrize("draft_ranks", [1, 2])
def test_two_ranks_draft_what_the_reference_drafts(tmp_path, draft_ranks: int):
    pair = Dialect(SLIDES, as_dflash2).make(tmp_path, vocab_size=96)
    shared = {"tensor_parallel_size": 2, "draft_tensor_parallel_size": draft_ranks, "device": "cpu"}
    ranks = ThreadRanks(EngineConfig(pair.target, pair.draft, **UNTIMED | SETTINGS | shared | {"dtype": "float32"}))
    assert ranks.engine.core.scheduler.draft_pages
    wanted = [replace(r, token_ids=tuple(t % 96 for t in r.token_ids)) for r in requests_about_the_window(2, 40)]
    blocks = drafted_by(ranks.engine.core, wanted)
    ranks.close()
    ranks.check_alike()
    assert len(blocks) > 30 and share_of_right_drafts(blocks[::4], pair) == 1.0


def test_what_is_not_finite_is_scrubbed_from_the_drafts_pages_too(tmp_path):
    pair = KINDS["v1"](tmp_path)
    engine = engine_of(pair)
    core, others = engine.core, requests_about_the_window(4, 40)
    core.add(Request("bad", tuple(range(20)), 40))
    for _ in range(8):
        core.step()
    (seq,) = core.scheduler.running
    own, target_pages = set(held(seq)), list(seq.pages)
    for pool, pages in zip(core.runner.pools, (target_pages, list(own)), strict=True):
        for kv in pool.layers:
            kv.k[pages], kv.v[pages] = float("nan"), float("nan")
    while core.has_work:
        core.step()
    assert core.scheduler.num_not_finite == 1
    reused, launch = set[int](), core.launch

    def noted(batch: Any) -> Any:
        reused.update(page for entry in batch.entries for page in held(entry.seq))
        pending = launch(batch)
        clean = list(own & reused)
        assert all(part[clean].isfinite().all() for kv in core.runner.pools[1].layers for part in (kv.k, kv.v))
        return pending

    core.launch = noted  # type: ignore[method-assign]
    blocks = drafted_by(core, others)
    assert own <= reused and share_of_right_drafts(blocks[::5], pair) == 1.0


def test_pages_before_the_window_are_reused_before_those_that_a_turn_may_go_on_from():
    harness = Harness(page_size=2, block_size=2, max_num_seqs=2, max_model_len=60, prefix_caching=True, draft_window=6)
    first = harness.add(9, 3)
    harness.drain()
    assert harness.scheduler.draft_pages
    pool = harness.scheduler.draft_pages.pool
    kept = dict(pool.cached)
    assert kept and harness.done[first]
    harness.add(5, 50)
    harness.drain()
    assert kept.items() <= pool.cached.items()


def test_the_pages_that_a_turn_would_go_on_from_are_the_last_to_be_reused():
    harness = Harness(page_size=2, block_size=2, max_num_seqs=1, prefix_caching=True, draft_window=8)
    harness.add(16, 3)
    harness.drain()
    assert harness.scheduler.draft_pages
    pool = harness.scheduler.draft_pages.pool
    seq = Sequence(harness.done["r0"].request, arrival=9)
    seq.token_ids, seq.num_computed = harness.done["r0"].script[:19], 18
    pool.grow(array("i"), 2 * (pool.num_free - 4 + 1))  # one of the last window's four pages is reused
    harness.scheduler.draft_pages.begin(seq)
    assert seq.first_draft_page == 9 - 3


def test_pages_before_a_window_are_found_while_there_are_others():
    """Two answers go on from a prompt. One of them has left it behind when a third request comes."""
    sizes = {"page_size": 4, "block_size": 2, "max_model_len": 90, "spare_pages": 60}
    harness = Harness(**sizes, prefix_caching=True, draft_window=16)
    prompt = [index % 7 for index in range(32)]
    harness.add(33, 50, begins=prompt)
    while not harness.sequence("r0").is_decoding:
        harness.step()
    harness.add(34, 2, begins=prompt)
    while harness.sequence("r0").num_tokens < 70:
        harness.step()
    third = harness.add(35, 2, begins=prompt)
    harness.step()
    seq = harness.sequence(third)
    assert seq.num_reused == 32 and seq.first_draft_page == (32 - 16) // 4
    harness.drain()


def test_slots_of_the_drafts_pages_after_what_is_finite_are_scrubbed():
    harness = Harness(page_size=4, block_size=4, max_num_seqs=1, draft_window=8)
    harness.add(6, 9)
    harness.step()
    harness.step()
    (seq,) = harness.scheduler.running
    harness.scheduler.unclean.add(seq)
    after = {harness.draft_slot(seq, place) for place in range(seq.num_computed, 4 * len(seq.draft_pages))}
    of_target = {harness.slot(seq, place) for place in range(seq.num_computed, 4 * len(seq.pages))}
    harness.scheduler.schedule()
    assert [set(slots) for slots in harness.scheduler.to_scrub] == [of_target, after]


def test_a_flush_forgets_the_drafts_pages_too():
    harness = Harness(page_size=4, block_size=2, max_num_seqs=2, prefix_caching=True, draft_window=8)
    harness.add(17, 2)
    harness.drain()
    assert harness.scheduler.draft_pages and harness.scheduler.draft_pages.pool.cached
    harness.flush()
    assert not harness.scheduler.draft_pages.pool.cached


@pytest.mark.parametrize(
    ("config", "settings", "window"),
    [
        (SLIDES, {}, 32),
        (SLIDES | {"sliding_window": 40}, {}, 40),
        (SLIDES | {"layer_types": [SLIDING, "full_attention"]}, {}, 0),
        (SLIDES | {"layer_types": [SLIDING, "full_attention"]}, {"draft_window": 50}, 50),
        (SLIDES, {"max_model_len": 40}, 0),
    ],
    ids=["sliding", "a longer window", "one full layer", "one full layer with --draft-window", "short sequences"],
)
def test_a_draft_has_its_own_pages_if_they_are_fewer(tmp_path, caplog, config, settings, window):
    pair = Dialect(config).make(tmp_path)
    with caplog.at_level(logging.INFO):
        engine = make_engine(pair.target, pair.draft, **SETTINGS | settings)
    own, scheduler = num_draft_pages(engine.sizes), engine.core.scheduler
    assert engine.sizes.draft_window == window and bool(scheduler.draft_pages) == bool(window)
    target, draft = engine.core.runner.pools
    own = own or target.all_layers.k.shape[0] // 4
    assert draft.all_layers.k.shape[0] == 2 * own
    assert any("separate ones of a windowed draft" in message for message in caplog.messages) == bool(window)


def test_too_little_memory_is_told_as_it_would_be_with_separate_pages(tmp_path):
    pair = Dialect(SLIDES | {"layer_types": [SLIDING] * 12}).make(tmp_path, draft_layers=12)
    settings = SETTINGS | {"max_model_len": 490, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    told = set[str]()
    for memory in (64 << 10, 256 << 10):
        with pytest.raises(UnsupportedError, match="give --kv-cache-memory ") as refusal:
            make_engine(pair.target, pair.draft, **settings, kv_cache_memory=memory)
        told |= set(re.findall(r"--kv-cache-memory (\d+)MiB", str(refusal.value)))
    assert told == {"1"}, "and not the three that the draft's whole context would take"
    assert make_engine(pair.target, pair.draft, **settings, kv_cache_memory=1 << 20).core.scheduler.draft_pages


@pytest.mark.parametrize(("seqs", "more"), [(16, 29), (64, 21)])
def test_the_pages_of_a_27b_are_as_many_more_as_the_page_of_drafts_says(seqs: int, more: int):
    """Qwen3.8-27B has 16 layers with KV, and its DFlash2 draft 5 with a window of 2,048."""
    target: Any = SimpleNamespace(num_kv_layers=16, num_kv_heads=4, head_dim=256)
    draft: Any = SimpleNamespace(decoder=SimpleNamespace(num_kv_layers=5, num_kv_heads=8, head_dim=128))
    config = EngineConfig(target=Path("target"), **UNTIMED)
    sizes = Sizes(8, 262_144, seqs, 2048, page_size=128, scratch_pages=seqs * 8 // 128 + 1)
    shared, own = (
        with_pages(Plan(config, target, draft, torch.bfloat16, planned, None), 40 << 30).num_pages
        for planned in (sizes, replace(sizes, window_pages=window_pages(2048, 8, 128)))
    )
    assert round(100 * (own / shared - 1)) == more
    assert f"{more} % {'more pages for 16' if seqs == 16 else 'for 64'}" in PAGE
