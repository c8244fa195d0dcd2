"""Simulated acceptance: every step is computed in full, and then the number of accepted drafts is drawn.

A model of random weights has the lengths of a real one in this way. Its tokens are the target's choices after wrong
drafts, and mean nothing. The scheduler takes their number, the valid KV and the next block from the number accepted,
like in any step. Laboratories and tests use it; `serve` has no such flag.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from app.engine.core import EngineCore
from app.engine.device.transfer import Packed
from app.engine.schedule.batch import StepResult
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep

BANNER = "SIMULATED ACCEPTANCE: how many drafts are accepted is drawn, not found out; the tokens are meaningless."


def even_rates(length: float, block_size: int) -> list[float]:
    """Return the chance p^k that the first k drafts are all accepted, for k = 1 .. block_size - 1.

    The mean acceptance length 1 + p + p^2 + ... + p^(block_size - 1) is `length`.
    """
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(middle**k for k in range(block_size)) < length:
            low = middle
        else:
            high = middle
    return [high**k for k in range(1, block_size)]


def simulate(core: EngineCore, rates: Sequence[float], seed: int = 0) -> None:
    """Make the steps of `core` accept drawn numbers of drafts. Rate k is the chance that the first k are accepted."""
    # The loop uses no other method of a runner.
    core.runner = cast(ModelRunner, SimulatedRunner(core.runner, rates, seed, tell_device=core.overlap))


@dataclass
class SimulatedStep:
    """A launched step that is read like any other, so that none of its cost is missing."""

    pending: PendingStep
    num_accepted: list[int]

    def read(self) -> StepResult:
        return StepResult(self.pending.read().tokens, self.num_accepted)


class SimulatedRunner:
    """A runner with the steps of another one, which accept drawn numbers of drafts.

    With `tell_device` the device has these numbers too, because the next step begins there before the host reads.
    """

    def __init__(self, runner: ModelRunner, rates: Sequence[float], seed: int, *, tell_device: bool = False) -> None:
        self._runner = runner
        self._tell_device = tell_device
        self._falling = [-rate for rate in rates]
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, inputs: StepInputs) -> SimulatedStep:
        accepted = [
            min(self._draw(), num_drafts) for num_drafts in inputs.target.num_drafts[: inputs.target.num_seqs].tolist()
        ]
        pending = self._runner.launch(inputs)
        if self._tell_device:
            self._overwrite(accepted)
        return SimulatedStep(pending, accepted)

    @torch.inference_mode()
    def _overwrite(self, accepted: list[int]) -> None:
        """Overwrite the step's result on the device; the host's copy is on its way."""
        assert self._runner.graphs
        packed = Packed({"accepted": np.array(accepted, dtype=np.int32)}, self._runner.forward.backend)
        self._runner.graphs.verified[: len(accepted), -1] = packed.tensors["accepted"]

    def _draw(self) -> int:
        """Return the number of rates above one random number, so that at least k has the chance of rate k."""
        return bisect_left(self._falling, -self._random.random())
