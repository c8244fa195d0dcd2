"""A start is timed for at most ten seconds, by a clock of its own: no real time is asserted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from app.engine.load import engine as build
from app.engine.load import made_up_steps as time_steps
from app.engine.load.made_up_steps import MAX_SECONDS, made_up, measure_costs
from app.engine.load.plan import Sizes
from app.engine.models.target import Target
from app.engine.schedule.batch import Batch
from app.engine.schedule.costs import CostTable, Shape
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import make_pair

SIZES = Sizes(block_size=16, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=512, page_size=16)


class Machine:
    """A clock that only steps move, and the shapes that were run."""

    def __init__(self, step_ms: Callable[[Shape], float]) -> None:
        self.step_ms = step_ms
        self.now = 100.0
        self.ran: list[Shape] = []
        self.progress: list[tuple[int, int]] = []

    def perf_counter(self) -> float:
        return self.now

    def launch(self, shape: Shape) -> "Machine":
        self.ran.append(shape)
        self.now += self.step_ms(shape) / 1000
        return self

    def read(self) -> None:
        pass


def measured(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> CostTable:
    layout = SimpleNamespace(build=lambda shape: shape, graphs=None)
    runner = SimpleNamespace(launch=machine.launch, rollback=lambda: None, layout=layout)
    monkeypatch.setattr(time_steps, "time", machine)
    monkeypatch.setattr(time_steps, "made_up", lambda shape, sizes: shape)
    monkeypatch.setattr(time_steps, "_with_text", lambda inputs, shape, texts: inputs)
    return measure_costs(runner, SIZES, 64, lambda done, total: machine.progress.append((done, total)))  # type: ignore[arg-type]


def by_rows(first: float, target: float, draft: float) -> Callable[[Shape], float]:
    """Milliseconds of a step: the weights, and each row of the two models."""

    def step_ms(shape: Shape) -> float:
        return first + target * (shape.seqs + shape.drafting * (shape.rows - 1)) + draft * shape.drafting * shape.block

    return step_ms


@pytest.mark.parametrize("slowness", [1, 30, 300, 1000])
def test_timing_ends_within_its_limit_on_any_machine(monkeypatch: pytest.MonkeyPatch, slowness: int) -> None:
    machine = Machine(by_rows(slowness, 0.3 * slowness, 0.05 * slowness))
    measured(monkeypatch, machine)
    assert machine.now - 100 <= MAX_SECONDS == 10


def test_a_small_model_on_a_cpu_is_timed_within_two_seconds_at_few_sequences_and_at_many(monkeypatch):
    machine = Machine(by_rows(17, 3, 1))  # SmolLM2-135M on two cores
    measured(monkeypatch, machine)
    assert machine.now - 100 <= 2
    assert {1, 4, 16} <= {shape.seqs for shape in machine.ran}


def test_a_slow_machine_times_many_sequences_for_half_as_long_as_one(monkeypatch):
    machine = Machine(by_rows(60, 6, 1))
    measured(monkeypatch, machine)
    assert {shape.seqs for shape in machine.ran} == {1, 16}
    assert machine.now - 100 <= 1.5 * sum(machine.step_ms(shape) for shape in machine.ran if shape.seqs == 1) / 1000


def test_a_machine_on_which_two_steps_take_longer_runs_these_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(by_rows(8000, 100, 10))
    table = measured(monkeypatch, machine)
    assert machine.ran == [Shape(1), Shape(1, 1, 16, 16)]
    assert float(table.step_ms(1, 0, 16, 0)) == pytest.approx(8100)


def test_what_is_not_timed_is_scaled_from_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    step_ms = by_rows(300, 70, 8)
    machine = Machine(step_ms)
    table = measured(monkeypatch, machine)
    widest = Shape(16, 16, 16, 16)
    assert widest not in machine.ran and Shape(1, 1, 2, 4) in machine.ran
    assert float(table.step_ms(16, 16, 16, 16 * 15)) == pytest.approx(step_ms(widest), rel=0.02)
    assert float(table.step_ms(16, 0, 16, 0)) == pytest.approx(step_ms(Shape(16)), rel=0.02)


def test_a_quick_machine_times_every_shape_in_rounds_behind_two_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(by_rows(0.2, 0.01, 0.001))
    measured(monkeypatch, machine)
    assert {machine.ran.count(shape) for shape in machine.ran} == {6 * 3}
    assert {shape.seqs for shape in machine.ran} == {1, 2, 4, 8, 16}


def test_progress_says_how_many_seconds_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(by_rows(300, 70, 8))
    measured(monkeypatch, machine)
    assert machine.progress[0] == (0, 10) and machine.progress.index((10, 10)) == len(machine.progress) - 1
    assert machine.progress == sorted(machine.progress) and len({done for done, _ in machine.progress}) > 5


class Device:
    """A device that works on a queue: a launch takes the host 1 ms, and each step the device 5 ms."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.in_flight: list[float] = []
        self.layout = SimpleNamespace(build=lambda shape: shape, graphs=None)

    def perf_counter(self) -> float:
        return self.now

    def rollback(self) -> None:
        pass

    def launch(self, shape: Shape) -> SimpleNamespace:
        self.now += 0.001
        self.free = max(self.now, self.free) + 0.005
        done = self.free
        self.in_flight.append(done)
        return SimpleNamespace(read=lambda: self.read(done))

    def read(self, done: float) -> None:
        self.in_flight.remove(done)
        self.now = max(self.now, done)


@pytest.mark.parametrize(("overlap", "ms"), [(True, 5.0), (False, 6.0)])
def test_the_hosts_part_counts_only_where_serving_does_not_hide_it(monkeypatch, overlap, ms):
    device = Device()
    monkeypatch.setattr(time_steps, "time", device)
    monkeypatch.setattr(time_steps, "_with_text", lambda inputs, shape, texts: inputs)
    assert time_steps._timed(device, Shape(1), (), overlap=overlap) == pytest.approx(ms)  # type: ignore[arg-type]
    assert not device.in_flight, "a step that is not read would hold the next one up"


@pytest.mark.parametrize("draft_enforce_eager", [False, True])
def test_steps_of_a_runner_with_graphs_cost_what_they_are_padded_to(tmp_path, monkeypatch, draft_enforce_eager):
    """Blocks without graphs of their own are not widened, but the target's steps are padded."""
    pair = make_pair(tmp_path)
    monkeypatch.setattr(time_steps, "MAX_SECONDS", 0.3)
    wishes: dict[str, Any] = {"enforce_eager": False, "draft_enforce_eager": draft_enforce_eager, "max_model_len": 64}
    engine = make_engine(pair.target, pair.draft, verify="auto", max_num_seqs=2, **wishes)
    costs, sizes = engine.core.scheduler.policy.costs, engine.core.runner.layout.graphs
    captured = [] if draft_enforce_eager else [2, 3, 4, 6, 8]
    assert costs is not None and sizes is not None and costs.widths == (captured or [2, 4, 8])
    assert [width for blocks, width in sizes.drafts if blocks == 2] == captured
    most = engine.sizes.block_size
    flat = costs.step_ms(2, 1, most, np.arange(1, most - 1))
    assert len(set(flat.tolist())) == 1, "one graph holds them"


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_rows_of_a_timed_step_of_a_mixture_are_text_that_it_makes_up(tmp_path, monkeypatch, enforce_eager):
    """Rows of one token have the same experts, and rows of any tokens share fewer than those of a text."""
    pair = make_pair(tmp_path, experts=8, num_layers=2, taps=(0,), draft_layers=1, vocab_size=64)
    monkeypatch.setattr(time_steps, "MAX_SECONDS", 0.5)
    given: list[Any] = []
    measure = time_steps.measure_costs
    monkeypatch.setattr(
        build, "measure_costs", lambda *args, **rest: given.append(rest["texts"]) or measure(*args, **rest)
    )
    wishes = {"max_num_seqs": 3, "enforce_eager": enforce_eager, "max_model_len": 64}
    seen: list[list[int]] = []
    forward = Target.forward

    def noted(self: Target, token_ids: Tensor, *rest: Any) -> Any:
        seen.append(token_ids.tolist())
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(Target, "forward", noted)
    make_engine(pair.target, pair.draft, verify="auto", **wishes)
    (texts,) = given
    assert [len(text) for text in texts] == [32] * 3 and len({*map(tuple, texts)}) == 3
    one, two = texts[0][:8], [*texts[0][:8], *texts[1][:8]]
    assert one in [rows[:8] for rows in seen] and two in [rows[:16] for rows in seen]


def test_a_dense_target_makes_up_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(tmp_path)
    monkeypatch.setattr(time_steps, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(build, "made_up_texts", lambda *_: pytest.fail("its steps cost the same for any tokens"))
    assert make_engine(pair.target, pair.draft, verify="auto", max_num_seqs=1, max_model_len=64)


@pytest.mark.parametrize(("seconds", "tokens"), [(0.4, 15), (0.6, 11)])
def test_a_mixture_on_a_slow_machine_makes_up_short_texts_or_none(
    monkeypatch: pytest.MonkeyPatch, seconds: float, tokens: int
) -> None:
    """The first two steps may take any time, because kernels are compiled in them."""
    slow = iter([60.0, 60.0])
    machine = Machine(lambda _: 1000 * next(slow, seconds))
    vocabulary = SimpleNamespace(forward=SimpleNamespace(target=SimpleNamespace(config=SimpleNamespace(vocab_size=9))))
    asked: list[str] = []

    def step() -> SimpleNamespace:
        machine.launch(Shape(1))
        return SimpleNamespace(deltas=[SimpleNamespace(request_id=name, token_ids=[5]) for name in asked[1:]])

    core: Any = SimpleNamespace(
        runner=vocabulary, add=lambda request: asked.append(request.request_id), has_work=True, step=step
    )
    monkeypatch.setattr(time_steps, "time", machine)
    found = time_steps.made_up_texts(core, replace(SIZES, max_num_seqs=4, block_size=12))
    assert found == ([[5] * tokens] * 3 if tokens >= 12 else [[0, 8, 7, 6, 5, 4, 3, 2, 1]]), "one has no token"


def test_sequences_have_texts_in_turn_and_then_what_follows_in_them() -> None:
    batch = Batch(decodes=[SimpleNamespace(count=2)] * 5)  # type: ignore[list-item]
    target = SimpleNamespace(token_ids=np.zeros(12, np.int32), token_source=None)
    time_steps._with_text(SimpleNamespace(target=target), batch, [[1, 2, 3, 4, 5], [6, 7, 8]])  # type: ignore[arg-type]
    assert target.token_ids.tolist() == [1, 2, 6, 7, 3, 4, 8, 6, 5, 1, 0, 0], "the last rows are padding"
    assert target.token_source.tolist() == [*range(12)]


@pytest.mark.parametrize("page_size", [4, 16, 128])
@pytest.mark.parametrize("max_model_len", [20, 144, 160, 300])
def test_timed_steps_stay_within_the_positions_of_a_sequence(page_size: int, max_model_len: int) -> None:
    """Blocks that share a page lie up to a page further than the context, and RoPE's table ends soon after the limit.
    As in `--page-size 128 --max-model-len 160 --max-num-batched-tokens 129`."""
    sizes = Sizes(16, max_model_len, max_num_seqs=8, max_num_batched_tokens=129, page_size=page_size)
    batch = made_up(Shape(8, 8, 16, 16), sizes)
    assert max(entry.end for entry in batch.entries) <= max(sizes.padded_len, sizes.max_num_batched_tokens)
    assert all(entry.end <= len(entry.seq.pages) * page_size for entry in batch.entries)
    assert max(len(entry.seq.pages) for entry in batch.entries) <= max(sizes.pages_per_sequence, 2)


def test_the_widest_step_that_is_measured_draws_with_penalties(tmp_path: Path) -> None:
    """Their counts are taken with graphs, when nothing measures them any more."""
    pair = make_pair(tmp_path, vocab_size=32)
    runner = make_engine(pair.target, pair.draft, max_num_seqs=2, max_model_len=64, page_size=16).core.runner
    sizes = replace(SIZES, block_size=8, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    backend: Any = SimpleNamespace(peak_memory=lambda run: len(run().tokens))
    assert time_steps.step_memory(lambda num_pages: runner, backend, sizes) == sizes.max_num_seqs
    assert "tensors" in vars(runner.counts)
