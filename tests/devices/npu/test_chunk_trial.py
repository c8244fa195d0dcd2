"""Prompts run from graphs only if a chunk in a graph of each kind is right at startup."""

import logging
from pathlib import Path
from typing import Any

import pytest

import app.engine.load.engine as build
from app.config.engine import EngineConfig
from app.engine.comm.comm import Alone
from app.engine.core import EngineCore
from app.engine.load.chunk_trial import chunks_are_right
from app.engine.npu.graph import NpuGraph
from tests import UNTIMED
from tests.devices.npu.engines import SIZES, SMALL, engine, requests
from tests.devices.npu.null_device import traced
from tests.fast.engine.pairs import Pair, make_pair

pytestmark = pytest.mark.usefixtures("numerics")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, **SMALL)


def chunks_of(core: EngineCore) -> bool:
    sizes = core.runner.layout.graphs
    assert sizes
    return sizes.chunks


def check_eager_prompts(core: EngineCore, wanted: dict[str, list[int]]) -> None:
    """Texts are `wanted`, prompts are launched operator by operator, and decoding steps are replayed."""
    for request in requests():
        core.add(request)
    texts: dict[str, list[int]] = {}
    while core.has_work:
        with traced() as trace:
            output = core.step()
        assert bool(trace.of("launch")) == (output.stats.kind != "decode")
        for delta in output.deltas:
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert texts == wanted


def test_a_chunk_is_tried_in_the_largest_graph_of_each_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a context of noise that is long enough for the kernel of few rows."""
    tried, replay = [], NpuGraph.try_replay

    def noted(graph: NpuGraph) -> None:
        (kind,) = {id(kind.meta): kind.meta for kind in graph._kinds}.values()
        plan = next(iter(kind.plans.values()))
        lens = [end - start for start, end in zip([0, *plan.q_ends], plan.q_ends, strict=False)]
        tried.append((lens, plan.host_seq_lens[: len(lens)]))
        first_page = -(-max(plan.host_seq_lens) // 128)
        assert all(record.args[i][-first_page].all() for record in graph._records for i in (1, 2)), "K and V are noise"
        replay(graph)

    monkeypatch.setattr(NpuGraph, "try_replay", noted)
    core = engine(make_pair(tmp_path, max_position_embeddings=2048, **SMALL), kv_cache_memory=32 << 20)
    assert chunks_of(core)
    lens, kv_lens = zip(*tried, strict=True)
    # Four sequences of one, two, four and eight rows. A decoding row goes first, then the chunk, and padding.
    assert [each[:2] for each in lens] == [[1, 1 + 4 * (width - 1)] for width in (2, 4, 8)]
    assert all(min(each[:2]) > 1024 for each in kv_lens)
    assert not any(kv.k[-1].any() or kv.v[-1].any() for kv in core.runner.pools[0].layers), "the noise is gone"


def test_a_chunk_that_comes_out_wrong_leaves_prompts_eager(pair, monkeypatch, caplog):
    """Here a replay goes on with the lengths of the one before."""

    def stale(graph: NpuGraph) -> None:
        graph._update(graph._last)
        graph._graph.replay()

    wanted = engine(pair, enforce_eager=True).run(requests())
    monkeypatch.setattr(NpuGraph, "try_replay", stale)
    with caplog.at_level(logging.WARNING):
        core = engine(pair)
    assert not chunks_of(core)
    (said,) = [record.message for record in caplog.records if "prompts do not run from graphs" in record.message]
    assert "is wrong, by " in said
    check_eager_prompts(core, wanted)


def test_a_chunk_that_is_refused_leaves_prompts_eager_and_other_replays_right(pair, monkeypatch, caplog):
    """The last layer refuses, after the events of the others are recorded."""
    make = NpuGraph.__init__

    def made(graph: NpuGraph, *args: Any) -> None:
        make(graph, *args)
        if not graph._records:
            return
        record, taken = graph._records[-1], graph._records[-1].op_cache_entry

        def refuse_context(*args: Any, **kwargs: Any) -> Any:
            if max(kwargs["actual_seq_lengths_kv"]) > 150:
                raise RuntimeError("call aclnnFusedInferAttentionScoreV3 failed, error code is 561002")
            return taken(*args, **kwargs)

        record.op_cache_entry = refuse_context

    wanted = engine(pair, enforce_eager=True).run(requests())
    monkeypatch.setattr(NpuGraph, "__init__", made)
    with caplog.at_level(logging.WARNING):
        core = engine(pair)
    assert not chunks_of(core) and "is refused: RuntimeError: " in caplog.text and "561002: " in caplog.text
    check_eager_prompts(core, wanted)


def test_a_chunk_that_is_not_right_on_another_rank_is_off_on_all(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    class Other(Alone):
        def minimum(self, value: int) -> int:
            return 0

    wishes: dict[str, Any] = {"device": "npu:0", "dtype": "bfloat16", **UNTIMED, **SIZES}
    made = build.build_engine(EngineConfig(pair.target, pair.draft, **wishes))
    runner = made.core.runner
    assert runner.graphs and runner.layout.graphs
    found = chunks_are_right(runner.graphs, runner.layout, made.sizes, runner.pools, runner.backend, Other())
    assert not found and "wrong or refused on another rank" in caplog.text


def test_prompts_are_eager_if_the_user_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NpuGraph, "try_replay", lambda graph: pytest.fail("nothing is to be tried"))
    core = engine(pair, prompts_in_graphs="off")
    assert not chunks_of(core)
    check_eager_prompts(core, engine(pair, enforce_eager=True).run(requests()))
