"""Launches are chosen by their time alone among those that are right, within a limit, and once on a device."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from app.engine.cuda import products, rows, timed_launches, tune
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.invariant import InvariantCudaBackend
from app.engine.cuda.products import Product
from app.engine.cuda.tune import Question, Way
from app.engine.device.base import Heads, LayerKv, ProjectedRows
from tests.devices.cuda.pages import Paged

torch.set_num_threads(1)

CPU = torch.device("cpu")
RIGHT, WRONG = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.2])
MS: dict[Way | None, float] = {None: 1.0, (1,): 0.5, (2,): 0.7, (3,): 0.1, (4,): 0.2, (5,): 0.99}


class Machine:
    """Timing double: a call takes MS of its way, and a second of a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timed: list[tuple[str, Way | None]] = []

    def monotonic(self) -> float:
        return self.now

    def seconds(self, call: Callable[[], object]) -> float:
        self.now += 1.0
        call()
        return MS[self.timed[-1][1]]

    def question(self, name: str, *ways: Way) -> Question:
        def run(way: Way | None) -> torch.Tensor:
            if way == (4,):
                raise RuntimeError("out of shared memory")
            return WRONG if way == (3,) else RIGHT

        return Question(name, ways, run, lambda: RIGHT, lambda way: self.timed.append((name, way)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(tune, "time", made)
    return made


def test_the_quickest_way_is_chosen_and_a_wrong_one_is_not_even_timed(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = tune.choose([machine.question("a", (2,), (3,), (4,), (1,))], machine.seconds, {})
    assert chosen == {"a": (1,)}
    assert [way for _, way in machine.timed] == [None, (2,), (1,)]
    assert "a: (3,) is wrong on this device" in caplog.text


def test_ways_that_follow_from_the_quickest_are_tried_behind_it_and_known_at_the_next_start(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """The quickest is followed even if it is slower than the default. What is wrong is left out there too."""
    asked = machine.question("a", (5,), (2,))._replace(further=lambda way: [(3,), (1,)] if way == (2,) else [])
    assert tune.choose([asked], machine.seconds, {}) == {"a": (1,)}
    assert [way for _, way in machine.timed] == [None, (5,), (2,), (1,)] and "(3,) is wrong" in caplog.text
    machine.timed.clear()
    assert tune.choose([asked], machine.seconds, {"a": (1,)}) == {"a": (1,)} and not machine.timed
    slower = machine.question("b", (5,))._replace(further=lambda way: [(1,)])
    assert tune.choose([slower], machine.seconds, {"b": (9,)}) == {"b": (1,)}
    assert tune.choose([machine.question("c", (4,))], machine.seconds, {}) == {"c": None}


def test_a_fault_of_the_device_ends_the_start_and_names_the_flag(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match="shared memory") as raised:
        tune.choose([machine.question("a", (2,), (4,))], machine.seconds, {}, lambda error: True)
    assert raised.value.__notes__ == ["a: (4,) was tried; --tune off starts without timing such ways"]


def test_a_difference_within_noise_is_none(machine: Machine) -> None:
    assert tune.choose([machine.question("a", (5,))], machine.seconds, {}) == {"a": None}


def test_a_result_that_is_no_number_is_wrong() -> None:
    assert tune.error_of(torch.tensor([float("nan"), 1.0]), RIGHT) == float("inf")


def test_questions_end_within_ten_seconds_and_go_on_at_the_next_start(machine: Machine, tmp_path: Path) -> None:
    asked = [machine.question(name, (2,), (1,)) for name in "abcdef"]
    first = tune.tune(asked, machine.seconds, "a GPU", tmp_path)
    assert machine.now <= tune.MAX_SECONDS + 2 and 2 <= len(first) < 6 and set(first.values()) == {(1,)}
    second = tune.tune(asked, machine.seconds, "a GPU", tmp_path)
    assert set(second) > set(first)
    assert not {name for name, _ in machine.timed[-3:]} & set(first)


def test_answers_are_kept_by_device_and_version(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [machine.question("a", (1,))]
    with caplog.at_level(logging.INFO):
        assert tune.tune(asked, machine.seconds, "a GPU", tmp_path) == {"a": (1,)}
    assert "1 of 1 launches other than by default" in caplog.text and "a: (1,)" in caplog.text
    before = len(machine.timed)
    assert tune.tune(asked, machine.seconds, "a GPU", tmp_path) == {"a": (1,)} and len(machine.timed) == before
    tune.tune(asked, machine.seconds, "another GPU", tmp_path)
    assert len(machine.timed) == before + 2
    monkeypatch.setattr(torch, "__version__", "0.0")
    tune.tune(asked, machine.seconds, "a GPU", tmp_path)
    assert len(machine.timed) == before + 4


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 7}', '{"a": ["x"]}', '{"a": [1, 2, 3]}', "\x00"])
def test_a_file_that_cannot_be_read_is_as_none(machine: Machine, tmp_path: Path, text: str) -> None:
    tune.kept(tmp_path, "a GPU").write_text(text)
    assert tune.tune([machine.question("a", (1,))], machine.seconds, "a GPU", tmp_path) == {"a": (1,)}


def test_a_folder_that_cannot_be_written_to_costs_no_start(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert tune.tune([machine.question("a", (1,))], machine.seconds, "a GPU", tmp_path / "file") == {"a": (1,)}
    assert "cannot be kept" in caplog.text


def test_a_user_without_a_home_starts_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert tune.tune([machine.question("a", (1,))], machine.seconds, "a GPU") == {"a": (1,)}


DECODER = Heads(num_heads=4, num_kv_heads=2, head_dim=16)


def weights() -> dict[str, list[torch.Tensor]]:
    noise = torch.Generator().manual_seed(0)
    shapes = {"o": (64, 256), "gate_up": (256, 64)}
    return {
        name: [torch.randn(shape, generator=noise).to(torch.bfloat16) / 8 for _ in range(2)]
        for name, shape in shapes.items()
    }


def test_what_was_chosen_is_launched_and_gives_the_same_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every other way is quicker here. Each was compared with the default's result before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "MAX_SECONDS", 1e9)
    monkeypatch.setattr(timed_launches, "CONTEXT", 20)
    monkeypatch.setattr(timed_launches, "CHAIN", 1)
    monkeypatch.setattr(timed_launches, "PROMPTS", {False: ([40, 20], [40, 50]), True: ([20], [90])})
    monkeypatch.setattr(products, "WAYS", [Product(32, 32, 2)])
    calls = (0.9**call for call in itertools.count())
    backend, own = CudaBackend(CPU), weights()
    chosen = backend.tune([DECODER], own, 2, 16, lambda call: next(calls))
    quickest = Product(32, 32, 2, chained=1)
    assert chosen["product 64 x 256, 16 rows"] == str(quickest) and "SwiGLU 128 x 64, 1 rows" in chosen
    assert set(backend._products.values()) == {quickest}
    assert len(chosen) == 2 * 4 + 6, "two weights at four numbers of rows, attention, two numbers of parts, prompts"
    launched: list[Any] = []
    launch = products.linear
    monkeypatch.setattr(products, "linear", lambda *args, **how: launched.append(how) or launch(*args, **how))
    for num_rows in (1, 7, 64, 65):
        x = torch.randn(num_rows, 256).to(torch.bfloat16)
        found, expected = backend.linear(x, own["o"][0]), F.linear(x, own["o"][0])
        torch.testing.assert_close(found.float(), expected.float(), atol=3e-2, rtol=3e-2)
    assert len(launched) == 3, "more rows are cuBLAS's"
    x, down = torch.randn(3, 64).to(torch.bfloat16), torch.randn(64, 128).to(torch.bfloat16)
    expected = CudaBackend(CPU).gated_mlp(x, own["gate_up"][0], down)
    found = backend.gated_mlp(x, own["gate_up"][0], down)
    torch.testing.assert_close(found.float(), expected.float(), atol=0.1, rtol=3e-2)
    assert launched[-1] == {"gated": True}
    case = Paged([1, 1], [40, 20])
    tile = backend.geometry(case.q, case.kv, case.meta)
    chosen_tile = timed_launches.OF_ONE_ROW[-1]
    assert (tile.tokens, tile.stages) == (chosen_tile.tokens, chosen_tile.stages) != (64, 5)
    assert backend._tiles == {(True, 2, 16): chosen_tile, (False, 2, 16): timed_launches.OF_BLOCKS[-1]}
    assert tile.joined and backend._joined == {(True, 2, 16): {2, 4}} and len(backend._prompts) == 2


@pytest.mark.parametrize("kind", [CudaBackend, InvariantCudaBackend])
def test_kernels_of_rows_are_chained_where_that_was_quicker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[CudaBackend]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    noise = torch.Generator().manual_seed(0)
    own = [torch.randn(8 * 16, 64, generator=noise).to(torch.bfloat16) for _ in range(2)]
    backend, launched = kind(CPU), list[bool]()
    found = timed_launches.chained_rows(DECODER, own, own)
    monkeypatch.setattr(kind, "questions", lambda *_: {timed_launches.OfRows(64): found})
    took = iter([1.0, 0.99, 1.0, 0.9])
    for chained in (False, True):
        shown = backend.tune([DECODER], {}, 2, 16, lambda call: call() or next(took))
        assert shown == {found.name: "chained" if chained else "default"}
        for kept in (tmp_path / "dflash-server" / "tuned").iterdir():
            kept.unlink()
        monkeypatch.setattr(rows, "chain", lambda *, on: launched.append(on) or {"CHAINED": False})
        launched.clear()
        _, weight = backend.add_rms_norm(*(torch.ones(2, 2, 64)), torch.ones(64), 1e-6), torch.ones(64, 64)
        backend.gated_mlp(torch.ones(2, 64), torch.ones(128, 64), weight)
        kv = LayerKv(*torch.zeros(2, 1, 2, 2, 16))
        turns = tuple(torch.ones(2, 2, 1, 16))
        slots = torch.arange(2, dtype=torch.int32)
        backend.qkv_into_kv(ProjectedRows(torch.ones(2, 8, 16), None, None, 1e-6, turns, kv, slots))
        assert launched == [chained] * 3


@pytest.mark.parametrize("fixed", [False, True])
def test_attention_is_timed_like_it_is_launched_and_behind_another_kernel(
    monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(timed_launches, "CONTEXT", 20)
    monkeypatch.setattr(timed_launches, "paged_attention", lambda *args: launched.append(args[-1]))
    asked = (timed_launches.of_fixed_engine if fixed else timed_launches.of_engine)([DECODER], weights(), 2, 16, 132)
    (question,) = [asked[key] for key in asked if isinstance(key, timed_launches.OfAttention) and not key.plain]
    question.timed(question.ways[0])
    assert {(at.part > 0, at.chained) for at in launched} == {(fixed, True)} and len(launched) > 1
    assert question.name.startswith("fixed ") == fixed, "an answer of one is none of the other"
    launched.clear()
    for joining in (asked[key] for key in asked if isinstance(key, timed_launches.OfAttention) and key.joining):
        joining.timed(joining.ways[0])
    assert {(at.joined, at.splits) for at in launched} == (set() if fixed else {(True, 16)})


def test_where_parts_are_added_is_asked_for_each_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are the parts of 1 and of the most sequences, and of those between."""
    launched: list[Any] = []
    monkeypatch.setattr(timed_launches, "paged_attention", lambda *args: launched.append(args[-1]))
    monkeypatch.setattr(timed_launches, "CONTEXT", 20)
    monkeypatch.setattr(timed_launches, "CHAIN", 1)
    heads = Heads(num_heads=32, num_kv_heads=8, head_dim=16)
    asked = {key.joining: one for key, one in of_attention(heads, num_seqs=64).items() if key.joining}
    assert list(asked) == [16, 2, 8, 4] and len({question.name for question in asked.values()}) == 4
    for question in asked.values():
        question.timed(None)
        question.timed((1,))
    assert [(at.tiles, at.splits, at.joined) for at in launched] == [
        (seqs, parts, joined) for seqs, parts in ((1, 16), (32, 2), (4, 8), (8, 4)) for joined in (False, True)
    ]
    assert [key.joining for key in of_attention(heads, num_seqs=1)] == [0, 0, 16]
    backend, case = CudaBackend(CPU), Paged([1, 1], [40, 20])
    for parts in (1, 2, 4):
        backend._joined = {(True, 2, 16): {parts}}
        assert backend.geometry(case.q, case.kv, case.meta).joined == (parts == 2)


def of_attention(heads: Heads, num_seqs: int) -> dict[timed_launches.OfAttention, Question]:
    asked = timed_launches.of_engine([heads], weights(), num_seqs, 16, 132)
    return {key: question for key, question in asked.items() if isinstance(key, timed_launches.OfAttention)}


def test_nothing_is_timed_in_fp32_nor_off_a_gpu() -> None:
    in_fp32 = {name: [weight.float() for weight in own] for name, own in weights().items()}
    assert timed_launches.of_engine([DECODER], in_fp32, 2, 16, 132) == {}
    assert CudaBackend(CPU).tune([DECODER], weights(), 2, 16) == {}


def test_a_clock_reads_the_least_of_some_replays_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([40.0, 20.0, 30.0, 50.0])
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: next(took))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    ran: list[str] = []
    graph = SimpleNamespace(replay=lambda: ran.append("replay"))
    found = tune.seconds_in_a_graph(lambda run: run() or graph, lambda: ran.append("run"))
    assert found == pytest.approx(20e-3) and ran == ["run", *["replay"] * 4]


def test_a_kept_file_is_readable_by_people(machine: Machine, tmp_path: Path) -> None:
    tune.tune([machine.question("a", (1,)), machine.question("b", (5,))], machine.seconds, "a GPU", tmp_path)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {"a": [1], "b": None}
