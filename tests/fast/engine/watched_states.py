"""A guard of state checkpoints, around every step of an engine with a hybrid target."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.engine.load.engine import Engine
from app.engine.schedule.batch import Batch
from app.engine.sequence import Sequence
from tests.fast.engine.hybrid_reference import HybridReference
from tests.fast.engine.state_books import check_state


class WatchedStates:
    """Asserts before every launch that the books are right, and behind it that no checkpoint was written.

    `check` holds every new checkpoint against a recomputation from the tokens that its digest stands for. `num_checked`
    counts them.
    """

    def __init__(self, engine: Engine, reference: HybridReference) -> None:
        self.engine, self.scheduler, self.reference = engine, engine.core.scheduler, reference
        self.target, self.pool = engine.core.runner.forward.target, engine.core.runner.pools[0]
        self.num_checked = 0
        self._tokens: dict[bytes, list[int]] = {}
        self._known: set[tuple[bytes, int]] = set()
        states = self.scheduler.states
        self._launch = engine.core.launch
        engine.core.launch = self._watched  # type: ignore[method-assign]
        states.publish = self._noting_tokens(states.publish)  # type: ignore[method-assign]
        states.publish_split = self._noting_tokens(states.publish_split)  # type: ignore[method-assign]

    def check(self) -> None:
        """Call this between two steps."""
        states, size = self.scheduler.states, self.scheduler.pool.page_size
        new = states.checkpoints.items() - self._known
        self._known = set(states.checkpoints.items())
        with torch.inference_mode():
            for digest, slot in new:
                tokens = self._tokens[digest]
                assert len(tokens) % size == 0
                wanted = self.reference(torch.tensor([tokens])).cache
                check_state(self.engine, slot, len(tokens), wanted)
                self.num_checked += 1

    def _watched(self, batch: Batch) -> Any:
        self.scheduler.check()
        frozen = torch.tensor(sorted(self.scheduler.states.checkpoints.values()), dtype=torch.long)
        before = self._kept(frozen)
        pending = self._launch(batch)
        assert all(map(torch.equal, self._kept(frozen), before)), "a checkpoint was written"
        return pending

    def _noting_tokens(self, publish: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that publishes a sequence's state."""

        def noting(seq: Sequence, digest: bytes, **how: Any) -> Any:
            size = self.scheduler.pool.page_size
            for page in range(seq.num_tokens // size):
                self._tokens[seq.digest(page, size)] = seq.token_ids[: (page + 1) * size]
            return publish(seq, digest, **how)

        return noting

    def _kept(self, slots: Tensor) -> list[Tensor]:
        layers = [self.pool.layers[number] for number in self.target.config.gated_delta.layers]
        return [x[slots] for memory in layers for x in (memory.matrix, memory.conv, memory.pending, memory.num_tokens)]
