"""On a slow device a step has as many prompt rows as fit its time, so that no stream stands still behind a prompt."""

import pytest

from app.engine.schedule.pace import ALONE_SECONDS, BESIDE_STREAMS_SECONDS, FEWEST_ROWS, Pace
from tests.fast.schedule.scheduler_harness import Harness

LENGTH = 2500


class SlowHost(Harness):
    """Harness whose steps take as long as a slow host's: `seconds` a step, `seconds_a_row` for each row of a prompt.

    Row r of a prompt takes `growth` times r longer.
    """

    def __init__(self, *, seconds: float, seconds_a_row: float, growth: float = 0.0, unit: int = FEWEST_ROWS) -> None:
        pool = {"page_size": 64, "spare_pages": 200, "max_model_len": LENGTH + 100}
        super().__init__(max_num_seqs=3, spare_rows=2048, pace=Pace(unit), **pool)
        self.seconds, self.seconds_a_row, self.growth = seconds, seconds_a_row, growth
        self.steps: list[tuple[str, int, float]] = []

    def slow_step(self) -> None:
        batch, _ = self.step()
        rows = [row for entry in batch.prefills for row in range(entry.start, entry.end)]
        seconds = self.seconds + sum(self.seconds_a_row * (1 + self.growth * row) for row in rows)
        self.scheduler.record_time(batch, seconds)
        self.steps.append((batch.kind, len(rows), seconds))

    def read_beside_a_stream(self, tokens: int) -> list[tuple[int, float]]:
        """Return the rows and seconds of the steps that read a prompt while a stream goes on."""
        self.add(2, 600)
        self.slow_step()
        self.add(tokens, 1)
        self.steps.clear()
        while len(self.scheduler.running) == 2 or self.scheduler.waiting:
            self.slow_step()
        assert {kind for kind, _, _ in self.steps} == {"mixed"}
        return [(rows, seconds) for _, rows, seconds in self.steps]


@pytest.mark.parametrize("seconds_a_row", [0.0005, 0.002, 0.01])
@pytest.mark.parametrize("seconds", [0.005, 0.05, 0.2])
def test_no_step_beside_a_stream_takes_much_longer_than_the_aim(seconds: float, seconds_a_row: float) -> None:
    steps = SlowHost(seconds=seconds, seconds_a_row=seconds_a_row).read_beside_a_stream(LENGTH)
    assert sum(rows for rows, _ in steps) == LENGTH
    assert max(taken for _, taken in steps) < 2 * BESIDE_STREAMS_SECONDS
    *full, _ = steps[3:]
    assert all(taken > BESIDE_STREAMS_SECONDS / 2 for _, taken in full), "the time is used"


def test_the_bound_follows_rows_that_get_slower_with_their_context() -> None:
    host = SlowHost(seconds=0.01, seconds_a_row=0.001, growth=0.005)
    steps = host.read_beside_a_stream(LENGTH)
    assert max(taken for _, taken in steps) < 2 * BESIDE_STREAMS_SECONDS
    assert steps[-2][0] < steps[2][0] / 4


def test_a_host_that_is_too_slow_for_the_aim_reads_the_fewest_rows_a_step() -> None:
    steps = SlowHost(seconds=0.1, seconds_a_row=0.1).read_beside_a_stream(300)
    assert {rows for rows, _ in steps[:-1]} == {FEWEST_ROWS}


def test_without_streams_a_step_has_more_rows() -> None:
    host = SlowHost(seconds=0.05, seconds_a_row=0.002)
    host.add(LENGTH, 1)
    while host.scheduler.running or host.scheduler.waiting:
        host.slow_step()
    taken = [seconds for _, _, seconds in host.steps[3:-1]]
    assert BESIDE_STREAMS_SECONDS < min(taken) <= max(taken) < 1.2 * ALONE_SECONDS


def test_short_prompts_and_one_slow_step_do_not_hold_the_next_prompt_back() -> None:
    host = SlowHost(seconds=0.01, seconds_a_row=0.001)
    host.read_beside_a_stream(2000)
    bound = host.steps[-2][1]
    for _ in range(3):
        host.add(5, 1)
        host.slow_step()
    host.add(2000, 1)
    host.slow_step()
    assert host.steps[-1][1] == pytest.approx(bound, abs=FEWEST_ROWS)
    host.seconds = 60.0  # the laptop was asleep
    host.slow_step()
    host.seconds = 0.01
    for _ in range(3):
        host.slow_step()
    assert host.steps[-1][1] == pytest.approx(bound, abs=2 * FEWEST_ROWS)


@pytest.mark.parametrize("unit", [32, 64])
def test_chunks_are_multiples_of_the_unit(unit: int) -> None:
    steps = SlowHost(seconds=0.0, seconds_a_row=0.0023, unit=unit).read_beside_a_stream(1500)
    assert all(rows % unit == 0 for rows, _ in steps[:-1])


def test_the_budget_of_a_step_bounds_its_rows_too() -> None:
    steps = SlowHost(seconds=0.0, seconds_a_row=1e-6).read_beside_a_stream(LENGTH)
    assert max(rows for rows, _ in steps) <= 2048 + 3 * 4
