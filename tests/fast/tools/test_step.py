"""`python -m tools.lab step` measures the shapes that it says it does, and its verdicts follow from what was found."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.load.engine import Engine
from app.engine.load.memory import CPU_KV_BYTES
from app.engine.step.inputs import Layout, StepInputs
from app.engine.step.runner import ModelRunner, PendingStep
from tests.fast.tools.tiny import TINY, tiny_engine
from tools.lab import __main__ as parts
from tools.lab import step, step_timing
from tools.lab.random_weights import write_configs
from tools.lab.step import Series, all_series, flat_host, linear
from tools.lab.step_timing import Bench, Measured, Shape, Split, room


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("tiny"), page_size=4)


TAKES = (1, 2, 4, 8, 16)
"""Milliseconds to schedule, to make arrays, to launch, to read and to commit, by Clock."""


class Clock:
    """Moved by the parts of a step, and by nothing else."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def takes(self, milliseconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, which takes so long."""

        def timed(*given: Any) -> Any:
            self.seconds += milliseconds / 1000
            return work(*given)

        return timed


@pytest.fixture
def clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Steps take what TAKES says."""
    clock = Clock()
    monkeypatch.setattr(step_timing, "time", clock)
    scheduler, runner = engine.core.scheduler, engine.core.runner
    monkeypatch.setattr(scheduler, "schedule", clock.takes(TAKES[0], scheduler.schedule))
    monkeypatch.setattr(scheduler, "commit", clock.takes(TAKES[4], scheduler.commit))
    monkeypatch.setattr(Bench, "_arrays", clock.takes(TAKES[1], Bench._arrays))
    monkeypatch.setattr(runner, "launch", clock.takes(TAKES[2], runner.launch))
    monkeypatch.setattr(PendingStep, "read", clock.takes(TAKES[3], PendingStep.read))
    return clock


class Watched:
    """A runner that keeps the batches it launched as (tokens of each sequence, rows of each)."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.forward = runner.forward
        self.batches: list[list[tuple[int, int]]] = []

    @property
    def layout(self) -> Layout:
        return self.runner.layout

    def launch(self, inputs: StepInputs) -> PendingStep:
        assert inputs.draft or inputs.plain_sequences, "nothing is prefilled"
        (group,) = inputs.target.groups
        lengths = zip(group.host_seq_lens, group.query_lens, strict=True)
        self.batches.append([(length - rows + 1, rows) for length, rows in lengths])
        return self.runner.launch(inputs)


@pytest.fixture
def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watched:
    runner = Watched(engine.core.runner)
    monkeypatch.setattr(engine.core, "runner", runner)
    return runner


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [Shape(1, 2, True), Shape(1, 100, False), Shape(3, 77, True), Shape(4, 420, False)])
def test_sequences_come_to_their_context_without_a_prefill(
    engine: Engine, watched: Watched, clock: Clock, shape: Shape
) -> None:
    bench = Bench(engine)
    assert bench.fits(shape)
    found = Measured()
    bench.steps(shape)
    bench.time(shape, found)
    bench.time(shape, found)
    assert all(tuple(split) == pytest.approx(TAKES) for split in found.splits) and len(found.splits) == 2
    assert found.hosts == pytest.approx([1 + 2 + 16] * 2)
    steps = 1 + shape.timed
    assert len(watched.batches) == 3 * steps
    for batch in watched.batches[::steps]:
        tokens, rows = zip(*batch, strict=True)
        assert all(shape.context <= n <= shape.context + 8 for n in tokens)
        assert rows == (16 if shape.drafts else 1,) * shape.batch
    scheduler = engine.core.scheduler
    assert not scheduler.has_work and scheduler.pool.num_used == 0


def test_once_a_prompt_is_known_the_context_is_exact(engine: Engine, watched: Watched) -> None:
    shape = Shape(3, 333, True)
    bench = Bench(engine)
    bench.time(shape, Measured())
    bench.time(shape, Measured())
    assert watched.batches[1 + step_timing.BLOCK_STEPS] == [(333, 16)] * 3


def test_a_device_that_runs_on_is_timed_with_steps_queued(engine: Engine, watched: Watched, clock: Clock) -> None:
    shape, found, bench = Shape(2, 30, True), Measured(), Bench(engine)
    bench.is_asynchronous = True
    bench.time(shape, found)
    assert found.queued == pytest.approx([(4 * step_timing.QUEUED_STEPS + 8) / step_timing.QUEUED_STEPS])
    assert watched.batches[-step_timing.QUEUED_STEPS :] == [watched.batches[-1]] * step_timing.QUEUED_STEPS
    assert engine.core.scheduler.pool.num_used == 0


def test_shapes_that_do_not_fit_are_known_beforehand(engine: Engine) -> None:
    bench = Bench(engine)
    assert bench.longest == 512 - room(16)
    assert not bench.fits(Shape(5, 20, True)), "the engine has 4 places"
    assert not bench.fits(Shape(1, bench.longest + 1, False))


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ("--batches 1 --contexts 256 --context-batches 1", 512),
        ("--batches 1,32 --contexts 256 --context-batches 1", 32 * 512),
        ("--batches 1 --contexts 256,8192 --context-batches 1,8", 8 * 8192),
    ],
)
def test_on_a_cpu_kv_memory_is_what_the_sizes_fill(sizes: str, tokens: int, tmp_path: Path) -> None:
    options = step.settled(step.parser().parse_args(["--device", "cpu", *sizes.split()]))
    target, draft = write_configs("demo", tmp_path)
    memory = step.engine_config(options, target, draft).kv_cache_memory
    bytes_per_token = 2 * (5 + 3) * 2 * 128 * 4
    assert memory is not None and tokens < memory / bytes_per_token < 1.4 * tokens
    options.contexts = [1 << 30]
    assert step.engine_config(options, target, draft).kv_cache_memory <= CPU_KV_BYTES


def test_what_does_not_fit_is_left_out_and_told(tmp_path: Path) -> None:
    tiny = tiny_engine(tmp_path, page_size=4, kv_cache_memory=2 << 20)
    options = argparse.Namespace(batches=[1, 2, 4], context=64, contexts=[64, 256, 4096], context_batches=[1, 4])
    bench = Bench(tiny)
    found, left_out = step.fitting(options, bench, drafts=True)
    sizes = {str(some): [some.size(shape) for shape in some.shapes] for some in found}
    assert sizes["plain step against context at 1 sequence"] == [64, 256, bench.longest]
    assert sizes["whole block step against context at 4 sequences"] == [64, 256]
    assert left_out[0] == f"contexts 4096 are more than the model has room for: {bench.longest} instead"
    assert f"whole block step against context at 4 sequences: KV memory does not hold {bench.longest}" in left_out


CONTEXTS = [256, 512, 1024]


def grown(
    total: Callable[[int], float], host: Callable[[int], float] = lambda size: 0.3, rounds: int = 9
) -> tuple[Series, Any]:
    """Costs by context over rounds of which every other one was twice as slow."""
    (some,) = all_series([], 512, CONTEXTS, [1], drafts=False)
    found = {}
    for shape in some.shapes:
        slow = [1 + turn % 2 for turn in range(rounds)]
        splits = [Split(0.0, 0.0, total(shape.context) * n, 0.0, 0.0) for n in slow]
        hosts = [host(shape.context) * n for n in slow]
        found[shape] = Measured(splits=splits, hosts=hosts)
    return some, found


@pytest.mark.parametrize(
    ("cost", "holds"),
    [
        (lambda n: 10.0, True),
        (lambda n: 5 + n / 100, True),
        (lambda n: n / 100, True),
        (lambda n: n**1.1 / 100, True),
        (lambda n: n**1.5 / 1000, False),
        (lambda n: 10.0 if n < 1024 else 25.0, False),
        (lambda n: n**2 / 10000, False),
    ],
)
def test_a_cost_that_grows_faster_than_linearly_is_found_out(cost: Callable[[int], float], holds: bool) -> None:
    verdict = linear(*grown(cost))
    assert verdict.holds == holds
    assert str(verdict).startswith("met: plain step against context" if holds else "MISSED: plain step")
    assert "20 % allowed" in str(verdict)


@pytest.mark.parametrize("cost", [lambda n: 10.0, lambda n: n**2 / 10000])
def test_fewer_than_six_rounds_tell_nothing(cost: Callable[[int], float]) -> None:
    for rounds, verdict in ((5, None), (6, cost(1024) == cost(256))):
        some, found = grown(cost, host=cost, rounds=rounds)
        assert linear(some, found).holds is flat_host(some, found).holds is verdict
    assert str(linear(*grown(cost, rounds=3))).startswith("unsettled: plain step against context")


def test_rounds_that_disagree_about_a_bound_are_unsettled() -> None:
    some, found = grown(lambda n: 10.0)
    for turn, times in enumerate((0.5, 4.0, 1.0, 0.7, 3.0, 1.2, 2.5, 0.9, 2.0)):
        found[some.shapes[-1]].splits[turn] = Split(0.0, 0.0, 25.0 * times, 0.0, 0.0)
        found[some.shapes[-1]].hosts[turn] = 0.4 * times
    assert linear(some, found).holds is None and flat_host(some, found).holds is None


def test_the_worst_pair_of_sizes_is_told() -> None:
    assert "from 512 to 1024, in proportion 2 x" in linear(*grown(lambda n: 10.0 if n < 1024 else 25.0)).found


@pytest.mark.parametrize(
    ("host", "holds"),
    [
        (lambda n: 0.3, True),
        (lambda n: 0.3 + n / 20_000, True),
        (lambda n: 0.01 + n / 100_000, True),
        (lambda n: 0.3 + n / 5_000, False),
        (lambda n: n / 1000, False),
    ],
)
def test_a_host_part_that_grows_with_context_is_found_out(host: Callable[[int], float], holds: bool) -> None:
    assert flat_host(*grown(lambda n: 100.0, host)).holds == holds


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sizes = "--batches 1,2 --context 40 --contexts 40,80 --context-batches 1 --rounds 2 --threads 1 --device cpu"
    return ["step", "--random-weights", str(tmp_path / "config.json"), *sizes.split()]


@pytest.mark.exhaustive
def test_the_part_prints_tables_and_writes_all_it_found(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert parts.main([*arguments, "--simulate-acceptance", "6.36", "--out", str(out)]) in (0, 1)
    printed = capsys.readouterr().out
    assert printed.index("RANDOM WEIGHTS") < printed.index("SIMULATED ACCEPTANCE") < printed.index("## Cost")
    for title in ("Cost against batch, context 40", "Cost against context, 1 sequence"):
        assert f"## {title}\n" in printed
    results = json.loads((out / "step.json").read_text())
    assert len(results["shapes"]) == 6 and len(results["verdicts"]) == 6
    assert all(len(shape["total"]) == 2 for shape in results["shapes"])
    assert results["tables"].keys() == {"batch-context-40", "context-1-sequence"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("slow", "rounds", "code"), [(False, 6, 0), (True, 6, 1), (True, 5, 0)])
def test_the_exit_code_says_whether_a_claim_was_missed_for_certain(
    arguments: list[str], slow: bool, rounds: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(bench: Bench, shapes: list[Shape], *_: object) -> dict[Shape, Measured]:
        def cost(shape: Shape) -> float:
            return (shape.batch * shape.context) ** (2 if slow else 1)

        def splits(shape: Shape) -> list[Split]:
            return [Split(0.1, 0.1, cost(shape), 0.0, 0.1)] * rounds

        return {s: Measured(splits=splits(s), hosts=[0.3] * rounds) for s in shapes}

    monkeypatch.setattr(step, "measure", made_up)
    assert parts.main(arguments) == code


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [([], "demo"), (["--model", "demo"], None), (["--draft-model", "x"], None), (["--random-weights", "y"], "y")],
)
def test_random_weights_are_the_default(arguments: list[str], wanted: str | None) -> None:
    assert step.settled(step.parser().parse_args(arguments)).random_weights == wanted


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--simulate-acceptance", "40"], "a block of 16 yields no such mean"),
        (["--simulate-acceptance", "0.5"], "a block of 16 yields no such mean"),
        (["--random-weights", "qwen3-9b"], "qwen3-8b, qwen3-4b, qwen3-0.6b"),
        (["--kv-cache-memory", "0.0001"], "--kv-cache-memory"),
        (["--model", "demo"], "exclude each other"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    arguments: list[str], more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parts.main([*arguments, *more]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--contexts", "1,8"], ["--batches", "0"]])
def test_a_size_that_cannot_be_is_refused(arguments: list[str], more: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parts.main([*arguments, *more])


@pytest.mark.slow
def test_a_real_engine_grows_no_faster_than_linearly_and_its_host_part_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processor time, which other work on the machine changes least. Contexts are of one sequence, for KV of many
    outgrows a processor's caches and may cost more than in proportion."""
    monkeypatch.setattr(step_timing, "time", SimpleNamespace(perf_counter=time.process_time))
    sizes = "--device cpu --threads 1 --rounds 9 --batches 1,8,32 --contexts 256,2048,8192 --context-batches 1".split()
    code = parts.main(["step", *sizes, "--out", str(tmp_path)])
    results = json.loads((tmp_path / "step.json").read_text())
    assert code == 0, results["verdicts"]
    for claim in ("grows no faster than linearly", "the host part, run by itself, does not grow"):
        assert True in [verdict["holds"] for verdict in results["verdicts"] if claim in verdict["claim"]]
