"""Sums between devices are measured by a process for each, and one that fails is told."""

import json
import sys
from typing import Any

import pytest
from torch import Tensor

from app.check import collectives, probes
from app.engine.comm.comm import Comm
from app.engine.device.factory import make_backend
from app.engine.errors import UnsupportedError
from tests import ROOT
from tests.fast.engine.thread_ranks import ThreadComm, on_ranks
from tools.report import ranks as report_ranks
from tools.report.part import Options, answer

BACKEND = make_backend("cpu")
CASE = {"rows": 1, "eager_us": 5.0, "passed": True, "same_bits_alone": True}


def test_a_sum_in_the_order_of_ranks_is_right_and_has_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "seconds_each", lambda backend, run, **_: 1e-6)
    for cases in on_ranks(3, lambda comm: report_ranks.measure(BACKEND, comm, (1, 5), 16)):
        assert [case["rows"] for case in cases] == [1, 5] and [case["eager_us"] for case in cases] == [1.0, 1.0]
        kinds = ("passed", "same_bits_again", "same_bits_alone", "same_bits_on_all_ranks", "added_in_order_of_ranks")
        assert all(case[kind] for case in cases for kind in kinds)
        assert {case["captured_us"] for case in cases} == {None}, "a CPU captures nothing"


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("passed", lambda comm, total: total * 1.1),
        ("same_bits_on_all_ranks", lambda comm, total: total * (1 + 1e-6 * comm.rank)),
        ("same_bits_alone", lambda comm, total: total * (1 + 1e-6 * (len(total) > 1))),
        ("added_in_order_of_ranks", lambda comm, total: total * (1 + 1e-6)),
    ],
)
def test_a_sum_that_is_not_is_seen(monkeypatch: pytest.MonkeyPatch, kind: str, wrong: Any) -> None:
    monkeypatch.setattr(collectives, "seconds_each", lambda backend, run, **_: 1e-6)
    add = Comm.all_reduce

    def changed(comm: Comm, x: Tensor) -> Tensor:
        return wrong(comm, add(comm, x))

    monkeypatch.setattr(ThreadComm, "all_reduce", changed)
    cases = on_ranks(2, lambda comm: report_ranks.measure(BACKEND, comm, (1, 5), 16))[0]
    assert not cases[1][kind]


def ran(program: str, seconds: float = 600.0) -> list[dict[str, Any]]:
    """Return what ranks measure whose process is this program. Its `rank` is a number."""
    given = "import sys, json, time\nrank = int(sys.argv[3])\n"
    return collectives.measured("npu:1", 2, seconds, (sys.executable, "-c", given + program))


def test_the_cases_are_those_of_rank_0() -> None:
    assert ran("print(json.dumps({'cases': [sys.argv[1:4], rank]}))") == [["npu:1", "2", "0"], 0]


@pytest.mark.parametrize(
    ("program", "seconds", "said"),
    [
        ("rank or time.sleep(6000); print(json.dumps({'error': 'no card'})); sys.exit(1)", 600.0, "rank 1: no card"),
        ("rank or time.sleep(6000); sys.exit(3)", 600.0, "rank 1: its process ended with exit code 3"),
        ("rank and time.sleep(6000)", 1.0, "has not ended within 1 s"),
    ],
)
def test_a_rank_that_fails_or_hangs_is_told_and_none_is_left(program: str, seconds: float, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        ran(program, seconds)


def test_check_adds_up_on_as_many_devices_as_the_server_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "measured", lambda device, size, seconds: [CASE, CASE | {"rows": 16}])
    assert "all_reduce" not in [probe.name for probe in probes.probes("cpu")]
    (probe,) = (probe for probe in probes.probes("cpu", 2) if probe.name == "all_reduce")
    assert probe.ask().found == "2 ranks add up 1 rows in 5 us and 16 rows in 5 us"
    monkeypatch.setattr(collectives, "measured", lambda *_: [CASE | {"passed": False}])
    assert probe.ask().status == "failed"


def test_a_report_says_so_where_there_are_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_ranks(size: int) -> None:
        if size > 2:
            raise UnsupportedError("2 are visible")

    monkeypatch.setattr(report_ranks, "make_backend", lambda device: BACKEND)
    monkeypatch.setattr(BACKEND, "check_ranks", check_ranks)
    monkeypatch.setattr(collectives, "measured", lambda *_: [dict(CASE), CASE | {"rows": 16, "same_bits_alone": False}])
    two, four, eight = map(answer, report_ranks.parts(Options("cuda")))
    assert "the bits of a row depend on the other rows" in two["result"]["found"] and two["status"] == "ok"
    for few in (four, eight):
        assert few["status"] == "not tried" and few["result"] == {"found": "2 are visible"} and "error" not in few


@pytest.mark.exhaustive
def test_two_processes_add_up_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as a section of the report has it
    cases = collectives.measured("cpu", 2, 1500.0, (*report_ranks.COMMAND, "sums"))
    assert [case["rows"] for case in cases] == list(collectives.FEW_ROWS)
    assert all(case["passed"] and case["same_bits_alone"] and case["added_in_order_of_ranks"] for case in cases)
    assert json.dumps(cases)
