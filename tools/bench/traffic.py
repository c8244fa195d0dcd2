"""Load on a server: a fixed number of requests at once, or Poisson arrivals."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from tools.bench.client import Answer, Drafting, Server, ask, drafting
from tools.bench.formats import Prompt

T = TypeVar("T")
Ask = Callable[[int], Awaitable[T]]
"""Sends the request, or the conversation, with an index."""


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` requests at once. With a `rate` it is requests a second instead, any number of them at once.

    If `temperature` is above 0, request i has the seed `seed` + i. `timeout` seconds of silence are a failure. Without
    `num_prompts` the bench decides how many prompts a round has.
    """

    concurrency: int = 1
    rate: float | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    timeout: float = 600.0
    num_prompts: int | None = None

    def fields(self, index: int) -> dict[str, Any]:
        """Return the fields of request `index`."""
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return fields | {"seed": self.seed + index} if self.temperature > 0 else fields

    @property
    def usual_prompts(self) -> int:
        """Prompts of a round without --num-prompts."""
        return max(8, 3 * self.concurrency) if self.rate is None else 32

    @property
    def kind(self) -> str:
        return "concurrency" if self.rate is None else "arrivals"

    @property
    def label(self) -> str:
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"

    def __str__(self) -> str:
        load = f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} requests a second"
        return f"{load}, T {self.temperature:g}" if self.temperature else load


@dataclass(frozen=True, slots=True)
class Round:
    """One server's answers to all prompts. `drafting` is the growth of its counters, if it has any."""

    answers: list[Answer]
    drafting: Drafting | None

    @property
    def seconds(self) -> float:
        """Seconds from the first request's sending to the last token of all."""
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
    """Return moments of a Poisson process, in seconds after its first event. `rate` is events per second."""
    rng = random.Random(seed)
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


async def closed_loop(send: Ask[T], count: int, concurrency: int) -> list[T]:
    """Send `count` requests, `concurrency` at once, and return the answers in the order of the requests."""
    free = asyncio.Semaphore(concurrency)

    async def send_when_free(index: int) -> T:
        async with free:
            return await send(index)

    return await asyncio.gather(*map(send_when_free, range(count)))


async def at_moments(send: Ask[T], moments: Sequence[float]) -> list[T]:
    """Send a request at each moment, in seconds from now, without a limit to their number at once."""
    started = time.perf_counter()

    async def send_at(index: int, moment: float) -> T:
        await asyncio.sleep(started + moment - time.perf_counter())
        return await send(index)

    return await asyncio.gather(*(send_at(index, moment) for index, moment in enumerate(moments)))


def conversations(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the indices of the prompts of each conversation; most have one."""
    found: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        if prompt.follows and found:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def continued(before: Prompt, answer: Answer, prompt: Prompt) -> Prompt:
    """Return `prompt` after the messages of the one before it and the answer to that."""
    said = {"role": "assistant", "content": answer.text}
    return replace(prompt, body={"messages": [*before.body["messages"], said, *prompt.body["messages"]]})


async def run_round(server: Server, prompts: Sequence[Prompt], load: Load) -> Round:
    """Send every prompt once over new connections, because a server may close those of the last round.

    The prompts of a conversation are sent one after another, and count as one request of the load.
    """
    talks = conversations(prompts)
    async with server.connect(load.timeout) as http:

        async def send(number: int) -> list[Answer]:
            answers: list[Answer] = []
            asked = prompts[talks[number][0]]
            for index in talks[number]:
                asked = continued(asked, answers[-1], prompts[index]) if answers else asked
                if answers and answers[-1].error is not None:
                    now = time.perf_counter()
                    answers.append(Answer(now, last=now, error="the previous turn failed"))
                else:
                    answers.append(await ask(http, server, asked, load.fields(index)))
            return answers

        before = await drafting(http)
        if load.rate is None:
            answered = await closed_loop(send, len(talks), load.concurrency)
        else:
            answered = await at_moments(send, arrivals(len(talks), load.rate, load.seed))
        after = await drafting(http)
    growth = after.since(before) if after is not None and before is not None else None
    return Round([answer for answers in answered for answer in answers], growth)
