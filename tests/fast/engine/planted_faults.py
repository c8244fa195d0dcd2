"""Engines that are stepped to the end, and faults that are planted in their steps."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.engine.core import EngineCore
from app.engine.load.engine import Engine
from app.engine.sampling.penalties import TokenCounts
from app.engine.sequence import Sequence
from app.engine.step.forward import Forward
from app.engine.step.inputs import Layout
from app.messages import Request, TokenDelta
from tests.fast.engine.device_lengths import device_lengths
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import Pair

PAGE = 4
BAD_TOKEN = 50
NAN = float("nan")


def engine_of(pair: Pair, **settings: Any) -> Engine:
    sizes = {"page_size": PAGE, "block_size": 8, "max_model_len": 96, "max_num_seqs": 4, "enforce_eager": True}
    engine = make_engine(pair.target, pair.draft, **sizes | {"prefix_caching": False} | settings)
    if pair.vocab_size > BAD_TOKEN:
        target = engine.core.runner.forward.target
        with torch.inference_mode():
            target.embedding[BAD_TOKEN] = NAN
            target.lm_head[BAD_TOKEN] = 0.0  # no text has it by itself
    return engine


def overlapping(pair: Pair, **settings: Any) -> Engine:
    """On a device on which a step is launched before the previous one is read."""
    with device_lengths():
        engine = engine_of(pair, **{"enforce_eager": False, "max_graphs": 4} | settings)
    assert engine.core.overlap
    return engine


def requests(pair: Pair, count: int, *, max_tokens: int = 24, **asked: Any) -> list[Request]:
    rng = random.Random(5)
    tokens = [token for token in range(pair.vocab_size) if token != BAD_TOKEN]
    prompts = [tuple(rng.choices(tokens, k=rng.randint(5, 30))) for _ in range(count)]
    return [flat_request(f"r{i}", prompt, max_tokens, **asked) for i, prompt in enumerate(prompts)]


class Run:
    """An engine that is stepped until nothing is left, and what came out of it."""

    def __init__(self, engine: Engine, asked: list[Request]) -> None:
        self.engine, self.core, self.scheduler = engine, engine.core, engine.core.scheduler
        self.texts: dict[str, list[int]] = {request.request_id: [] for request in asked}
        self.ends: dict[str, TokenDelta] = {}
        for request in asked:
            self.core.add(request)

    def step(self) -> None:
        for delta in self.core.step().deltas:
            assert delta.request_id not in self.ends
            self.texts[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                self.ends[delta.request_id] = delta
        self.scheduler.check()

    def until(self, told: int, request_id: str = "r1") -> "Run":
        """Until a request has said so many tokens."""
        while len(self.texts[request_id]) < told:
            self.step()
        return self

    def to_the_end(self) -> "Run":
        while self.core.has_work:
            self.step()
        assert self.scheduler.pool.num_used == 0
        assert set(self.ends) == set(self.texts)
        return self

    def sequence(self, request_id: str) -> Sequence:
        return next(seq for seq in self.scheduler.running if seq.request.request_id == request_id)

    def poison(self, pages: list[int]) -> None:
        """NaN in the target's memory, as of a device that has erred."""
        kv = self.core.runner.pools[0].layers[1]
        with torch.inference_mode():
            kv.k[pages] = NAN
            kv.v[pages] = NAN

    def errors(self) -> dict[str, str]:
        return {name: str(delta.error) for name, delta in self.ends.items() if delta.finish_reason == "error"}


def undisturbed(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    return Run(engine, asked).to_the_end().texts


class Planted(Exception):
    pass


Plant = Callable[[pytest.MonkeyPatch, EngineCore], None]


def names(rows: list[Any]) -> set[str]:
    return {r.seq.request.request_id for r in rows}


def in_build(patch: pytest.MonkeyPatch, core: EngineCore) -> None:
    build = Layout.build

    def spoilt(layout: Layout, batch: Any) -> Any:
        if "bad" in names(batch.entries):
            raise Planted("in build")
        return build(layout, batch)

    patch.setattr(Layout, "build", spoilt)


def during(method: str, *, behind: bool = False, of: Callable[[Forward], Any] = lambda forward: forward) -> Plant:
    """In a method of the stages, or of a part, before or after its work, whenever "bad" has rows in the step."""

    def plant(patch: pytest.MonkeyPatch, core: EngineCore) -> None:
        stage, now = of(core.runner.forward), set[str]()
        launch, real = core.launch, getattr(stage, method)

        def launched(batch: Any) -> Any:
            now.clear()
            now.update(names(batch.entries))
            return launch(batch)

        def spoilt(*args: Any, **kwargs: Any) -> Any:
            if "bad" in now and not behind:
                raise Planted(f"in {method}")
            found = real(*args, **kwargs)
            if "bad" in now:
                raise Planted(f"behind {method}")
            return found

        patch.setattr(core, "launch", launched)
        patch.setattr(stage, method, spoilt)

    return plant


def in_context(patch: pytest.MonkeyPatch, core: EngineCore) -> None:
    """Whenever rows of "bad" are among those that are written, of whatever step they are."""
    write = core.runner.forward.drafter.write_context

    def spoilt(features: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, *rotation: Any) -> None:
        own = {page for seq in core.scheduler.running if seq.request.request_id == "bad" for page in seq.pages}
        if own & set((slot_mapping // PAGE).tolist()):
            raise Planted("in write_context")
        write(features, positions, slot_mapping, *rotation)

    patch.setattr(core.runner.forward.drafter, "write_context", spoilt)


def in_read(patch: pytest.MonkeyPatch, core: EngineCore) -> None:
    launch = core.launch

    def launched(batch: Any) -> Any:
        pending = launch(batch)
        if "bad" in names(batch.entries):
            pending.read = lambda: 1 / 0
        return pending

    patch.setattr(core, "launch", launched)


def in_counts(patch: pytest.MonkeyPatch, core: EngineCore) -> None:
    begin = TokenCounts.begin

    def spoilt(counts: TokenCounts, sequences: Any) -> None:
        begin(counts, sequences)
        if any(seq.key[0] == "bad" for seq in sequences):
            raise Planted("behind the notes of who is counted")

    patch.setattr(TokenCounts, "begin", spoilt)


def of_scheduler(method: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch, core: EngineCore) -> None:
        real = getattr(core.scheduler, method)

        def spoilt(it: Any, *args: Any) -> Any:
            if getattr(it, "seq", it).request.request_id == "bad":
                raise Planted(f"in {method}")
            return real(it, *args)

        patch.setattr(core.scheduler, method, spoilt)

    return plant


PHASES: dict[str, Plant] = {
    "admission": of_scheduler("_find"),
    "more pages": of_scheduler("_grow_or_preempt"),
    "chunk": of_scheduler("_chunk"),
    "build": in_build,
    "draft": during("draft"),
    "target": during("deciding"),
    "behind target": during("deciding", behind=True),
    "context": in_context,
    "verify": during("verify"),
    "behind verify": during("verify", behind=True),
    "counts": in_counts,
    "read": in_read,
    "accept": of_scheduler("accept"),
    "publish": of_scheduler("_publish"),
}
