"""The training loop: the target writes talks and the draft learns them, until the time is over."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from tools.train_draft.loss import Ends, learn, tokens_a_step
from tools.train_draft.model import Draft
from tools.train_draft.muon import optimizers
from tools.train_draft.talks import Talk, Talks
from tools.train_draft.teacher import Teacher

MUON_LR, ADAM_LR = 0.01, 2e-3
WARM_UP = 60
"""Steps in which the learning rates rise. They fall to nothing in the second half of the time."""
TRAINED = 0.05
"""Share of the learning rates for a draft that was trained before."""
LESSONS = 4
"""Lessons that new talks are written for at once."""
REPLAYS = 2
"""Earlier talks that are learned again for each new one, with other anchors. Writing costs as much as learning."""
CLIP = 1.0
_TESTS, _PAUSE = 20, 15
"""How often the held-out talks measure the draft at most, and the time between two measurements in times of one."""
KEPT = 1 << 13
"""Earlier talks that may be learned again."""


@dataclass(slots=True)
class State:
    """Progress of a run. `talks` are the last ones that the target wrote, but for those `held_out`, and `written` the
    tokens of all answers."""

    held_out: list[Talk]
    talks: list[Talk] = field(default_factory=list)
    written: int = 0
    step: int = 0
    seconds: float = 0.0

    def add(self, talks: Sequence[Talk]) -> None:
        """Add talks that were written, and forget the oldest ones beyond KEPT."""
        self.written += sum(sum(talk.own) for talk in talks)
        self.talks += talks
        del self.talks[:-KEPT]


@dataclass(eq=False)
class Trainer:
    """A draft and its teacher. A lesson has at most `batch_tokens` tokens. `rates` multiplies the learning rates."""

    draft: Draft
    ends: Ends
    teacher: Teacher
    talks: Talks
    state: State
    batch_tokens: int
    seed: int
    rates: float = 1.0

    def __post_init__(self) -> None:
        self.optimizers = optimizers(self.draft, self.rates * MUON_LR, self.rates * ADAM_LR)
        self._first_rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self._draw = random.Random(f"{self.seed}/{self.state.step}")
        device = self.ends.lm_head.device
        self._generator = torch.Generator(device).manual_seed(self._draw.getrandbits(31))
        self._queue: list[Talk] = []

    def run(self, seconds: float, save_every: float, save: Callable[[], None], console: Console) -> float:
        """Train until `seconds` are spent, those of earlier runs included, and `save` at intervals and at the end.
        Return the tokens a step in the held-out talks."""
        state = self.state
        began = time.monotonic() - state.seconds
        next_test, next_save = state.seconds + seconds / _TESTS, state.seconds + save_every
        found, loss = self.test(), 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=seconds, told="")

            def spent() -> float:
                state.seconds = time.monotonic() - began
                told = f"step {state.step}  loss {loss:.3f}  {found:.2f} tokens a step"
                progress.update(task, completed=state.seconds, told=told)
                return state.seconds / seconds if seconds else 1.0

            while spent() < 1:
                learned = self.learn(spent)
                loss = 0.95 * loss + 0.05 * learned if loss and math.isfinite(loss) else learned
                if (before := state.seconds) > next_test:
                    found = self.test()
                    spent()
                    next_test = state.seconds + max(seconds / _TESTS, _PAUSE * (state.seconds - before))
                    told = f"{found:.2f} tokens a step  loss {loss:.3f}  {state.written:,} tokens of answers"
                    console.print(f"{state.seconds / 60:5.1f} min  step {state.step:5}  {told}", highlight=False)
                if state.seconds > next_save:
                    save()
                    spent()
                    next_save = state.seconds + save_every
        save()
        return self.test()

    def learn(self, spent: Callable[[], float]) -> float:
        """Take one step over the next talks, which the target may have to write first. Return the loss.

        `spent` returns the share of the time that is over. When all of it is, no more than one talk is waited for.
        """
        while not self._queue:
            self._write(spent)
        factor = min((self.state.step + 1) / WARM_UP, 2 * (1 - spent()), 1.0)
        for optimizer, rates in zip(self.optimizers, self._first_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * max(factor, 0.0)
        loss = learn(self.draft, self.ends, self.teacher.lesson(self._next_talks()), self._generator)
        is_finite = nn.utils.clip_grad_norm_(self.draft.parameters(), CLIP).isfinite()
        with self.ends.precision():  # Muon is made of products
            for optimizer in self.optimizers:
                if is_finite:  # one step by NaN destroys a draft
                    optimizer.step()
                optimizer.zero_grad()
        self.state.step += 1
        return loss

    def test(self) -> float:
        """Return the tokens a step in the held-out talks."""
        return tokens_a_step(self.draft, self.ends, (self.teacher.lesson([talk]) for talk in self.state.held_out))

    def _write(self, spent: Callable[[], float]) -> None:
        """Let the target write talks for some lessons, and queue them with earlier ones."""
        earlier, new, room = self.state.talks, [], LESSONS * self.batch_tokens
        for talk in self.talks.more():
            new.append(talk)
            room -= len(talk.ids)
            if room <= 0 or spent() >= 1:
                break
        self._queue = new + self._draw.sample(earlier, min(len(earlier), REPLAYS * len(new)))
        self._draw.shuffle(self._queue)
        self.state.add(new)

    def _next_talks(self) -> list[Talk]:
        longest, talks = self.teacher.page_size, list[Talk]()  # a talk takes whole pages
        while self._queue:
            longest = max(longest, len(self._queue[-1].ids))
            if talks and longest * (len(talks) + 1) > self.batch_tokens:
                break
            talks.append(self._queue.pop())
        return talks
