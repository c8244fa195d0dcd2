"""The engine's graphs on the null device have the right updates, fixed addresses and waits of the host."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

import app.engine.load.engine as build
from app.config.engine import EngineConfig
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from app.engine.npu.graph import NpuGraph
from app.engine.sampling.metadata import GRAPH_KINDS
from tests import UNTIMED
from tests.costs import landing_ones
from tests.devices.npu import demo
from tests.devices.npu.engines import HOST_PROCESSOR, SMALL, engine, requests
from tests.devices.npu.null_device import traced
from tests.fast.engine.pairs import Pair, make_pair
from tools.npu_contract.__main__ import main as contract

pytestmark = pytest.mark.usefixtures("numerics")

Lengths = tuple[list[int], list[int]]
asked = partial(requests, 30, temperature=0.0)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, **SMALL)


class Attended:
    """Return the lengths of every attention call, in eager code and in updates of a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.eager: list[Lengths] = []
        self.updates: list[list[Lengths]] = []
        attend, replay = torch_npu.npu_fused_infer_attention_score, NpuGraph.replay

        def attended(*args: Any, **kwargs: Any) -> Any:
            self.eager.append((list(kwargs["actual_seq_lengths"]), list(kwargs["actual_seq_lengths_kv"])))
            return attend(*args, **kwargs)

        def replayed(graph: NpuGraph) -> None:
            replay(graph)
            calls = [record.kwargs for record in graph._records]
            self.updates.append([(list(e["actual_seq_lengths"]), list(e["actual_seq_lengths_kv"])) for e in calls])

        monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", attended)
        monkeypatch.setattr(NpuGraph, "replay", replayed)

    def clear(self) -> None:
        self.eager.clear()
        self.updates.clear()


def test_lengths_given_anew_to_graphs_are_those_that_eager_code_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, after nothing, a part and all of a draft was accepted; draft and target each have their own."""
    wanted = demo.requests(24, greedy=True, max_tokens=24)
    eager, graphs = demo.engine("npu:0", "bfloat16", enforce_eager=True), demo.engine("npu:0", "bfloat16")
    for request in wanted:
        eager.add(request)
        graphs.add(request)
    attended, accepted, compared, from_graphs = Attended(monkeypatch), set(), 0, set()
    while eager.has_work:
        attended.clear()
        step = eager.step()
        calls = list(attended.eager)
        attended.clear()
        assert [delta.token_ids for delta in graphs.step().deltas] == [delta.token_ids for delta in step.deltas]
        calls = calls[: len(calls) - len(attended.eager)]  # after a draft, a target with large chunks is eager in both
        for entries in attended.updates:
            own, calls = calls[: len(entries)], calls[len(entries) :]
            assert len(own) == len(entries), "an update for every call that eager code makes"
            for call, entry in zip(own, entries, strict=True):
                check_padded(call, entry)
                compared += 1
        assert not calls
        if not attended.eager:
            assert attended.updates
            from_graphs.add(step.stats.kind)
        if step.stats.kind == "decode":
            assert not attended.eager
            accepted |= {delta.steps[0].n_accepted for delta in step.deltas if delta.steps[0].n_verified}
    assert from_graphs == {"decode", "mixed"}, "and some steps with chunks, but not the first, which is too large"
    assert compared > 100 and accepted >= {0, 15} and accepted - {0, 15}


def check_padded(eager: Lengths, entry: Lengths) -> None:
    """The same sequences first; padding has a row or more each, and as much KV (N2, N30)."""
    (q_ends, host_seq_lens), (all_ends, all_kv) = eager, entry
    count = len(q_ends)
    assert (all_ends[:count], all_kv[:count]) == (q_ends, host_seq_lens)
    assert [end - start for start, end in pairwise(all_ends[count - 1 :])] == all_kv[count:]
    assert min(all_kv) > 0


def test_what_graphs_read_and_write_stays_where_it_was(pair: Pair) -> None:
    core = engine(pair)
    graphs = core.runner.graphs
    assert graphs

    def places() -> list[int]:
        captured = [*graphs.draft_graphs.values(), *graphs.target_graphs.values()]
        tensors = [x for graph, on in captured for x in (*on.packed.tensors.values(), *graph.outputs)]
        return [tensor.data_ptr() for tensor in (*tensors, graphs.drafts)]

    before = places()
    core.run(asked())
    assert places() == before


CONFIGS = [{}, {"enforce_eager": True}, {"draft_enforce_eager": True}]


@pytest.mark.parametrize("config", landing_ones(CONFIGS, CONFIGS[:2]), ids=str)
@pytest.mark.parametrize("temperature", landing_ones([0.0, 0.7], (0.7,)))
def test_the_host_waits_once_a_step_and_captures_nothing_after_the_start(pair, config, temperature):
    core = engine(pair, **config)
    for request in requests(30, temperature=temperature):
        core.add(request)
    while core.has_work:
        with traced() as trace:
            core.step()
        assert trace.waits == ["aclrtSynchronizeEvent"], "the one read of the step"
        assert not HOST_PROCESSOR.intersection(trace.launches)
        assert not trace.of("capture", "capture-copy")
        assert len(trace.of("copy")) <= 4, "draft, target and draws in, the result out"


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        pytest.param({"temperature": 0.7}, marks=pytest.mark.slow),
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5},
        pytest.param({"frequency_penalty": 0.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_decode_step_launches_its_graphs_and_nothing_else(pair: Pair, sampling: dict[str, Any]) -> None:
    core = engine(pair)
    for request in requests(30, **{"temperature": 0.0} | sampling):
        core.add(request)
    while core.step().stats.kind != "decode":
        pass
    with traced() as trace:
        core.step()
    assert len(trace.of("replay")) == 2 + bool(sampling) and not trace.of("launch")
    assert len(trace.of("copy")) == 3 + bool(sampling) and trace.waits == ["aclrtSynchronizeEvent"]
    assert trace.of("update") == ["aclnnFusedInferAttentionScoreV3"] * (3 + 1)


def test_every_size_is_captured_and_replayed_before_the_engine_is_ready(pair: Pair) -> None:
    seen: list[tuple[str, int, int]] = []
    with traced() as trace:
        wishes: dict[str, Any] = {"device": "npu:0", "dtype": "bfloat16", "max_num_seqs": 4, "kv_cache_memory": 8 << 20}
        config = EngineConfig(pair.target, pair.draft, **UNTIMED | wishes)
        build.build_engine(config, lambda *progress: seen.append(progress))
    graphs = [(done, total) for stage, done, total in seen if stage == "graphs"]
    sizes = 3 * (3 + 4)  # 1, 2 and 4 sequences: drafts of 2, 4 and 8 rows, and targets of 1, 2, 4 and 8
    assert graphs == [(i + 1, sizes) for i in range(sizes)]
    assert [stage for stage, _, _ in seen][-1] == "warm-up"
    draws = len(GRAPH_KINDS) * 3 * 4
    assert len(set(trace.of("replay"))) == sizes + draws


@pytest.mark.parametrize(
    ("max_graphs", "expected"),
    [(21, 21), (20, 17), *(pytest.param(*some, marks=pytest.mark.slow) for some in ((14, 13), (4, 3), (2, 2)))],
)
def test_no_more_graphs_are_captured_than_allowed(pair: Pair, max_graphs: int, expected: int) -> None:
    with traced() as trace:
        graphs = engine(pair, max_graphs=max_graphs).runner.graphs
    assert graphs and len(graphs.target_graphs) + len(graphs.draft_graphs) == expected
    assert len(set(trace.of("replay"))) == expected + len(GRAPH_KINDS) * len(graphs.target_graphs)


def test_a_meta_that_was_not_planned_for_its_step_is_found_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof would see lengths of an earlier step: without the new plan tokens are others."""
    expected = engine(pair).run(asked())
    core = engine(pair)
    forward = core.runner.forward
    monkeypatch.setattr(forward, "plan", lambda step, inputs: None if step.metas[0].plans else plan(step, inputs))
    plan = type(core.runner.forward).plan.__get__(core.runner.forward)
    assert core.run(asked()) != expected


def test_an_engines_operator_calls_can_be_checked_on_a_card(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--target", str(pair.target), "--draft", str(pair.draft)]
    assert contract(["--tokens", "8", "--sequences", "2", "--kv-cache-memory", str(8 << 20), *folders]) == 0
    checked, _, rest = capsys.readouterr().out.partition(" ")
    assert int(checked) > 100 and rest.startswith("operator calls kept the rules")


def test_padding_finds_slots_and_positions_where_the_context_is_shorter_than_it() -> None:
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 160, "max_model_len": 40}
    short = [replace(request, token_ids=request.token_ids[:20], max_tokens=20) for request in demo.requests(10)]
    expected = demo.run(demo.engine("npu:0", "bfloat16", enforce_eager=True, **small), short)
    found = demo.run(demo.engine("npu:0", "bfloat16", max_graphs=4, **small), short)
    assert (found.texts, found.accepted) == (expected.texts, expected.accepted)


def test_a_call_that_no_update_reaches_is_refused_at_capture(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = torch_npu.npu_fused_infer_attention_score

    def twice(*args: Any, **kwargs: Any) -> Any:
        attend(*args, **kwargs)
        return attend(*args, **kwargs)

    twice.out = attend.out  # type: ignore[attr-defined]
    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", twice)
    with pytest.raises(RuntimeError, match="N22"):
        engine(pair)


def test_graphs_that_do_not_fit_beside_the_kv_are_refused_by_name(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = NpuBackend.capture

    def full(self: NpuBackend, *args: Any) -> Any:
        torch.empty(1 << 40, device=self.device)
        return capture(self, *args)

    monkeypatch.setattr(NpuBackend, "capture", full)
    with pytest.raises(UnsupportedError, match=r"graphs do not fit .* --max-graphs"):
        engine(pair)
