"""Requests come once each and never more at once than asked, and a seed decides Poisson moments."""

import asyncio
import itertools
from statistics import mean, pstdev

import pytest

from tools.bench import http, traffic
from tools.bench.client import Answer, Server
from tools.bench.formats import Prompt, prompts_of
from tools.bench.traffic import Load, Round, arrivals, at_moments, closed_loop, run_round


class Probe:
    """Answers after a few turns of the loop; knows how many requests were under way."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.order: list[int] = []

    async def __call__(self, index: int) -> Answer:
        self.order.append(index)
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(1 + index % 3):
            await asyncio.sleep(0)
        self.now -= 1
        return Answer(sent=float(index))


@pytest.mark.parametrize(("count", "concurrency", "most"), [(20, 1, 1), (20, 4, 4), (3, 8, 3)])
def test_a_closed_loop_keeps_so_many_under_way_and_asks_each_once(count: int, concurrency: int, most: int) -> None:
    probe = Probe()
    answers = asyncio.run(closed_loop(probe, count, concurrency))
    assert probe.most == most and sorted(probe.order) == list(range(count))
    assert [answer.sent for answer in answers] == list(range(count))


def test_requests_at_moments_do_not_wait_for_one_another() -> None:
    probe = Probe()
    answers = asyncio.run(at_moments(probe, [0.0, 0.0, 0.0, 0.0]))
    assert probe.most == 4 and [answer.sent for answer in answers] == [0, 1, 2, 3]


def test_poisson_arrivals_are_the_seeds_own_and_have_the_rate() -> None:
    moments = arrivals(4000, rate=20.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert moments == arrivals(4000, rate=20.0, seed=1) != arrivals(4000, rate=20.0, seed=2)
    assert moments[0] == 0 and moments == sorted(moments)
    assert mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert pstdev(gaps) == pytest.approx(1 / 20, rel=0.1)  # exponential gaps spread as much as they last


def test_sampled_requests_have_seeds_of_their_own_and_greedy_ones_none() -> None:
    assert Load(max_tokens=8).fields(3) == {"max_tokens": 8, "temperature": 0.0}
    assert [Load(max_tokens=8, temperature=0.5, seed=40).fields(index)["seed"] for index in range(3)] == [40, 41, 42]


def test_a_rounds_speed_is_of_answers_that_came_over_the_time_of_all() -> None:
    good = Answer(sent=1.0, last=3.0, tokens=30)
    also = Answer(sent=2.0, last=5.0, tokens=10)
    failed = Answer(sent=1.0, last=6.0, tokens=99, error="broken")
    assert Round([good, also], None).speed == 40 / 4
    assert Round([good, also, failed], None).speed == 40 / 5
    assert Round([failed], None).speed == 0 and Round([failed], None).failures == ["broken"]


def test_loads_say_what_they_are() -> None:
    assert [str(Load(4)), Load(4).label, Load(4).kind] == ["4 at once", "4", "concurrency"]
    assert str(Load(4, temperature=0.7)) == "4 at once, T 0.7"
    poisson = Load(rate=2.5)
    assert [str(poisson), poisson.label, poisson.kind] == ["2.5 requests a second", "2.5/s", "arrivals"]


def test_every_temperature_has_every_load() -> None:
    arguments = "--concurrency 1,16 --num-prompts 8,16 --temperature 0,0.7 --max-tokens 5 --seed 3 --timeout 7"
    loads = http.loads(http.parser().parse_args(arguments.split()))
    assert [(load.temperature, load.concurrency, load.num_prompts) for load in loads] == [
        (0, 1, 8),
        (0, 16, 16),
        (0.7, 1, 8),
        (0.7, 16, 16),
    ]
    assert {(load.max_tokens, load.seed, load.timeout) for load in loads} == {(5, 3, 7)}


def test_a_later_turn_is_asked_after_the_answer_to_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[str, str]]] = []

    async def ask(_http: object, _server: object, prompt: Prompt, _wishes: object) -> Answer:
        seen.append([(message["role"], message["content"]) for message in prompt.body["messages"]])
        last = seen[-1][-1][1]
        return Answer(0.0, last=1.0, tokens=1, text=f"re {last}", error="broken" if last == "c" else None)

    monkeypatch.setattr(traffic, "ask", ask)
    asked = [prompt for turns in ("ab", "cd") for prompt in prompts_of({"question_id": 1, "turns": list(turns)})]
    found = asyncio.run(run_round(Server("nobody", "http://127.0.0.1:9"), [*asked, asked[0]], Load(1)))
    assert seen == [
        [("user", "a")],
        [("user", "a"), ("assistant", "re a"), ("user", "b")],
        [("user", "c")],
        [("user", "a")],
    ]
    assert [answer.text for answer in found.answers] == ["re a", "re b", "re c", "", "re a"]
    assert found.failures == ["broken", "the previous turn failed"] and found.drafting is None
