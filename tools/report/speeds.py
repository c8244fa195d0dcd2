"""Tokens per second of engines: of random weights, where the number of accepted drafts is drawn, and of a real pair."""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.files import find_folder
from app.engine.load.engine import Engine, build_engine
from app.engine.schedule.policy import Policy
from app.messages import Request
from tools.lab import simulated
from tools.lab.in_process import Run, random_requests, run
from tools.lab.random_weights import free_memory, random_engine
from tools.report import profile
from tools.report.part import REAL_PAIR, Options, Part, Result

TAUS = {8: 4.8, 16: 6.36}
"""Block size -> mean acceptance length that is drawn: of a hybrid of 27B, and of Qwen3-8B on GSM8K."""
REFILLS = 3
"""Batches of a refilled run, as others publish theirs."""
MOST_ROWS = 6
"""Numbers of rows that are told of the steps of a way."""
WARM_UP_ANSWER = 64
PROMPTS = (512, 8192)
"""Tokens of prompts that are timed alone."""
WAYS = ("plain", "full blocks", "auto")
QUESTIONS = Path(__file__).with_name("questions.json")
"""Token ids of questions in the chat template of SmolLM2, whose answers end with ENDS."""
QUESTION_TOKENS, ENDS = 128, frozenset((0, 2))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at once, and the tokens of each prompt and of each answer."""

    concurrency: int
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Built:
    """An engine of a model, with the seconds that it took to build, and the policy of `auto`."""

    model: str
    engine: Engine
    seconds: float
    policy: Policy

    def run(self, load: Load, *, batches: int = 1, answer: int | None = None) -> Run:
        """Run `batches` times the load's requests, each that ends makes room for the next; or all questions."""
        if self.model == REAL_PAIR:
            most, questions = answer or QUESTION_TOKENS, json.loads(QUESTIONS.read_text(encoding="utf-8")).values()
            requests = [Request(f"r{i}", tuple(ids), most, stop_token_ids=ENDS) for i, ids in enumerate(questions)]
        else:
            count, vocab_size = batches * load.concurrency, self.engine.target.vocab_size
            requests = random_requests(count, load.prompt, answer or load.answer, vocab_size)
        return run(self.engine.core, requests, load.concurrency)


class Engines:
    """The engine in use: one at a time, because memory does not hold two of an 8B."""

    def __init__(self, options: Options, loads: Sequence[Load]) -> None:
        longest = max(*PROMPTS, *(load.prompt + max(load.answer, profile.ANSWER) for load in loads)) + 1
        self._sizes: dict[str, Any] = {"max_model_len": longest, "verify": "auto", "device": options.device}
        self._sizes["max_num_seqs"] = max(load.concurrency for load in loads)
        self._pair = options.real_pair
        self._made: dict[tuple[str, bool], Built] = {}
        self.plain_texts: dict[int, dict[str, list[int]]] = {}
        """Requests at once -> answers of the real pair's target alone."""

    def of(self, model: str, way: str) -> Built:
        """Return the engine of one of WAYS. Whole blocks and `auto` share one, which differs in its policy."""
        key = model, way != "plain"
        if key not in self._made:
            self._made.clear()
            begun = time.monotonic()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            engine = self._build(*key)
            self._made[key] = Built(model, engine, time.monotonic() - begun, engine.core.scheduler.policy)
            if engine.draft and model != REAL_PAIR:
                simulated.simulate(engine.core, simulated.even_rates(tau(engine), engine.draft.block_size))
        built = self._made[key]
        built.engine.core.scheduler.policy = built.policy if way == "auto" else Policy(built.engine.sizes.block_size)
        return built

    def _build(self, model: str, draft: bool) -> Engine:
        if model != REAL_PAIR:
            return random_engine(model, draft=draft, **self._sizes)
        free_memory(self._sizes["device"])
        target = find_folder(self._pair[0], "target", has_tokenizer=False)
        sizes = self._sizes | {"max_model_len": None, "prefix_caching": False}
        return build_engine(EngineConfig(target, find_folder(self._pair[1], "draft") if draft else None, **sizes))


def tau(engine: Engine) -> float:
    """Return the mean acceptance length that is drawn for whole blocks."""
    assert engine.draft
    block = engine.draft.block_size
    return TAUS.get(block, min(TAUS[16], (1 + block) / 2))


def parts(options: Options, ends: float) -> list[Part]:
    """Return a part for each model, way and load, a part for prompts alone, and profiles. Only the first round of a
    load may pass `ends` of `time.monotonic`."""
    loads = [Load(concurrency, options.prompt, options.answer) for concurrency in options.concurrency]
    engines, made = Engines(options, loads), []
    for model in options.models:
        for way in WAYS:
            for load in loads:
                name = f"{model}, {way} at {load.concurrency}"
                made.append(Part(name, partial(speed, engines, model, way, load, options.rounds, ends)))
            if way == "plain" and model != REAL_PAIR:
                made.append(Part(f"{model}, prompts", partial(prompts, engines, model)))
            if way != "auto":
                name = f"{model}, a step of {way} at {loads[0].concurrency}"
                made.append(Part(name, partial(profiled, engines, model, way, loads[0])))
    return made


def speed(engines: Engines, model: str, way: str, load: Load, rounds: int, ends: float) -> Result:
    """Run short answers to warm up, and then the rounds that the time allows."""
    built = engines.of(model, way)
    engine, before = built.engine, clocks()
    built.run(load, answer=min(WARM_UP_ANSWER, load.answer))
    runs, took = list[Run](), 0.0
    while not runs or (len(runs) < rounds and time.monotonic() + took <= ends):
        begun = time.monotonic()
        runs.append(built.run(load))
        took = time.monotonic() - begun
    in_time = rounds > 1 and REFILLS * took + time.monotonic() <= ends
    measured, steady = median(run.speed for run in runs), _median([run.steady_speed for run in runs])
    length, is_drawn = runs[-1].steady_length, way == "full blocks" and model != REAL_PAIR
    return {
        "found": f"{measured:.4g} tok/s",
        "tok/s": measured,
        "rounds": [run.speed for run in runs],
        "steady tok/s": steady,
        "tok/s at the mean length": steady * tau(engine) / length if steady and length and is_drawn else steady,
        "step ms": _median([run.step_ms for run in runs]),
        "acceptance length": length,
        "rows: steps": dict(runs[-1].decode_rows.most_common(MOST_ROWS)),
        "share of prompts": median(run.prefill_seconds / run.seconds for run in runs),
        "refilled tok/s": built.run(load, batches=REFILLS).speed if in_time else None,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 or None,
        "built in s": built.seconds,
        "clocks before": before,
        "clocks": clocks(),
    } | (texts_of(engines, runs[-1], load, way) if model == REAL_PAIR else {})


def texts_of(engines: Engines, done: Run, load: Load, way: str) -> Result:
    """Return how many answers of the real pair are those of plain decoding at as many requests at once."""
    if way == "plain":
        engines.plain_texts[load.concurrency] = done.texts
        return {}
    plain = engines.plain_texts.get(load.concurrency, {})
    return {"texts like plain ones": sum(done.texts[name] == text for name, text in plain.items()), "of": len(plain)}


def prompts(engines: Engines, model: str) -> Result:
    """Time one prompt of each length of PROMPTS by itself, with its first token, after one that warms up."""
    built, ms = engines.of(model, "plain"), dict[str, float]()
    for length in PROMPTS:
        runs = [built.run(Load(1, length, 1)) for _ in range(3)]
        ms[f"{length} tokens, ms"] = 1e3 * median(run.seconds for run in runs[1:])
    return ms | {"found": ", ".join(f"{name} {taken:.4g}" for name, taken in ms.items())}


def profiled(engines: Engines, model: str, way: str, load: Load) -> Result:
    return profile.profiled(engines.of(model, way).engine, load.concurrency, load.prompt)


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
