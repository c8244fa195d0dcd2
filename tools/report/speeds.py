"""Tokens per second of engines with random weights, in which how many drafts are accepted is drawn."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from app.engine.load.engine import Engine
from tools.lab import simulated
from tools.lab.in_process import Run, random_requests, run
from tools.lab.random_weights import random_engine
from tools.report.part import Options, Part, Result

TAU = 6.36
"""Mean acceptance length that is simulated, which DFlash reaches with Qwen3-8B on GSM8K."""
REFILLS = 3
"""Batches of a refilled run, as others publish theirs."""
MOST_ROWS = 6
"""Numbers of rows that are told of the steps of a way."""
WARM_UP_ANSWER = 64
WAYS = {"plain": None, "full blocks": "full", "auto": "auto"}
"""Way -> `--verify`, None without a draft. Acceptance is drawn, TAU tokens a whole block on average."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at once, and the tokens of each prompt and of each answer."""

    concurrency: int
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Built:
    """An engine of one way, with the seconds that it took to build."""

    engine: Engine
    seconds: float

    def run(self, load: Load, *, batches: int = 1, answer: int | None = None) -> Run:
        """Run `batches` times the load's requests; each that ends makes room for the next."""
        count, vocab_size = batches * load.concurrency, self.engine.target.vocab_size
        requests = random_requests(count, load.prompt, answer or load.answer, vocab_size)
        return run(self.engine.core, requests, load.concurrency)


def parts(options: Options, ends: float) -> list[Part]:
    loads = [Load(concurrency, options.prompt, options.answer) for concurrency in options.concurrency]
    return parts_of(options.model, loads, options.device, options.rounds, ends)


def parts_of(model: str, loads: list[Load], device: str, rounds: int, ends: float) -> list[Part]:
    """Return a part for each way and load. Only the first round may pass `ends` of `time.monotonic`."""
    longest, concurrency = max(load.prompt + load.answer for load in loads), max(load.concurrency for load in loads)
    made: dict[str, Built] = {}

    def built(way: str) -> Built:
        """Keep the engine of one way at a time, because memory does not hold two of an 8B."""
        if way not in made:
            made.clear()
            sizes: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": concurrency}
            verify, begun = WAYS[way], time.monotonic()
            engine = random_engine(model, draft=verify is not None, device=device, verify=verify or "full", **sizes)
            made[way] = Built(engine, time.monotonic() - begun)
            if engine.draft:
                simulated.simulate(engine.core, simulated.even_rates(TAU, engine.draft.block_size))
        return made[way]

    return [
        Part(f"{way} at {load.concurrency}", partial(speed, built, way, load, rounds, ends))
        for way in WAYS
        for load in loads
    ]


def speed(built: Callable[[str], Built], way: str, load: Load, rounds: int, ends: float) -> Result:
    """Run short answers to warm up, and then the rounds that the time allows."""
    engine = built(way)
    before = clocks()
    engine.run(load, answer=min(WARM_UP_ANSWER, load.answer))
    runs, took = list[Run](), 0.0
    while not runs or (len(runs) < rounds and time.monotonic() + took <= ends):
        begun = time.monotonic()
        runs.append(engine.run(load))
        took = time.monotonic() - begun
    in_time = REFILLS * took + time.monotonic() <= ends
    measured = median(run.speed for run in runs)
    return {
        "found": f"{measured:.4g} tok/s",
        "way": way,
        "concurrency": load.concurrency,
        "tok/s": measured,
        "rounds": [run.speed for run in runs],
        "steady tok/s": _median([run.steady_speed for run in runs]),
        "step ms": _median([run.step_ms for run in runs]),
        "acceptance length": runs[-1].acceptance_length,
        "rows: steps": dict(runs[-1].decode_rows.most_common(MOST_ROWS)),
        "share of prompts": median(run.prefill_seconds / run.seconds for run in runs),
        "refilled tok/s": engine.run(load, batches=REFILLS).speed if in_time else None,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 or None,
        "built in s": engine.seconds,
        "clocks before": before,
        "clocks": clocks(),
    }


def _median(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return median(known) if known else None


def clocks() -> str | None:
    """Return the clocks, the power and what holds the clocks down just after a run, as nvidia-smi prints them."""
    asked = "clocks.sm,clocks.mem,power.draw,clocks_throttle_reasons.active"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
