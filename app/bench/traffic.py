"""How requests come: so many at once, each followed by the next, or one after the other at random moments."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.client import Answer, Drafting, Server, ask, drafting
from app.bench.prompts import Prompt

Ask = Callable[[int], Awaitable[Answer]]
"""Sends the request of that index."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """How every answer is drawn. A `temperature` above 0 gives request i the seed `seed` + i."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def of(self, index: int) -> dict[str, Any]:
        """The fields of request `index`."""
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return fields | {"seed": self.seed + index} if self.temperature > 0 else fields


@dataclass(frozen=True, slots=True)
class Pressure:
    """`concurrency` requests at once, or, with a `rate`, so many a second with no limit to how many are under way."""

    concurrency: int = 1
    rate: float | None = None

    @property
    def usual_prompts(self) -> int:
        """How many prompts a round has, if nobody says."""
        return max(8, 3 * self.concurrency) if self.rate is None else 32

    @property
    def kind(self) -> str:
        return "concurrency" if self.rate is None else "arrivals"

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} requests a second"


@dataclass(frozen=True, slots=True)
class Round:
    """The same prompts once, by one server. `drafting` is what its counters grew by, if it has any."""

    answers: list[Answer]
    drafting: Drafting | None

    @property
    def seconds(self) -> float:
        """From the first request's sending to the last token of all."""
        return max(answer.last for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers if answer.error is None)

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds if self.tokens else 0.0

    @property
    def failures(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Moments of a Poisson process, in seconds from its first event on; `rate` is events per second."""
    rng = random.Random(seed)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + rng.expovariate(rate))
    return moments[:count]


async def closed_loop(send: Ask, count: int, concurrency: int) -> list[Answer]:
    """So many at once until all are answered; the answers have the order of the requests."""
    answers: dict[int, Answer] = {}
    waiting = iter(range(count))

    async def one_after_the_other() -> None:
        for index in waiting:
            answers[index] = await send(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(one_after_the_other())
    return [answers[index] for index in range(count)]


async def at_moments(send: Ask, moments: Sequence[float]) -> list[Answer]:
    """A request at each moment, in seconds from now on, however many are still under way."""
    started = time.perf_counter()

    async def later(index: int, moment: float) -> Answer:
        await asyncio.sleep(started + moment - time.perf_counter())
        return await send(index)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(later(index, moment)) for index, moment in enumerate(moments)]
    return [task.result() for task in tasks]


async def run_round(
    server: Server,
    prompts: Sequence[Prompt],
    pressure: Pressure,
    wishes: Wishes,
    timeout: float,
    done: Callable[[], None] = lambda: None,
) -> Round:
    """Ask everything once; `done` is called after each answer. A server that says nothing for `timeout` seconds has
    failed. Connections are new, so that none has been closed since the last round."""
    async with server.connect(timeout) as http:

        async def send(index: int) -> Answer:
            answer = await ask(http, server, prompts[index], wishes.of(index))
            done()
            return answer

        before = await drafting(http)
        if pressure.rate is None:
            answers = await closed_loop(send, len(prompts), pressure.concurrency)
        else:
            answers = await at_moments(send, arrivals(len(prompts), pressure.rate, wishes.seed))
        after = await drafting(http)
    return Round(answers, after.since(before) if after is not None and before is not None else None)
