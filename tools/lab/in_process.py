"""Engines without a server, several in one process."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.load.engine import build_engine
from app.messages import Request

KV_BYTES = 256 << 20


@dataclass(slots=True)
class Outcome:
    """Counts of requests over their whole time, prefill included. A decoding sequence counts once a step."""

    tokens: int = 0
    seconds: float = 0.0
    decoding: int = 0
    drafting: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def drafting_share(self) -> float:
        """The share of decoding sequences' steps that verified drafts."""
        return self.drafting / max(1, self.decoding)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step that verified drafts, the bonus included."""
        return 1 + self.accepted / max(1, self.drafting)


def engine(variant: str, target: Path, draft: Path, **config: Any) -> EngineCore:
    """Return an engine. `variant` is "plain" without a draft, "full", "auto", or "k=N" for N rows of each sequence."""
    wishes: dict[str, Any] = {"device": "cpu", "kv_cache_memory": KV_BYTES, "prefix_caching": False}
    wishes |= config
    if variant != "plain":
        wishes |= {"draft": draft, "verify": int(variant[2:]) if variant.startswith("k=") else variant}
    return build_engine(EngineConfig(target, **wishes)).core


def run(core: EngineCore, requests: Sequence[Request], concurrency: int) -> Outcome:
    """Run requests, `concurrency` at once. Raises RuntimeError if one has an error."""
    waiting, running = deque(requests), 0
    outcome = Outcome()
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < concurrency:
            core.add(waiting.popleft())
            running += 1
        step = core.step()
        outcome.decoding += step.stats.num_decoding
        for delta in step.deltas:
            if delta.error:
                raise RuntimeError(delta.error)
            outcome.tokens += len(delta.token_ids)
            outcome.drafting += delta.steps[0].n_verified > 0
            outcome.verified += delta.steps[0].n_verified
            outcome.accepted += delta.steps[0].n_accepted
            running -= delta.finish_reason is not None
    outcome.seconds = time.perf_counter() - started
    return outcome


def speed(core: EngineCore, requests: Sequence[Request], concurrency: int) -> float:
    """Run requests and return tokens per second."""
    return run(core, requests, concurrency).speed
