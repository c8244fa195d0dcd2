"""Engines of random weights on this GPU: tokens per second, beside what its memory and multipliers allow."""

import gc
import random
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.doctor.report import random_weights, simulated
from app.doctor.report.cuda.floor import Load, run_seconds, step_seconds
from app.doctor.report.cuda.page import PUBLISHED
from app.doctor.report.cuda.parts import Part, Row
from app.engine.build.engine import Engine, build_engine
from app.engine.core import EngineCore
from app.messages import EngineConfig, Request

TAU = 6.36
"""Mean acceptance length that is simulated: what DFlash reaches with Qwen3-8B on GSM8K."""
SGLANG = {("plain", 1): 183, ("plain", 32): 4384, ("DFlash", 1): 681, ("DFlash", 32): 7318}
"""Output tokens per second on one H200, Qwen3-8B and GSM8K: different workload."""
TARGETS = {("plain", 1): 200, ("plain", 32): 5000, ("DFlash", 1): 1000, ("DFlash", 32): 10000}
WAYS = {"plain": None, "full blocks": "full", "auto": "auto"}
"""`--verify` of each, None without a draft. Drafts are accepted as is drawn, TAU tokens a whole block on average."""


@dataclass(slots=True)
class Measured:
    """Output tokens per second of each round over its whole time, and milliseconds of its decode steps."""

    speeds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def engine(model: str, *, draft: bool, device: str, **config: Any) -> Engine:
    """Of random weights. Nothing is read from a disk but the config that is written here; the memory of an engine
    before it, which is bound up in circles, is given back first."""
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


def timed(core: EngineCore, load: Load, vocab_size: int, found: Measured) -> None:
    """A round: all requests at once, to the last one's end."""
    tokens = 0
    for request in requests(load.concurrency, load.prompt, load.answer, vocab_size):
        core.add(request)
    steps = []
    started = time.perf_counter()
    while core.has_work:
        step = core.step()
        tokens += sum(len(delta.token_ids) for delta in step.deltas)
        if step.stats.kind == "decode" and step.stats.num_decoding == load.concurrency:
            steps.append(1000 * step.stats.seconds)
    found.speeds.append(tokens / (time.perf_counter() - started))
    if steps:
        found.steps.append(median(steps))


class Engines:
    """The engine of one way at a time: two of an 8B have no room beside one another."""

    def __init__(self, model: str, loads: list[Load], device: str) -> None:
        self._model, self._device = model, device
        self._longest = max(load.prompt + load.answer for load in loads)
        self._most = max(load.concurrency for load in loads)
        self._made: tuple[str, Engine] | None = None

    def of(self, way: str) -> Engine:
        if self._made and self._made[0] == way:
            return self._made[1]
        self._made = None
        config = {"max_model_len": self._longest, "max_num_seqs": self._most, "verify": WAYS[way] or "full"}
        made = engine(self._model, draft=WAYS[way] is not None, device=self._device, **config)
        if made.draft:
            simulated.simulate(made.core, simulated.survival([TAU], made.draft.block_size))
        self._made = way, made
        return made


def parts(model: str, loads: list[Load], device: str, rounds: int, until: float) -> list[Part]:
    """One a way and load. No round is begun that would not be over by `until`, of `time.monotonic`, but the first."""
    engines = Engines(model, loads, device)
    return [
        Part(f"{way} at {load.concurrency}", partial(speed, engines, way, load, rounds, until))
        for way in WAYS
        for load in loads
    ]


def speed(engines: Engines, way: str, load: Load, rounds: int, until: float) -> list[Row]:
    made, found, took = engines.of(way), Measured(), 0.0
    vocab_size = made.target.vocab_size
    timed(made.core, Load(load.concurrency, load.prompt, min(64, load.answer)), vocab_size, Measured())
    for done in range(rounds):
        begun = time.monotonic()
        if done and begun + took > until:
            break
        timed(made.core, load, vocab_size, found)
        took = time.monotonic() - begun
    return [row(way, made, load, found)]


def row(way: str, made: Engine, load: Load, found: Measured) -> Row:
    speed, step = median(found.speeds), median(found.steps) if found.steps else None
    most = load.concurrency * load.answer / floor_seconds(way, made, load)
    known = "DFlash" if made.draft else "plain", load.concurrency
    # A step of `auto` is as wide as the policy likes.
    step_floor = None if way == "auto" else 1000 * step_seconds(made.target, made.draft, load)
    return {
        "way": way,
        "concurrency": load.concurrency,
        "tok/s": speed,
        "rounds": found.speeds,
        "floor tok/s": most,
        "share of floor": speed / most,
        "step ms": step,
        "floor of step ms": step_floor,
        "share of step's floor": step_floor / step if step and step_floor else None,
        "target": TARGETS.get(known),
        PUBLISHED: SGLANG.get(known),
    }


def floor_seconds(way: str, made: Engine, load: Load) -> float:
    """Of the whole load; of `auto` at the width that has the lowest."""
    target, draft = made.target, made.draft
    if draft is None or way != "auto":
        return run_seconds(target, draft, load, TAU)
    rates = simulated.survival([TAU], draft.block_size)
    narrower = [
        run_seconds(target, replace(draft, block_size=width), load, simulated.mean_length(rates[: width - 1]))
        for width in range(2, draft.block_size + 1)
    ]
    return min(run_seconds(target, None, load, 1.0), *narrower)
