"""Acceptance that is drawn: as long on average as is wished, and nothing else of a step is another."""

from array import array
from statistics import fmean
from typing import cast

import pytest

from app.engine.schedule.batch import Batch, ScheduledSequence, StepResult
from app.engine.sequence import Sequence
from app.engine.step.inputs import Layout, StepInputs
from app.engine.step.runner import ModelRunner
from app.messages import Request
from tools.lab.simulated import SimulatedRunner, even_rates

PUBLISHED = [0.861, 0.724, 0.599, 0.504, 0.425, 0.363, 0.307, 0.262, *[0.0] * 7]


@pytest.mark.parametrize("block_size", [2, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3573, 0.9, 1.0])
def test_the_chance_of_every_draft_is_solved_for_the_wished_mean(block_size: int, share: float) -> None:
    length = 1 + share * (block_size - 1)
    rates = even_rates(length, block_size)
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)
    assert rates == pytest.approx([rates[0] ** k for k in range(1, block_size)])


class Computed:
    """A runner whose steps accept nothing, and are counted when they are read."""

    forward = None

    def __init__(self) -> None:
        self.read_steps = 0

    def launch(self, inputs: StepInputs) -> "Computed":
        self.inputs = inputs
        return self

    def read(self) -> StepResult:
        self.read_steps += 1
        count = len(self.inputs.target.num_drafts)
        return StepResult([list(range(16))] * count, [0] * count)


def decoding(*num_drafts: int) -> StepInputs:
    seq = Sequence(Request("r", (1, 2), max_tokens=99), arrival=0, pages=array("i", range(8)))
    shares = [ScheduledSequence(seq, 1, 1 + count, needs_logits=True, num_drafts=count) for count in num_drafts]
    return Layout(page_size=4).build(Batch(shares))


def drawn(rates: list[float], inputs: StepInputs, steps: int, seed: int = 0) -> list[int]:
    runner = SimulatedRunner(cast(ModelRunner, Computed()), rates, seed)
    return [accepted for _ in range(steps) for accepted in runner.launch(inputs).read().num_accepted]


@pytest.mark.parametrize("rates", [*(even_rates(length, 16) for length in (1.0, 6.36, 15.0, 16.0)), PUBLISHED])
def test_the_mean_and_every_position_are_as_wished_within_sampling_error(rates: list[float]) -> None:
    accepted = drawn(rates, decoding(15, 15), steps=10_000)
    # A standard error is 0.053 at most: that of lengths that are 1 or 16 by halves.
    assert 1 + fmean(accepted) == pytest.approx(1 + sum(rates), abs=4 * 0.053)
    for k, rate in enumerate(rates, start=1):
        assert fmean(count >= k for count in accepted) == pytest.approx(rate, abs=4 * 0.0036)


def test_no_more_drafts_are_accepted_than_were_verified() -> None:
    accepted = drawn(even_rates(12.0, 16), decoding(15, 3, 0), steps=500)
    assert max(accepted[0::3]) == 15 and max(accepted[1::3]) == 3 and set(accepted[2::3]) == {0}


def test_a_seed_draws_the_same_again() -> None:
    rates, batch = even_rates(6.36, 16), decoding(15)
    assert drawn(rates, batch, 50, seed=1) == drawn(rates, batch, 50, seed=1) != drawn(rates, batch, 50, seed=2)


def test_every_step_is_computed_and_read_and_its_tokens_are_the_targets() -> None:
    computed = Computed()
    result = SimulatedRunner(cast(ModelRunner, computed), even_rates(16.0, 16), 0).launch(decoding(15)).read()
    assert computed.read_steps == 1
    assert result == StepResult([list(range(16))], [15])
