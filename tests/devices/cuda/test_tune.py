"""Launches are chosen only by their time among those that are right, within a limit, and once on a device."""

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

from app.engine.cuda import products, timed_launches, tune
from app.engine.cuda.attention import Geometry, Tile
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.invariant import InvariantCudaBackend
from app.engine.cuda.products import Product
from app.engine.cuda.tune import Outputs, Question, Variant
from app.engine.device.base import Heads
from tests.fast.engine.paged import Paged

torch.set_num_threads(1)

CPU = torch.device("cpu")
RIGHT, WRONG, FAULTY = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.2]), (4,)
SECONDS: dict[Variant | None, float] = {None: 1.0, (1,): 0.5, (2,): 0.7, (3,): 0.1, (5,): 0.99}


class Machine:
    """Timing double: a call takes SECONDS of its variant, and a second of the machine's own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timed: list[tuple[str, Variant | None]] = []
        self.used: dict[str, Variant] = {}

    def monotonic(self) -> float:
        return self.now

    def measure(self, call: Callable[[], Outputs]) -> tuple[float, Outputs]:
        self.now += 1.0
        outputs = call()
        return SECONDS[self.timed[-1][1]], outputs

    def question(self, name: str, *variants: Variant) -> Question:
        def run(variant: Variant | None) -> Outputs:
            if variant == FAULTY:
                raise RuntimeError("out of shared memory")
            self.timed.append((name, variant))
            return RIGHT, WRONG if variant == (3,) else RIGHT

        return Question(name, variants, run, lambda variant: self.used.update({name: variant}))

    def tune(self, questions: list[Question], folder: Path, device: str = "a GPU", **options: Any) -> dict[str, str]:
        return tune.tune(questions, self.measure, device, folder, **options)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(tune, "time", made)
    return made


def saved(folder: Path) -> Any:
    (file,) = folder.iterdir()
    return json.loads(file.read_text())


def test_the_fastest_right_variant_is_used(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = machine.question("a", (2,), (3,), FAULTY, (1,))
    assert machine.tune([asked], tmp_path) == {"a": "(1,)"} and machine.used == {"a": (1,)}
    assert "a: (3,) is wrong on this device" in caplog.text


def test_a_variant_that_raises_is_a_warning_with_its_name_and_error(machine, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert machine.tune([machine.question("a", FAULTY)], tmp_path) == {"a": "default"}
    assert "a: (4,) fails on this device" in caplog.text and "RuntimeError('out of shared memory')" in caplog.text


def test_a_variant_that_kills_the_process_is_not_tried_again(machine: Machine, tmp_path: Path) -> None:
    asked = [machine.question("a", (1,)), machine.question("b", (2,), FAULTY), machine.question("c", (1,))]
    with pytest.raises(RuntimeError, match="shared memory") as raised:
        machine.tune(asked, tmp_path, is_fatal=lambda error: True)
    assert raised.value.__notes__ == [
        "b: (4,) was tried; the next start launches it by default, and --tune off starts without timing"
    ]
    assert saved(tmp_path) == {"a": [1], "b": None}
    assert machine.tune(asked, tmp_path, is_fatal=lambda error: True) == {"a": "(1,)", "b": "default", "c": "(1,)"}


def test_a_difference_within_noise_is_none(machine: Machine, tmp_path: Path) -> None:
    assert machine.tune([machine.question("a", (5,))], tmp_path) == {"a": "default"} and not machine.used


def test_a_result_that_is_no_number_is_wrong() -> None:
    assert tune.error_of(torch.tensor([float("nan"), 1.0]), RIGHT) == float("inf")


def test_questions_end_after_ten_seconds_and_go_on_at_the_next_start(machine: Machine, tmp_path: Path) -> None:
    asked = [machine.question(name, (2,), (1,)) for name in "abcdef"]
    first = machine.tune(asked, tmp_path)
    assert machine.now <= tune.MAX_SECONDS + 3 and 2 <= len(first) < 6 and set(first.values()) == {"(1,)"}
    assert set(saved(tmp_path)) == set(first)
    assert set(machine.tune(asked, tmp_path)) > set(first)
    assert not {name for name, _ in machine.timed[-3:]} & set(first)


def test_an_answer_of_an_earlier_start_is_used_after_the_time_is_over(machine: Machine, tmp_path: Path) -> None:
    asked = [machine.question(name, (2,), (1,)) for name in "abcdef"]
    machine.tune(asked[-1:], tmp_path)
    machine.used.clear()
    shown = machine.tune(asked, tmp_path)
    assert "e" not in shown and shown["f"] == "(1,)" and machine.used["f"] == (1,)


def test_answers_are_remembered_by_device_and_version(machine, tmp_path, monkeypatch, caplog):
    asked = [machine.question("a", (1,)), machine.question("b", (5,))]
    with caplog.at_level(logging.INFO):
        machine.tune(asked, tmp_path)
    assert "1 of 2 launches other than by default" in caplog.text and "a: (1,)" in caplog.text
    assert saved(tmp_path) == {"a": [1], "b": None}, "people can read it"
    before = len(machine.timed)
    assert machine.tune(asked, tmp_path) == {"a": "(1,)", "b": "default"} and len(machine.timed) == before
    machine.tune(asked, tmp_path, "another GPU")
    assert len(machine.timed) == before + 4
    monkeypatch.setattr(torch, "__version__", "0.0")
    machine.tune(asked, tmp_path)
    assert len(machine.timed) == before + 8


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 7}', '{"a": ["x"]}', "\x00"])
def test_a_file_that_cannot_be_read_is_as_none(machine: Machine, tmp_path: Path, text: str) -> None:
    tune.answers_file(tmp_path, "a GPU").write_text(text)
    assert machine.tune([machine.question("a", (1,))], tmp_path) == {"a": "(1,)"}


def test_a_variant_that_exists_no_more_is_the_default(machine: Machine, tmp_path: Path) -> None:
    tune.answers_file(tmp_path, "a GPU").write_text('{"a": [9]}')
    assert machine.tune([machine.question("a", (1,))], tmp_path) == {"a": "default"} and not machine.used


def test_a_folder_that_cannot_be_written_to_costs_no_start(machine, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert machine.tune([machine.question("a", (1,))], tmp_path / "file") == {"a": "(1,)"}
    assert "cannot be saved" in caplog.text


DECODER = Heads(num_heads=4, num_kv_heads=2, head_dim=16)


def weights() -> dict[str, list[torch.Tensor]]:
    noise = torch.Generator().manual_seed(0)
    shapes = {"qkv": (128, 64), "o": (64, 256), "gate_up": (256, 64), "down": (64, 128)}
    return {name: [torch.randn(shape, generator=noise).to(torch.bfloat16) / 8] for name, shape in shapes.items()}


def test_what_was_chosen_is_launched_and_gives_the_same_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every variant is faster here than the one before. Each is compared with the default's result."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "MAX_SECONDS", 1e9)
    for name, value in (("CONTEXT", 20), ("CALLS", 1), ("ONE_ROW", [Tile(32, 1, 5, 2)])):
        monkeypatch.setattr(timed_launches, name, value)
    variant = Product(32, 32, 2)
    monkeypatch.setattr(products, "VARIANTS", [variant])
    seconds = (0.9**call for call in itertools.count())
    backend, own = CudaBackend(CPU), weights()
    shown = backend.tune([DECODER, DECODER], own, 2, 16, lambda call: (next(seconds), call()))
    assert shown["product 64 x 256, 16 rows"] == str(variant) and "SwiGLU 128 x 64, 1 rows" in shown
    assert len(shown) == 4 * 4 + 1, "four weights at four numbers of rows, and attention"
    (attention,) = [name for name in shown if name.startswith("attention")]
    assert attention == "attention of one row, 4 and 2 heads of 16, 2 sequences, pages of 16"
    assert set(backend.products.values()) == {variant} and backend.tiles == {DECODER: Tile(32, 1, 5, 2)}

    launched: list[Any] = []
    linear = products.linear
    monkeypatch.setattr(products, "linear", lambda *args, **how: launched.append(how) or linear(*args, **how))
    for num_rows in (1, 7, 64, 65):
        x = torch.randn(num_rows, 256).to(torch.bfloat16)
        found, expected = backend.linear(x, own["o"][0]), F.linear(x, own["o"][0])
        torch.testing.assert_close(found.float(), expected.float(), atol=3e-2, rtol=3e-2)
    assert launched == [{}] * 3, "more rows are cuBLAS's"
    x, down = torch.randn(3, 64).to(torch.bfloat16), own["down"][0]
    expected = CudaBackend(CPU).gated_mlp(x, own["gate_up"][0], down)
    found = backend.gated_mlp(x, own["gate_up"][0], down)
    torch.testing.assert_close(found.float(), expected.float(), atol=0.1, rtol=3e-2)
    assert launched[3] == {"gated": True}
    assert geometry_of(backend, [1, 1]).warps == 1 < geometry_of(backend, [2, 1]).warps, "blocks have one variant"


def geometry_of(backend: CudaBackend, query_lens: list[int]) -> Geometry:
    case = Paged(query_lens, [40, 20])
    return backend.geometry(case.q, case.kv, case.meta)


def test_nothing_is_timed_in_fp32_nor_off_a_gpu_nor_under_batch_invariant() -> None:
    assert InvariantCudaBackend(CPU).questions([DECODER], weights(), 2, 16) == []
    in_fp32 = {name: [weight.float() for weight in own] for name, own in weights().items()}
    for of_target in (in_fp32, {}):
        assert CudaBackend(CPU).questions([DECODER], of_target, 2, 16) == []
    assert CudaBackend(CPU).tune([DECODER], weights(), 2, 16) == {}


def test_a_clock_reads_the_least_of_some_replays_of_a_graph_and_what_they_leave(monkeypatch):
    took = iter([40.0, 20.0, 30.0, 50.0])
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: next(took))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    left = torch.zeros(1)
    graph = SimpleNamespace(replay=lambda: left.add_(1.0), outputs=(left,))
    seconds, (found,) = tune.seconds_in_a_graph(lambda run: graph, lambda: (left,))
    left.add_(1.0)  # another graph may take this memory
    assert seconds == pytest.approx(20e-3) and found == 4.0
