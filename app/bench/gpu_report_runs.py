"""Engines of random weights on this GPU: whether graphs say what eager code says, and tokens per second."""

import gc
import random
import time
from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class Way:
    """An engine whose text is compared with that of the way `like`: of its requests `may_differ` may, None for any.

    `rerun` runs what would be captured; `accepted` says how many drafts each step accepts, whatever they are; without
    `overlap` a step is read before the next one is launched.
    """

    config: dict[str, Any]
    like: str = "graphs"
    may_differ: int | None = None
    draft: bool = True
    rerun: bool = False
    accepted: int | None = None
    overlap: bool = True


FP32, ACCEPTED = {"dtype": "float32"}, 3
OVERLAPPED = f"graphs, fp32, {ACCEPTED} drafts accepted"
WAYS = {
    "graphs": Way({}),
    "the same steps without capture": Way({}, may_differ=0, rerun=True),
    "eager": Way({"enforce_eager": True}),
    "no draft": Way({}, draft=False),
    OVERLAPPED: Way(FP32, OVERLAPPED, accepted=ACCEPTED),
    "the same, one step at a time": Way(FP32, OVERLAPPED, may_differ=1, accepted=ACCEPTED, overlap=False),
}


def equality(model: str, device: str, *, answer: int = 48) -> list[dict[str, Any]]:
    """The same greedy requests: from graphs, each step launched before the last one is read; with graphs' padded steps
    run eagerly, which must be the same; eagerly without padding, and without a draft, which differ in how sums are
    rounded. And in fp32, where a near tie is rare, with overlap and without: there drafts are accepted, so that the
    device moves on by more than a token."""
    texts: dict[str, list[list[int]]] = {}
    rows = []
    for name, way in WAYS.items():
        texts[name] = found = _texts(way, model, device, answer)
        same = [_same(a, b) for a, b in zip(found, texts[way.like], strict=True)]
        differ = sum(a != b for a, b in zip(found, texts[way.like], strict=True))
        passed = None if way.may_differ is None else differ <= way.may_differ
        rows.append({"way": name, "like": way.like, "tokens alike": sum(same), "of": sum(map(len, found))})
        rows[-1]["passed"] = passed
    return rows


def _texts(way: Way, model: str, device: str, answer: int) -> list[list[int]]:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "max_graphs": 12, "enforce_eager": False}
    with capturing(not way.rerun):
        made = engine(model, draft=way.draft, device=device, **sizes | way.config)
        made.core.overlap &= way.overlap
        if way.accepted is not None and made.draft:
            simulated.simulate(made.core, simulated.survival([1.0] * way.accepted, made.draft.block_size))
        wanted = requests(6, 60, answer, made.target.vocab_size)
        emitted = made.core.run(wanted)
    return [emitted[request.request_id] for request in wanted]


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
