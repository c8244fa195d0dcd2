"""EngineCore: add requests, call step(), get tokens. The whole architecture is `step`."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from app.engine.batch import Delta
from app.engine.model_runner import ModelRunner
from app.engine.scheduler import Scheduler
from app.engine.sequence import Request


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did: its deltas, its kind ("prefill", "decode" or "mixed") and its wall-clock seconds; how many
    sequences decoded, and how many of these verified drafts."""

    deltas: list[Delta]
    kind: str
    seconds: float
    num_decoding: int
    num_drafting: int


IDLE = Step([], "idle", 0.0, 0, 0)
"""No step."""


class EngineCore:
    """One scheduler over one runner. Not thread-safe: its owner calls it from one thread."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Raises ValueError, naming what is wrong, for a request that could never run."""
        vocab_size = self.runner.stages.target.config.vocab_size
        if not all(0 <= token < vocab_size for token in request.token_ids):
            raise ValueError(f"request {request.request_id}: token ids must lie in 0..{vocab_size - 1}")
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.flush_cache()

    def step(self) -> Step:
        """One step for everything that has work; call only while `has_work`."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        pending = self.runner.launch(batch)
        deltas = self.scheduler.commit(batch, pending.read())
        seconds = time.perf_counter() - started
        if batch.decodes:
            num_seqs, prefilled = len(batch.decodes), bool(batch.prefills)
            drafts = batch.num_verify_rows - num_seqs
            self.scheduler.policy.took(num_seqs, batch.num_drafting, drafts, 1000 * seconds, prefilled=prefilled)
        return Step(deltas, batch.kind, seconds, len(batch.decodes), batch.num_drafting)

    def run(self, requests: list[Request], on_step: Callable[[Step], None] | None = None) -> dict[str, list[int]]:
        """Run requests to their end, without a server: request id -> the tokens it emitted."""
        emitted: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.add(request)
        while self.has_work:
            step = self.step()
            for delta in step.deltas:
                emitted[delta.request_id] += delta.token_ids
            if on_step:
                on_step(step)
        return emitted
