"""Tokens per second of engines with random weights, beside what an H200's memory and multipliers allow."""

import gc
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.config.engine import EngineConfig
from app.engine.load.engine import Engine, Progress, build_engine
from tools.lab import expected, random_weights, simulated
from tools.lab.floors import Load, run_seconds, step_seconds
from tools.lab.timed import Timed, requests, timed
from tools.report.command import Options
from tools.report.page import PUBLISHED
from tools.report.part import Part, Result

TAU = 6.36
"""Mean acceptance length that is simulated, which DFlash reaches with Qwen3-8B on GSM8K."""
SGLANG = {("plain", 1): 183, ("plain", 32): 4384, ("DFlash", 1): 681, ("DFlash", 32): 7318}
"""Output tokens per second on one H200 with Qwen3-8B and GSM8K, a different workload."""
TARGETS = {("plain", 1): 200, ("plain", 32): 5000, ("DFlash", 1): 1000, ("DFlash", 32): 10000}
REFILLS = 3
"""Batches of a refilled run, as others publish theirs."""
MOST_ROWS = 6
"""Numbers of rows that are told of the steps of a way."""
WAYS = {"plain": None, "full blocks": "full", "auto": "auto"}
"""Way -> `--verify`, None without a draft. Acceptance is drawn, TAU tokens a whole block on average."""


def random_engine(
    model: str, *, draft: bool, device: str, on_progress: Progress = lambda *_: None, **config: Any
) -> Engine:
    """Build an engine of random weights. The memory of an earlier one, which is bound up in circles, is freed first."""
    gc.collect()
    torch.cuda.empty_cache()
    with TemporaryDirectory() as folder:
        target, draft_folder = random_weights.write_configs(model, Path(folder))
        wishes: dict[str, Any] = {
            "device": device,
            "prefix_caching": False,
            "verify": "full",
        } | config
        pair = EngineConfig(target, draft_folder if draft else None, **wishes)
        return build_engine(pair, on_progress, open_weights=random_weights.RandomWeights)


def parts(options: Options, ends: float) -> list[Part]:
    loads = [Load(concurrency, options.prompt, options.answer) for concurrency in options.concurrency]
    return parts_of(options.model, loads, options.device, options.rounds, ends)


@dataclass(frozen=True, slots=True)
class Built:
    """An engine of one way, with the seconds that it took to build."""

    engine: Engine
    seconds: float


def parts_of(model: str, loads: list[Load], device: str, rounds: int, ends: float) -> list[Part]:
    """Return a part for each way and load. Only the first round may pass `ends` of `time.monotonic`."""
    longest, concurrency = max(load.prompt + load.answer for load in loads), max(load.concurrency for load in loads)
    made: dict[str, Built] = {}

    def built(way: str) -> Built:
        """Keep the engine of one way at a time, because two of an 8B have no room beside one another."""
        if way not in made:
            made.clear()
            config: dict[str, Any] = {
                "max_model_len": longest,
                "max_num_seqs": concurrency,
                "verify": WAYS[way] or "full",
            }
            begun = time.monotonic()
            engine = random_engine(model, draft=WAYS[way] is not None, device=device, **config)
            made[way] = Built(engine, time.monotonic() - begun)
            if draft := engine.draft:
                simulated.simulate(engine.core, simulated.even_rates(TAU, draft.block_size))
        return made[way]

    return [
        Part(f"{way} at {load.concurrency}", partial(speed, built, model, way, load, rounds, ends))
        for way in WAYS
        for load in loads
    ]


def speed(built: Callable[[str], Built], model: str, way: str, load: Load, rounds: int, ends: float) -> Result:
    """Run short answers to warm up, and then the rounds that the time allows."""
    made, seconds_to_build = built(way).engine, built(way).seconds
    before = clocks()
    timed(made, replace(load, answer=min(64, load.answer)))
    runs, took = list[Timed](), 0.0
    while not runs or (len(runs) < rounds and time.monotonic() + took <= ends):
        begun = time.monotonic()
        runs.append(timed(made, load))
        took = time.monotonic() - begun
    in_time = REFILLS * took + time.monotonic() <= ends
    measured, steps = median(run.speed for run in runs), [run for run in runs if run.steps]
    step = median(run.step_ms for run in steps) if steps else None
    limit = load.concurrency * load.answer / floor_seconds(way, made, load)
    known = "DFlash" if made.draft else "plain", load.concurrency if model == expected.MODEL else 0
    target, published = TARGETS.get(known), SGLANG.get(known)
    model_says = expected.step(model, way, load.concurrency)
    # A step of `auto` is as wide as the policy chooses.
    step_floor = None if way == "auto" else 1000 * step_seconds(made.target, made.draft, load)
    return {
        "found": headline(measured, limit, target, published)
        + (f", expected {model_says.closed}" if model_says else ""),
        "way": way,
        "concurrency": load.concurrency,
        "tok/s": measured,
        "expected tok/s": model_says and model_says.closed,
        "rounds": [run.speed for run in runs],
        "floor tok/s": limit,
        "share of floor": measured / limit,
        "steady tok/s": median(run.steady for run in steps) if steps else None,
        "expected steady tok/s": model_says and model_says.steady,
        "step ms": step,
        "expected step ms": model_says and model_says.step,
        "floor of step ms": step_floor,
        "share of step's floor": step_floor / step if step and step_floor else None,
        "host ms": median(run.host_ms for run in steps) if steps else None,
        "expected host ms": expected.host_ms(model, load.concurrency),
        "read wait ms": median(run.read_ms for run in steps) if steps else None,
        "acceptance length": runs[-1].acceptance_length,
        "rows: steps": dict(runs[-1].rows.most_common(MOST_ROWS)),
        "share of prompts": median(run.share_of_prompts for run in runs),
        "refilled tok/s": refilled(made, load) if in_time else None,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 or None,
        "built in s": seconds_to_build,
        "clocks before": before,
        "clocks": clocks(),
        "target": target,
        PUBLISHED: published,
    }


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
