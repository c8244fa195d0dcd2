"""Two and four ranks, from "npu:0" on, decode what one does, eagerly and from graphs that hold the collectives.

The process group is torch_npu's own, on stub libraries, and Gloo computes.
"""

import logging
import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from app.check import collectives
from app.config.engine import EngineConfig
from app.engine.checkpoint.files import DEMO
from app.engine.comm.comm import ALONE, Alone, Meeting
from app.engine.errors import UnsupportedError
from app.engine.npu import backend as npu
from app.engine.npu import rules
from app.engine.npu.backend import NpuBackend
from app.engine.npu.graph import NpuGraph
from app.engine.sampling.metadata import GRAPH_KINDS
from app.messages import Request
from tests import UNTIMED
from tests.costs import landing_ones
from tests.devices.npu import demo
from tests.devices.npu.hccl_ranks import PROGRAM
from tests.exhaustive.rank_processes import Job, Result, run_on_ranks
from tools.report import ranks as report_ranks
from tools.report.part import Options, Part, answer

MARGIN = 1e-4
REPORT_RANK = (sys.executable, "-m", "tests.devices.npu.hccl_collectives")
SIZES: dict[str, Any] = {"page_size": 128, "max_num_seqs": 4, "max_num_batched_tokens": 160, "max_model_len": 512}
WAYS: dict[str, dict[str, Any]] = {"graphs": {"max_graphs": 3}, "eager": {"enforce_eager": True}}


def requests() -> list[Request]:
    return demo.requests(5, max_tokens=20)


def job(size: int, *, draft: bool = True, **wishes: Any) -> Job:
    pair = DEMO / "target", DEMO / "draft" if draft else None
    memory: dict[str, Any] = {"kv_cache_memory": 96 << 20, "dtype": "float32", "device": "npu:0"}
    return EngineConfig(*pair, tensor_parallel_size=size, **UNTIMED | SIZES | memory | wishes), requests()


@pytest.fixture(scope="module", params=landing_ones([2, 4], (2,)))
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Result], list[list[str]]]:
    """Results of both ways and of plain decoding, and the collectives of each rank. Four ranks, which have each of the
    demo pair's two KV heads twice, run from graphs alone."""
    size = request.param
    ways = WAYS if size == 2 else {"graphs": WAYS["graphs"]}
    jobs = {way: job(size, **wishes) for way, wishes in ways.items()} | {"plain": job(size, draft=False, max_graphs=2)}
    folder = tmp_path_factory.mktemp("ranks")
    found = run_on_ranks(list(jobs.values()), folder, PROGRAM, NPU_STUB_DEVICES=f"{size}")
    noted = [(folder / f"collectives-{rank}").read_text().splitlines() for rank in range(size)]
    return dict(zip(jobs, found, strict=True)), noted


def test_npus_decode_what_one_process_does(results: tuple[dict[str, Result], list[list[str]]]) -> None:
    runs = {name: result.run for name, result in results[0].items()}
    acceptance_length = runs["graphs"].acceptance_length
    assert all(run.texts == runs["plain"].texts for run in runs.values())
    assert {run.acceptance_length for name, run in runs.items() if name != "plain"} == {acceptance_length}
    assert acceptance_length > 2
    alone = demo.run(demo.engine("cpu"), requests())
    for request in requests():
        text, expected = runs["graphs"].texts[request.request_id], alone.texts[request.request_id]
        at = next((i for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b), None)
        assert at is None or demo.gap(request.token_ids, expected, at, text[at]) < MARGIN


def test_all_ranks_verify_alike_and_make_the_same_collectives(results):
    digests, (first, *others) = [result.digests for result in results[0].values()], results[1]
    assert all(len(mine) > 3 and all(each == mine for each in rest) for mine, *rest in digests)
    assert others and all(each == first for each in others)
    kinds = {line.partition(" ")[0] + " " + line.split()[1] for line in first}
    sums = {f"{way} c10d::allreduce_" for way in ("eager", "graph")}
    assert kinds == sums | {
        "eager c10d::_allgather_base_",
        "graph c10d::_allgather_base_",
        "eager c10d::broadcast_",
    }


def test_a_report_adds_up_eagerly_and_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_STUB_DEVICES", "2")
    command = (*REPORT_RANK, "sums")
    cases = collectives.measured("npu:0", 2, 240.0, command)
    assert [case["rows"] for case in cases] == [1, 16]
    for case in cases:
        assert all(case[kind] for kind in case if kind.startswith(("same_bits", "passed"))), case
        assert case["captured_us"] > 0


def test_a_report_attends_beside_a_sum_in_a_graph_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_STUB_DEVICES", "2")
    monkeypatch.setattr(report_ranks, "_check_ranks", lambda *_: None)  # this process sees one
    found = answer(
        Part("attention", partial(report_ranks.with_attention, Options("npu:0"), (*REPORT_RANK, "attention")))
    )
    assert found["status"] == "ok" and found["result"]["error_of_largest"] == 0.0, found
    assert found["result"]["found"].startswith("With HCCL_OP_EXPANSION_MODE=AIV the result is right")


class WrongInAGraph(Alone):
    """Sums of one rank, of which the second is wrong: that of the capture, after a run for initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        return x * 3 if self.sums == 2 else x


@pytest.mark.usefixtures("numerics")
def test_a_report_sees_a_wrong_sum_between_attention_and_lengths_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, replay, replayed = NpuBackend(torch.device("npu:0")), NpuGraph.replay, list[NpuGraph]()

    def passed(comm: Alone) -> bool:
        (case,) = report_ranks.attend_beside_sums(backend, comm, ())
        return case["passed"]

    def stale(graph: NpuGraph) -> None:
        if replayed:
            graph._graph.replay()
            graph._update(graph._last)
        else:
            replay(graph)
        replayed.append(graph)

    assert passed(ALONE) and not passed(WrongInAGraph())
    monkeypatch.setattr(NpuGraph, "replay", stale)
    assert not passed(ALONE)


def test_a_graph_that_the_ranks_cannot_capture_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("rank 1: RuntimeError: record event failed, runtime result = 507009")

    monkeypatch.setattr(report_ranks, "_check_ranks", lambda *_: None)
    monkeypatch.setattr(collectives, "measured", fail)
    found = report_ranks.with_attention(Options("npu:0"))
    assert not found["passed"] and "AIV it fails: rank 1" in found["found"]
    assert found["found"].endswith("Give another HCCL_OP_EXPANSION_MODE, or serve with --enforce-eager.")
    monkeypatch.setattr(collectives, "measured", lambda *_: [{"error_of_largest": 0.5, "passed": False}])
    wrong = report_ranks.with_attention(Options("npu:0"))
    assert not wrong["passed"] and "the result is WRONG: give another mode" in wrong["found"]


def test_more_ranks_than_npus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NpuBackend(torch.device("npu:0"))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")
    with pytest.raises(UnsupportedError, match="npu:0 to npu:1, and 1 are visible with ASCEND_RT_VISIBLE_DEVICES=5"):
        backend.check_ranks(2)


@pytest.mark.parametrize(("given", "graphs"), [(None, 900), ("AIV", 900), ("HOST", 450)])
def test_hccls_way_is_aiv_unless_it_is_given_and_bounds_the_graphs(monkeypatch, caplog, tmp_path, given, graphs):
    monkeypatch.delenv(rules.EXPANSION_MODE, raising=False)
    if given:
        monkeypatch.setenv(rules.EXPANSION_MODE, given)
    monkeypatch.setattr(npu, "DeviceComm", lambda *_: ALONE)
    backend = NpuBackend(torch.device("npu:0"))
    assert (backend.max_graphs(1), backend.max_graphs(4)) == (257, graphs)
    assert len(GRAPH_KINDS) == rules.DRAW_GRAPHS
    with caplog.at_level(logging.INFO):
        backend.join(Meeting(0, 4, tmp_path / "store", 1))
    assert os.environ[rules.EXPANSION_MODE] == (given or "AIV")
    assert f"HCCL_OP_EXPANSION_MODE={given or 'AIV'}" in caplog.text
