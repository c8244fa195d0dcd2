"""Engines of random weights on this GPU: whether graphs say what eager code says, and tokens per second."""

import gc
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from app.bench import random_weights, simulated
from app.bench.gpu_report_floor import Load, run_seconds, step_seconds
from app.engine.backend import Backend
from app.engine.build import Engine, build_engine
from app.engine.config import EngineConfig
from app.engine.core import EngineCore
from app.engine.cuda.backend import CudaBackend
from app.engine.sequence import Request

TAU = 6.36
"""Mean acceptance length that is simulated: what DFlash reaches with Qwen3-8B on GSM8K."""
PUBLISHED = {("plain", 1): 183, ("plain", 32): 4384, ("DFlash", 1): 681, ("DFlash", 32): 7318}
"""Output tokens per second of SGLang on one H200, Qwen3-8B and GSM8K: different workload."""
TARGETS = {("plain", 1): 200, ("plain", 32): 5000, ("DFlash", 1): 1000, ("DFlash", 32): 10000}


@dataclass(slots=True)
class Measured:
    """Output tokens per second of each round over its whole time, and milliseconds of its decode steps."""

    speeds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def engine(model: str, *, draft: bool, device: str, **config: Any) -> Engine:
    """Of random weights. Nothing is read from a disk but the config that is written here; the memory of an engine
    before it, which is bound up in circles, is given back first."""
    gc.collect()
    with TemporaryDirectory() as folder:
        target, draft_folder = random_weights.write_configs(model, Path(folder))
        wishes: dict[str, Any] = {"device": device, "prefix_caching": False} | config
        return build_engine(
            EngineConfig(target, draft_folder if draft else None, **wishes), open_weights=random_weights.RandomWeights
        )


def requests(count: int, prompt: int, answer: int, vocab_size: int) -> list[Request]:
    draw = random.Random(count)
    return [Request(f"r{i}", tuple(draw.choices(range(vocab_size), k=prompt)), answer) for i in range(count)]


def equality(model: str, device: str, *, answer: int = 48) -> list[dict[str, Any]]:
    """The same greedy requests: from graphs; with graphs' padded steps run eagerly, which must be the same; eagerly
    without padding, and without a draft, which differ in how sums are rounded."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "max_graphs": 12}
    vocab_size = random_weights.TARGETS[model]["vocab_size"] if model in random_weights.TARGETS else 0
    ways: Mapping[str, dict[str, Any]] = {
        "graphs": {"draft": True},
        "the same steps without capture": {"draft": True, "rerun": True},
        "eager": {"draft": True, "enforce_eager": True},
        "no draft": {"draft": False},
    }
    texts: dict[str, list[list[int]]] = {}
    for way, wishes in ways.items():
        rerun = wishes.pop("rerun", False)
        with capturing(not rerun):
            made = engine(model, device=device, **sizes | {"enforce_eager": False} | wishes)
            wanted = requests(6, 60, answer, vocab_size or made.target.vocab_size)
            emitted = made.core.run(wanted)
        texts[way] = [emitted[request.request_id] for request in wanted]
        del made
    rows = []
    for way, found in texts.items():
        same = [_same(a, b) for a, b in zip(found, texts["graphs"], strict=True)]
        must = way == "the same steps without capture"
        passed = all(a == b for a, b in zip(found, texts["graphs"], strict=True)) if must else None
        rows.append({"way": way, "tokens as from graphs": sum(same), "of": sum(map(len, found)), "passed": passed})
    return rows


def _same(found: list[int], expected: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))


@contextmanager
def capturing(on: bool) -> Iterator[None]:
    """Off: what would be captured is run again and again, at the same sizes and in the same places."""
    own = CudaBackend.capture
    if not on:
        CudaBackend.capture = Backend.capture  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaBackend.capture = own  # type: ignore[method-assign]


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
        if step.kind == "decode" and step.num_decoding == load.concurrency:
            steps.append(1000 * step.seconds)
    found.speeds.append(tokens / (time.perf_counter() - started))
    if steps:
        found.steps.append(median(steps))


def speeds(model: str, loads: list[Load], device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each way and load. A target alone decodes plainly; drafts are accepted as is drawn, TAU on average."""
    rows = []
    for way in ("plain", "DFlash"):
        longest = max(load.prompt + load.answer for load in loads)
        most = max(load.concurrency for load in loads)
        made = engine(model, draft=way == "DFlash", device=device, max_model_len=longest, max_num_seqs=most)
        if made.draft:
            simulated.simulate(made.core, simulated.survival([TAU], made.draft.block_size))
        vocab_size = made.target.vocab_size
        for load in loads:
            found = Measured()
            timed(made.core, Load(load.concurrency, load.prompt, min(64, load.answer)), vocab_size, Measured())
            for _ in range(rounds):
                timed(made.core, load, vocab_size, found)
            rows.append(row(way, made, load, found))
        del made
    return rows


def row(way: str, made: Engine, load: Load, found: Measured) -> dict[str, Any]:
    floor = run_seconds(made.target, made.draft, load, TAU)
    step_floor = 1000 * step_seconds(made.target, made.draft, load)
    most, speed = load.concurrency * load.answer / floor, median(found.speeds)
    step = median(found.steps) if found.steps else None
    return {
        "way": way,
        "concurrency": load.concurrency,
        "tok/s": speed,
        "rounds": found.speeds,
        "floor tok/s": most,
        "share of floor": speed / most,
        "step ms": step,
        "floor of step ms": step_floor,
        "share of step's floor": None if step is None else step_floor / step,
        "target": TARGETS.get((way, load.concurrency)),
        "published": PUBLISHED.get((way, load.concurrency)),
    }
