"""However many drafts a step verifies, the tokens are the same; and what is asked for is what is verified."""

from pathlib import Path
from typing import Any

import pytest

from app.checkpoint import DEMO
from app.engine.build import build_engine
from app.engine.config import EngineConfig
from app.engine.core import EngineCore, Step
from app.engine.costs import measure_costs
from app.engine.errors import UnsupportedError
from app.engine.sequence import Request
from tests.engine.lossless import demo_prompts
from tests.engine.pairs import make_pair


def engine(verify: str | int, **config: Any) -> EngineCore:
    wishes = {"target": DEMO / "target", "draft": DEMO / "draft", "device": "cpu", "max_num_seqs": 8}
    return build_engine(EngineConfig(verify=verify, **wishes | config)).core


def requests() -> list[Request]:
    prompts = [*demo_prompts("math", 6, 40), *demo_prompts("prose", 6, 40)]
    return [
        Request(str(i), prompt.token_ids, 40, 0.9 * (i % 2), seed=i, stop_token_ids=prompt.stop_token_ids)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def full() -> dict[str, list[int]]:
    return engine("full").run(requests())


@pytest.mark.parametrize("verify", [1, 2, 5, 16, "auto"])
@pytest.mark.parametrize("eager", [True, False])
def test_tokens_do_not_depend_on_how_many_drafts_are_verified(
    full: dict[str, list[int]], verify: str | int, eager: bool
) -> None:
    steps: list[Step] = []
    assert engine(verify, enforce_eager=eager).run(requests(), steps.append) == full
    most = max(delta.num_verified for step in steps for delta in step.deltas)
    if isinstance(verify, int):
        assert most == verify - 1
        assert any(step.num_drafting for step in steps) == (verify > 1)


def test_costs_are_timed_without_a_trace_in_what_is_served(full: dict[str, list[int]]) -> None:
    core = engine("auto", prefix_caching=True)
    assert core.scheduler.pool.num_used == 0 and core.scheduler.policy.costs is not None
    assert float(core.scheduler.policy.costs.step_ms(8, 8, 8 * 15)) > 0
    assert core.run(requests()) == full


def test_sizes_that_the_pages_do_not_hold_are_not_timed(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, block_size=8)
    config = {"target": pair.target, "draft": pair.draft, "page_size": 8, "max_num_batched_tokens": 64}
    built = build_engine(EngineConfig(device="cpu", max_num_seqs=8, **config))
    costs = measure_costs(built.core.runner, built.sizes, num_pages=3)
    assert costs._draft[-1, 0] == 2, "8 rows a page: two sequences on three pages, the next size has four"


@pytest.mark.parametrize("verify", [0, 17])
def test_a_width_that_no_block_has_is_refused(verify: int) -> None:
    with pytest.raises(UnsupportedError, match=f"--verify {verify}: a block has 16 rows"):
        engine(verify)
