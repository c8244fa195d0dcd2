"""Engines without a server, several in one process, and runs of requests through them."""

import random
import time
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.load.engine import build_engine
from app.messages import Request, StepOutput

KV_BYTES = 256 << 20


def engine(variant: str, target: Path, draft: Path, **config: Any) -> EngineCore:
    """Return an engine on a CPU. `variant` is "plain" without a draft, or a value of `--verify`."""
    wishes: dict[str, Any] = {"device": "cpu", "kv_cache_memory": KV_BYTES, "prefix_caching": False}
    wishes |= config
    if variant != "plain":
        wishes |= {"draft": draft, "verify": variant}
    return build_engine(EngineConfig(target, **wishes)).core


def random_requests(count: int, prompt: int, answer: int, vocab_size: int) -> list[Request]:
    """Return requests of `prompt` random tokens each, whose answers have `answer` tokens."""
    draw = random.Random(count)
    return [Request(f"r{i}", tuple(draw.choices(range(vocab_size), k=prompt)), answer) for i in range(count)]


@dataclass(slots=True)
class Run:
    """Counts of a run of requests, prefill included. `texts` has the tokens of each."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    accepted: list[tuple[str, int]] = field(default_factory=list)
    """Request, and how many drafts were accepted, of each verification of drafts."""
    kinds: set[str] = field(default_factory=set)
    """Kinds of its steps."""
    seconds: float = 0.0
    tokens: int = 0
    prefill_seconds: float = 0.0
    """Seconds of the steps that computed prompts."""
    decode_ms: list[float] = field(default_factory=list)
    """Milliseconds of each step in which `concurrency` requests decoded and nothing else ran."""
    decode_tokens: int = 0
    """Tokens of these steps."""
    decode_rows: Counter[int] = field(default_factory=Counter)
    """Target rows -> these steps."""
    decoding: int = 0
    """Sequences of these steps, each counted once a step."""

    def add(self, step: StepOutput, concurrency: int) -> None:
        """Count a step. Raises RuntimeError if a request has an error."""
        stats, emitted = step.stats, sum(len(delta.token_ids) for delta in step.deltas)
        if errors := [delta.error for delta in step.deltas if delta.error]:
            raise RuntimeError(errors[0])
        self.tokens += emitted
        self.kinds.add(stats.kind)
        for delta in step.deltas:
            self.texts.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.accepted += [(delta.request_id, one.n_accepted) for one in delta.steps if one.n_verified]
        if stats.kind != "decode":
            self.prefill_seconds += stats.seconds
        elif stats.num_decoding == concurrency:
            self.decode_ms.append(1000 * stats.seconds)
            self.decode_tokens += emitted
            self.decode_rows[concurrency + sum(delta.steps[0].n_verified for delta in step.deltas)] += 1
            self.decoding += concurrency

    @property
    def speed(self) -> float:
        """Output tokens per second, prompts included."""
        return self.tokens / self.seconds

    @property
    def steady_speed(self) -> float | None:
        """Output tokens per second of the steps in which all requests decoded; None without such a step."""
        return 1000 * self.decode_tokens / sum(self.decode_ms) if self.decode_ms else None

    @property
    def step_ms(self) -> float | None:
        return median(self.decode_ms) if self.decode_ms else None

    @property
    def steady_length(self) -> float | None:
        """Mean tokens of a sequence in a step in which all decoded."""
        return self.decode_tokens / self.decoding if self.decoding else None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a sequence in a step that verified its drafts, the bonus included; 1 without such a step."""
        return self.acceptance_length_of(self.texts)

    def acceptance_length_of(self, request_ids: Container[str]) -> float:
        accepted = [count for name, count in self.accepted if name in request_ids]
        return 1 + sum(accepted) / max(1, len(accepted))


def run(core: EngineCore, requests: Sequence[Request], concurrency: int | None = None) -> Run:
    """Run requests, `concurrency` or all at once: one that ends makes room for the next.

    Raises RuntimeError if one fails.
    """
    concurrency = concurrency or len(requests)
    waiting, running, found = deque(requests), 0, Run()
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < concurrency:
            core.add(waiting.popleft())
            running += 1
        step = core.step()
        found.add(step, concurrency)
        running -= sum(delta.finish_reason is not None for delta in step.deltas)
    found.seconds = time.perf_counter() - started
    return found
