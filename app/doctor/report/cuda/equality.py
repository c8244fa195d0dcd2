"""Whether graphs say what the same steps say without capture, eager code, one step at a time, and no draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from app.doctor.report import simulated
from app.doctor.report.cuda.parts import Part, Row
from app.doctor.report.cuda.speeds import engine, requests
from app.engine.backend.base import Backend
from app.engine.cuda.backend import CudaBackend
from app.messages import SamplingParams

Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """An engine whose text is compared with that of the way `like`, None for one that others are compared with: of its
    requests `may_differ` may.

    `sampling` is of its requests. `rerun` runs what would be captured; `accepted` says how many drafts each step
    accepts, whatever they are; without `overlap` a step is read before the next one is launched.
    """

    like: str | None = None
    may_differ: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    draft: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    rerun: bool = False
    accepted: int | None = None
    overlap: bool = True


DRAWN = {"temperature": 0.7, "top_p": 0.95}
FP32 = {"dtype": "float32"}
NARROW = FP32 | {"verify": 4}
ACCEPTED = "graphs, fp32, 3 drafts accepted"
OF_NARROW = "graphs, fp32, 4 rows of a block verified, 2 drafts accepted"
PLAIN = "no draft, fp32"
WAYS = {
    "graphs": Way(),
    "the same steps without capture": Way("graphs", rerun=True),
    "graphs, tokens drawn": Way(sampling=DRAWN),
    "the same drawn without capture": Way("graphs, tokens drawn", sampling=DRAWN, rerun=True),
    ACCEPTED: Way(config=FP32, accepted=3),
    "the same, one step at a time": Way(ACCEPTED, 1, FP32, accepted=3, overlap=False),
    "the same, eager": Way(ACCEPTED, 1, FP32 | {"enforce_eager": True}, accepted=3),
    OF_NARROW: Way(config=NARROW, accepted=2),
    "the same, narrow and eager": Way(OF_NARROW, 1, NARROW | {"enforce_eager": True}, accepted=2),
    PLAIN: Way(config=FP32, draft=False),
    "graphs, fp32": Way(PLAIN, 1, FP32),
}
"""In bf16 only what must be the same bit by bit is compared: random weights decide by little. In fp32 a near tie is
rare, and drafts are accepted, so that the device moves on by more than a token."""


class Engines:
    """The text of each way, made when it is first asked for: by its own part, or by one that is compared with it."""

    def __init__(self, model: str, device: str, answer: int) -> None:
        self._model, self._device, self._answer = model, device, answer
        self._texts: dict[str, Texts | None] = {}

    def texts(self, name: str) -> Texts:
        """Raises RuntimeError where it could not be made before."""
        if name not in self._texts:
            self._texts[name] = None
            self._texts[name] = self._run(WAYS[name])
        texts = self._texts[name]
        if texts is None:
            raise RuntimeError(f"{name!r} failed, and there is nothing to compare with")
        return texts

    def _run(self, way: Way) -> Texts:
        sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "max_graphs": 24, "enforce_eager": False}
        with capturing(not way.rerun):
            made = engine(self._model, draft=way.draft, device=self._device, **sizes | way.config)
            made.core.overlap &= way.overlap
            if way.accepted is not None and made.draft:
                simulated.simulate(made.core, simulated.survival([1.0] * way.accepted, made.draft.block_size))
            plain = requests(6, 60, self._answer, made.target.vocab_size)
            wanted = [
                replace(request, sampling=SamplingParams(seed=seed, **way.sampling))
                for seed, request in enumerate(plain)
            ]
            emitted = made.core.run(wanted)
        return [emitted[request.request_id] for request in wanted]


def parts(model: str, device: str, *, answer: int = 48) -> list[Part]:
    """One a way, with the same requests."""
    engines = Engines(model, device, answer)
    return [Part(name, partial(compared, name, engines)) for name in WAYS]


def compared(name: str, engines: Engines) -> list[Row]:
    way, found = WAYS[name], engines.texts(name)
    row: Row = {"way": name, "of": sum(map(len, found))}
    if way.like is None:
        return [row]
    expected = engines.texts(way.like)
    differ = sum(a != b for a, b in zip(found, expected, strict=True))
    alike = sum(_same(a, b) for a, b in zip(found, expected, strict=True))
    row |= {"like": way.like, "tokens alike": alike, "requests that differ": differ, "that may": way.may_differ}
    return [row | {"passed": differ <= way.may_differ}]


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
