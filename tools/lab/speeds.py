"""Tokens per second of engines with random weights, beside what an H200's memory and multipliers allow."""

import gc
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.doctor.report.command import Options
from app.doctor.report.page import PUBLISHED
from app.doctor.report.part import Part, Result
from app.engine.build.engine import Engine, build_engine
from app.engine.core import EngineCore
from app.engine_config import EngineConfig
from app.messages import Request
from tools.lab import random_weights, simulated
from tools.lab.floors import Load, run_seconds, step_seconds

TAU = 6.36
"""Mean acceptance length that is simulated, which DFlash reaches with Qwen3-8B on GSM8K."""
SGLANG = {("plain", 1): 183, ("plain", 32): 4384, ("DFlash", 1): 681, ("DFlash", 32): 7318}
"""Output tokens per second on one H200 with Qwen3-8B and GSM8K, a different workload."""
TARGETS = {("plain", 1): 200, ("plain", 32): 5000, ("DFlash", 1): 1000, ("DFlash", 32): 10000}
EXPECTED = {("plain", 1): 180, ("plain", 32): 4290, ("full blocks", 1): 930, ("full blocks", 32): 8200}
EXPECTED |= {("auto", 1): 930, ("auto", 32): 10300}
"""Output tokens per second that the performance model of docs/performance.md expects, to 10 %."""
EXPECTED_STEP_MS = {("plain", 1): 5.5, ("plain", 32): 7.0, ("width 16", 1): 6.7, ("width 16", 32): 20.9}
EXPECTED_STEP_MS |= {("width 8", 1): 6.7, ("width 8", 32): 13.3}
REFILLS = 3
"""Batches of a refilled run, as others publish theirs."""
WAYS = {"plain": None, "full blocks": "full", "auto": "auto"}
"""Way -> `--verify`, None without a draft. Acceptance is drawn, TAU tokens a whole block on average."""


def random_engine(model: str, *, draft: bool, device: str, **config: Any) -> Engine:
    """Build an engine of random weights. The memory of an earlier one, which is bound up in circles, is freed first."""
    gc.collect()
    torch.cuda.empty_cache()
    with TemporaryDirectory() as folder:
        target, draft_folder = random_weights.write_configs(model, Path(folder))
        wishes: dict[str, Any] = {"device": device, "prefix_caching": False} | config
        return build_engine(
            EngineConfig(target, draft_folder if draft else None, **wishes), open_weights=random_weights.RandomWeights
        )


def requests(count: int, prompt: int, answer: int, vocab_size: int) -> list[Request]:
    draw = random.Random(count)
    return [Request(f"r{i}", tuple(draw.choices(range(vocab_size), k=prompt)), answer) for i in range(count)]


def parts(options: Options, ends: float) -> list[Part]:
    loads = [Load(concurrency, options.prompt, options.answer) for concurrency in options.concurrency]
    return parts_of(options.model, loads, options.device, options.rounds, ends)


def parts_of(model: str, loads: list[Load], device: str, rounds: int, ends: float) -> list[Part]:
    """Return a part for each way and load. Only the first round may pass `ends` of `time.monotonic`."""
    longest, concurrency = max(load.prompt + load.answer for load in loads), max(load.concurrency for load in loads)
    made: dict[str, Engine] = {}

    def engine(way: str) -> Engine:
        """Keep the engine of one way at a time, because two of an 8B have no room beside one another."""
        if way not in made:
            made.clear()
            config = {"max_model_len": longest, "max_num_seqs": concurrency, "verify": WAYS[way] or "full"}
            made[way] = random_engine(model, draft=WAYS[way] is not None, device=device, **config)
            if draft := made[way].draft:
                simulated.simulate(made[way].core, simulated.even_rates(TAU, draft.block_size))
        return made[way]

    return [
        Part(f"{way} at {load.concurrency}", partial(speed, engine, way, load, rounds, ends))
        for way in WAYS
        for load in loads
    ]


def speed(engine: Callable[[str], Engine], way: str, load: Load, rounds: int, ends: float) -> Result:
    """Run short answers to warm up, and then the rounds that the time allows."""
    made = engine(way)
    timed(made, replace(load, answer=min(64, load.answer)))
    speeds, steady, steps, took = list[float](), list[float](), list[float](), 0.0
    while not speeds or (len(speeds) < rounds and time.monotonic() + took <= ends):
        begun = time.monotonic()
        tokens_per_second, of_steps, in_steps = timed(made, load)
        speeds.append(tokens_per_second)
        if of_steps:
            steps.append(median(of_steps))
            steady.append(1000 * in_steps / sum(of_steps))
        took = time.monotonic() - begun
    in_time = REFILLS * took + time.monotonic() <= ends
    measured, step = median(speeds), median(steps) if steps else None
    limit = load.concurrency * load.answer / floor_seconds(way, made, load)
    known = "DFlash" if made.draft else "plain", load.concurrency
    target, published = TARGETS.get(known), SGLANG.get(known)
    # A step of `auto` is as wide as the policy chooses.
    step_floor = None if way == "auto" else 1000 * step_seconds(made.target, made.draft, load)
    return {
        "found": headline(measured, limit, target, published),
        "way": way,
        "concurrency": load.concurrency,
        "tok/s": measured,
        "rounds": speeds,
        "floor tok/s": limit,
        "share of floor": measured / limit,
        "step ms": step,
        "floor of step ms": step_floor,
        "share of step's floor": step_floor / step if step and step_floor else None,
        "expected tok/s": EXPECTED.get((way, load.concurrency)),
        "steady tok/s": steady and median(steady),
        "refilled tok/s": refilled(made, load) if in_time else None,
        "clocks": clocks(),
        "target": target,
        PUBLISHED: published,
    }


def timed(engine: Engine, load: Load, *, speculate: bool = True) -> tuple[float, list[float], int]:
    """Run all requests at once, to the last one's end.

    Returns output tokens per second, and the milliseconds and the tokens of the steps that decoded all of them.
    """
    core: EngineCore = engine.core
    tokens, in_steps, steps = 0, 0, list[float]()
    for request in requests(load.concurrency, load.prompt, load.answer, engine.target.vocab_size):
        core.add(replace(request, speculate=speculate))
    started = time.perf_counter()
    while core.has_work:
        step = core.step()
        emitted = sum(len(delta.token_ids) for delta in step.deltas)
        tokens += emitted
        if step.stats.kind == "decode" and step.stats.num_decoding == load.concurrency:
            steps.append(1000 * step.stats.seconds)
            in_steps += emitted
    return tokens / (time.perf_counter() - started), steps, in_steps


def refilled(engine: Engine, load: Load) -> float:
    """Return output tokens per second where a request that ends makes room for the next, REFILLS batches in all."""
    core, tokens, running = engine.core, 0, 0
    left = requests(REFILLS * load.concurrency, load.prompt, load.answer, engine.target.vocab_size)
    started = time.perf_counter()
    while left or core.has_work:
        while left and running < load.concurrency:
            core.add(left.pop())
            running += 1
        for delta in core.step().deltas:
            tokens += len(delta.token_ids)
            running -= delta.finish_reason is not None
    return tokens / (time.perf_counter() - started)


def clocks() -> str | None:
    """Return the clocks, the power and what holds the clocks down just after a run, as nvidia-smi prints them."""
    asked = "clocks.sm,clocks.mem,power.draw,clocks_throttle_reasons.active"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def headline(speed: float, limit: float, target: int | None, published: int | None) -> str:
    met = "no target" if target is None else f"target {target}: {'met' if speed >= target else 'MISSED'}"
    text = f"{speed:.4g} tok/s, {met}, {speed / limit:.0%} of the floor's {limit:.4g}"
    return text if published is None else f"{text}, {PUBLISHED}: {published}"


def floor_seconds(way: str, made: Engine, load: Load) -> float:
    """Return the floor of the whole load; for `auto` at the width that has the lowest."""
    target, draft = made.target, made.draft
    if draft is None or way != "auto":
        return run_seconds(target, draft, load, TAU)
    rates = simulated.even_rates(TAU, draft.block_size)
    narrower = [
        run_seconds(target, replace(draft, block_size=width), load, simulated.mean_length(rates[: width - 1]))
        for width in range(2, draft.block_size + 1)
    ]
    return min(run_seconds(target, None, load, 1.0), *narrower)
