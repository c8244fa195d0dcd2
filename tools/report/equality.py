"""Texts from graphs against the same steps without capture, eager code, one step at a time, and no draft: of each kind
of target."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from app.engine.cuda.backend import CudaBackend
from app.engine.device.torch import TorchBackend
from app.messages import SamplingParams
from tools.lab import simulated
from tools.lab.in_process import random_requests
from tools.lab.random_weights import TARGETS, in_16_bits, random_engine
from tools.report.part import Options, Part, Result

Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """An engine whose texts are compared with another way's."""

    like: str | None = None
    """The other way. None is a way that others are compared with."""
    may_differ: int = 0
    """Requests whose text may differ."""
    config: dict[str, Any] = field(default_factory=dict)
    draft: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    """SamplingParams of the requests."""
    rerun: bool = False
    """True runs again what would be captured."""
    accepted: int | None = None
    """Drafts that each step accepts; None accepts what the target chooses."""
    overlap: bool = True
    """False reads a step before the next one is launched."""


DRAWN = {"temperature": 0.7, "top_p": 0.95}
FP32 = {"dtype": "float32"}
NARROW = FP32 | {"verify": 4}
ACCEPTED = "graphs, fp32, 3 drafts accepted"
FEW_VERIFIED = "graphs, fp32, 4 rows of a block verified, 2 drafts accepted"
PLAIN = "no draft, fp32"
WAYS = {
    "graphs": Way(),
    "the same steps without capture": Way("graphs", rerun=True),
    "graphs, tokens drawn": Way(sampling=DRAWN),
    "the same drawn without capture": Way("graphs, tokens drawn", sampling=DRAWN, rerun=True),
    ACCEPTED: Way(config=FP32, accepted=3),
    "the same, one step at a time": Way(ACCEPTED, 1, FP32, accepted=3, overlap=False),
    "the same, eager": Way(ACCEPTED, 1, FP32 | {"enforce_eager": True}, accepted=3),
    FEW_VERIFIED: Way(config=NARROW, accepted=2),
    "the same, narrow and eager": Way(FEW_VERIFIED, 1, NARROW | {"enforce_eager": True}, accepted=2),
    PLAIN: Way(config=FP32, draft=False),
    "graphs, fp32": Way(PLAIN, 1, FP32),
}
"""In bf16 only texts that must be the same bit by bit are compared, because random weights decide by little.

In fp32 a near tie is rare. There drafts are accepted, so that the device moves on by more than a token."""
OF_BITS = {
    "graphs": Way(accepted=3),
    "the same steps without capture": Way("graphs", accepted=3, rerun=True),
}
IN_FP32 = {name: WAYS[name] for name in (ACCEPTED, "the same, eager", PLAIN, "graphs, fp32")}
"""Quantised weights have none of these: they become fp32 at load."""
SAME_BITS = {"batch_invariant": True}
INVARIANT = {
    "no draft, --batch-invariant": Way(config=SAME_BITS, draft=False),
    "graphs, --batch-invariant": Way("no draft, --batch-invariant", config=SAME_BITS),
    "eager, --batch-invariant": Way("no draft, --batch-invariant", config=SAME_BITS | {"enforce_eager": True}),
}


def _small(name: str, layers: int = 4, **sizes: Any) -> dict[str, Any]:
    """Return a config of the laboratory with few layers, and heads as they are."""
    config = TARGETS[name]
    kinds = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    shape = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": layers}
    return config | shape | kinds | sizes


_INT8: dict[str, Any] = {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}}
_EXPERTS = _small("qwen3-30b-a3b-fp8", num_experts=64, num_attention_heads=8)
_HYBRID = _small("qwen3.8-27b-fp8", layers=8, linear_num_value_heads=32)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Way]]] = {
    "hybrid in FP8": (_HYBRID, OF_BITS),
    "experts in FP8": (_EXPERTS, OF_BITS),
    "dense in FP8": (_small("qwen3-8b-fp8"), OF_BITS | INVARIANT),
    "gpt-oss": (_small("gpt-oss-20b"), OF_BITS | {name: WAYS[name] for name in (ACCEPTED, "the same, eager")}),
    "dense in int8": (_small("qwen3-8b") | _INT8, OF_BITS | INVARIANT),
    "hybrid": (in_16_bits(_HYBRID), OF_BITS | IN_FP32),
    "experts": (in_16_bits(_EXPERTS), OF_BITS | IN_FP32),
    "dense": (_small("qwen3-0.6b", 12, vocab_size=151936), WAYS),
}
NUM_REQUESTS, PROMPT, ANSWER = 6, 60, 48
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "max_graphs": 24, "enforce_eager": False}


def parts(options: Options) -> list[Part]:
    return [
        part for kind, (model, ways) in KINDS.items() for part in parts_of(model, ways, options.device, ANSWER, kind)
    ]


def parts_of(model: dict[str, Any], ways: dict[str, Way], device: str, answer: int, kind: str) -> list[Part]:
    """Return a part for each way, all with the same requests."""
    made: dict[str, Texts | None] = {}

    def texts(name: str) -> Texts:
        if name not in made:
            made[name] = None
            made[name] = texts_of(ways[name], model, device, answer)
        result = made[name]
        if result is None:
            raise RuntimeError(f"{name!r} failed, and there is nothing to compare with")
        return result

    return [Part(f"{kind}: {name}", partial(compared, way, name, texts)) for name, way in ways.items()]


def texts_of(way: Way, model: dict[str, Any], device: str, answer: int) -> Texts:
    with capturing(not way.rerun):
        engine = random_engine(model, draft=way.draft, device=device, **SIZES | way.config)
        engine.core.overlap &= way.overlap
        if way.accepted is not None and engine.draft:
            simulated.simulate(engine.core, [1.0] * way.accepted)
        plain = random_requests(NUM_REQUESTS, PROMPT, answer, engine.target.vocab_size)
        wanted = [
            replace(request, sampling=SamplingParams(seed=seed, **way.sampling)) for seed, request in enumerate(plain)
        ]
        emitted = engine.core.run(wanted)
    return [emitted[request.request_id] for request in wanted]


def compared(way: Way, name: str, texts: Callable[[str], Texts]) -> Result:
    ours = texts(name)
    result: Result = {"of": sum(map(len, ours))}
    if way.like is None:
        return result
    pairs = list(zip(ours, texts(way.like), strict=True))
    differ = sum(text != other for text, other in pairs)
    alike = sum(_same(text, other) for text, other in pairs)
    result |= {"like": way.like, "tokens alike": alike, "requests that differ": differ, "that may": way.may_differ}
    if differ:
        number, at = next((i, _same(*pair)) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        result["first difference"] = f"request {number}, token {at}"
    return result | {"passed": differ <= way.may_differ}


def _same(text: list[int], other: list[int]) -> int:
    """Count the tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(text))


@contextmanager
def capturing(on: bool) -> Iterator[None]:
    """If not `on`, run again what would be captured, at the same sizes and in the same memory."""
    original = CudaBackend.capture
    if not on:
        CudaBackend.capture = TorchBackend.capture  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaBackend.capture = original  # type: ignore[method-assign]
