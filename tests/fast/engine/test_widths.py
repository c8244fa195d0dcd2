"""The number of verified drafts changes no token. A step verifies the requested number, and drafts no wider block."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.engine import EngineConfig
from app.engine.checkpoint.files import DEMO
from app.engine.core import EngineCore
from app.engine.errors import UnsupportedError
from app.engine.load import made_up_steps as costs
from app.engine.load.engine import build_engine
from app.engine.load.made_up_steps import measure_costs
from app.engine.load.plan import Sizes
from app.engine.schedule.batch import Batch
from app.engine.schedule.policy import Policy, Widths
from app.engine.step.runner import PendingStep
from app.messages import Request, SamplingParams, StepOutput
from tests import UNTIMED
from tests.costs import fast_ones
from tests.fast.engine.lossless import demo_prompts
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.steady import steady_costs


def engine(verify: str | int, **config: Any) -> EngineCore:
    wishes = {"target": DEMO / "target", "draft": DEMO / "draft", "device": "cpu", "max_num_seqs": 8}
    return build_engine(EngineConfig(verify=verify, **wishes | config)).core


def requests() -> list[Request]:
    prompts = [*demo_prompts("math", 6, 40), *demo_prompts("prose", 6, 40)]
    return [
        Request(
            str(i),
            prompt.token_ids,
            40,
            sampling=SamplingParams(temperature=0.9 * (i % 2), seed=i),
            stop_token_ids=prompt.stop_token_ids,
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def full() -> dict[str, list[int]]:
    return engine("full").run(requests())


@pytest.mark.parametrize("verify", fast_ones([1, 2, 5, 16, "auto"], (2, 16)))
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_tokens_do_not_depend_on_how_many_drafts_are_verified(full, verify, eager):
    steps: list[StepOutput] = []
    assert engine(verify, enforce_eager=eager).run(requests(), steps.append) == full
    most = max(delta.steps[0].n_verified for step in steps for delta in step.deltas)
    if isinstance(verify, int):
        assert most == verify - 1
        assert any(step.stats.num_drafting for step in steps) == (verify > 1)


def blocks_drafted(core: EngineCore) -> list[tuple[int, int]]:
    """From now on of every step that drafts: the rows that the policy wants blocks to have, and those they have."""
    drafted: list[tuple[int, int]] = []
    launch = core.launch

    def noted(batch: Batch) -> PendingStep:
        if draft := core.runner.layout.build(batch).draft:
            (rows,) = set(draft.groups[0].query_lens)
            drafted.append((batch.block_rows, rows))
        return launch(batch)

    core.launch = noted  # type: ignore[method-assign]
    return drafted


@pytest.mark.parametrize("verify", [6, "full"])
def test_all_blocks_have_as_many_rows_as_are_to_be_verified(verify: str | int) -> None:
    """At the end of an answer too, so the drafts of a sequence do not depend on its neighbours."""
    core = engine(verify)
    drafted = blocks_drafted(core)
    core.run(requests())
    core.run([replace(requests()[0], max_tokens=4)])
    width = 16 if verify == "full" else verify
    assert len(drafted) > 10 and set(drafted) == {(width, width)}


class EveryWidth(Policy):
    """Wants blocks of two rows, of three, and so on, step by step: costs that are timed may lead to one width alone."""

    def choose(self, wanted: Sequence[tuple[Hashable, int]]) -> Widths:
        self.fixed_block = max(2, self.fixed_block % self.block_size + 1)
        return super().choose(wanted)


@pytest.mark.parametrize("eager", fast_ones([True, False], (False,)))
def test_blocks_are_as_wide_as_the_policy_wants_or_as_the_next_captured_width(full, eager):
    core = engine("full", enforce_eager=eager)
    core.scheduler.policy = EveryWidth(16)
    drafted = blocks_drafted(core)
    assert core.run(requests()) == full
    assert {wanted for wanted, _ in drafted} == set(range(2, 17))
    assert bool(core.runner.graphs and core.runner.graphs.draft_graphs) != eager
    captured = range(2, 17) if eager else (4, 6, 8, 12, 16)
    assert all(rows == next(width for width in captured if width >= wanted) for wanted, rows in drafted)


def test_automatic_blocks_are_as_narrow_as_what_is_verified_of_them(full, monkeypatch):
    steady_costs(monkeypatch)
    core = engine("auto")
    drafted = blocks_drafted(core)
    assert core.run(requests()) == full
    assert {wanted for wanted, _ in drafted} > {16} and all(rows == wanted for wanted, rows in drafted)


@pytest.mark.parametrize(
    ("rows", "least"),
    [(4, 3.6), pytest.param(8, 6.0, marks=pytest.mark.exhaustive), pytest.param(12, 7.5, marks=pytest.mark.slow)],
)
def test_narrow_blocks_are_as_good_as_the_beginning_of_wide_ones(rows: int, least: float) -> None:
    """Acceptance length of held-out math and code. A draft that saw its masks wrongly would have a smaller one."""
    prompts = [*demo_prompts("math", 8, 60), *demo_prompts("code", 8, 60)]
    asked = [Request(str(i), p.token_ids, 60, stop_token_ids=p.stop_token_ids) for i, p in enumerate(prompts)]
    steps: list[StepOutput] = []
    engine(rows).run(asked, steps.append)
    deltas = [delta for step in steps for delta in step.deltas if delta.steps[0].n_verified]
    assert 1 + sum(delta.steps[0].n_accepted for delta in deltas) / len(deltas) >= least


@pytest.mark.exhaustive
def test_costs_are_timed_without_a_trace_in_what_is_served(full: dict[str, list[int]]) -> None:
    core = engine("auto", prefix_caching=True)
    assert core.scheduler.pool.num_used == 0 and core.scheduler.policy.costs is not None
    assert float(core.scheduler.policy.costs.step_ms(8, 8, 16, 8 * 15)) > 0
    assert core.run(requests()) == full


def test_sizes_that_the_pages_do_not_hold_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MAX_SECONDS", 0.3)
    pair = make_pair(tmp_path, block_size=8)
    config = {"target": pair.target, "draft": pair.draft, "page_size": 8, "max_num_batched_tokens": 64}
    built = build_engine(EngineConfig(device="cpu", max_num_seqs=8, **UNTIMED | config))
    timed = measure_costs(built.core.runner, built.sizes, num_pages=3)
    assert timed.seqs == [1, 2], "8 rows a page: two sequences on three pages, the next size has four"


def test_what_held_a_step_up_while_it_was_timed_is_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time a whole block in all rounds but one."""
    rounds = iter([400.0, 400.0, 6.0])
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(costs, "made_up", lambda shape, sizes: shape)
    monkeypatch.setattr(
        costs,
        "_timed",
        lambda runner, shape, texts, overlap: next(rounds, 400.0) if shape == (1, 1, 16, 16) else 3.0 + shape.drafting,
    )
    runner = SimpleNamespace(layout=SimpleNamespace(graphs=None))
    timed = measure_costs(runner, Sizes(16, 256, 4, 64, 16), num_pages=16)  # type: ignore[arg-type]
    assert float(timed.step_ms(1, 1, 16, 15)) == 6.0


@pytest.mark.parametrize("verify", [0, 17])
def test_a_width_that_no_block_has_is_refused(verify: int) -> None:
    with pytest.raises(UnsupportedError, match=f"--verify {verify}: a block has 16 rows"):
        engine(verify)


@pytest.mark.parametrize("block_size", fast_ones([2, 3, 4, 5], (2, 5)))
def test_the_policy_of_blocks_that_are_narrower_than_a_probe_starts_with_graphs(tmp_path, monkeypatch, block_size):
    monkeypatch.setattr(costs, "MAX_SECONDS", 0.3)
    pair = make_pair(tmp_path, block_size=block_size)
    config = {"target": pair.target, "draft": pair.draft, "page_size": 8, "max_num_batched_tokens": 64}
    built = build_engine(EngineConfig(device="cpu", max_num_seqs=2, enforce_eager=False, verify="auto", **config))
    request = Request("r", (1, 2, 3), 12)
    assert len(built.core.run([request])["r"]) == 12
