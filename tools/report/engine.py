"""The demo pair on the device, without drafts, eagerly and from graphs: its texts against the CPU's and one another.

In bfloat16 a text may leave another only where the target hardly decides between two tokens. Then `gap` is the distance
of the worse of the two from the best logit, in float32 on the CPU.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from app import demo
from app.config.engine import EngineConfig
from app.engine.checkpoint.files import DEMO
from app.engine.core import EngineCore
from app.engine.load import engine as build
from app.engine.load.engine import Engine
from app.messages import Request, SamplingParams
from tools.lab.in_process import Run, run
from tools.report.part import Options, Part, Result

NUM_PROMPTS, MAX_TOKENS = 24, 48
MAX_GAP = 0.1
"""Plain decoding on the CPU in bfloat16 leaves the float32 text at gaps up to 0.058 (200 prompts)."""
ACCEPTANCE = 0.05
"""The acceptance length may differ from the CPU's in float32 by this share where texts are the same.

A draft under a causal mask loses more, and bfloat16 changes a few drafts."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"enforce_eager": True},
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False},
}


def parts(options: Options) -> list[Part]:
    runs = Runs(options.device, NUM_PROMPTS)
    return [
        *(Part(f"{way} against the CPU", partial(runs.against_cpu, way)) for way in WAYS),
        *(Part(f"{way} against eager", partial(runs.against_eager, way)) for way in ("plain", "graphs")),
    ]


def demo_engine(device: str, dtype: str = "float32", **config: Any) -> Engine:
    """Build the demo pair, small enough that prefill chunks, mixed steps and waiting requests all come about.

    A CPU's steps are those of any device: its prompts are not cut by time.
    """
    wishes: dict[str, Any] = {
        "page_size": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 160,
        "max_model_len": 512,
        "kv_cache_memory": 96 << 20,
        "verify": "full",
    }
    engine = build.build_engine(
        EngineConfig(DEMO / "target", DEMO / "draft", device=device, dtype=dtype, **wishes | config)
    )
    engine.core.scheduler.pace = None
    return engine


def requests(
    count: int, *, greedy: bool = False, speculate: bool = True, max_tokens: int = MAX_TOKENS
) -> list[Request]:
    """Return requests with held-out prompts. Every fourth is drawn unless `greedy`; every seventh is plain."""
    stop_token_ids = frozenset(demo.stop_token_ids())
    return [
        Request(
            f"r{i}",
            prompt,
            max_tokens,
            sampling=SamplingParams(temperature=0.0 if greedy or i % 4 else 0.8, seed=i),
            stop_token_ids=stop_token_ids,
            speculate=speculate and i % 7 != 6,
        )
        for i, prompt in enumerate(demo.token_ids(count))
    ]


def first_difference(text: list[int], other: list[int]) -> int | None:
    """Return the index of the first token that differs or that only one text has, None for equal texts."""
    if text == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


@cache
def judge() -> EngineCore:
    return demo_engine("cpu", max_num_seqs=1, max_num_batched_tokens=1024, max_model_len=1024).core


def gap(prompt: tuple[int, ...], text: list[int], at: int, other: int) -> float:
    """Return the distance of the worse of two candidates for token `at`, `text[at]` and `other`, from the best logit.

    The logits are the target's in float32 on the CPU.
    """
    core, rows = judge(), list[torch.Tensor]()
    backend, sampler = core.runner.forward.backend, core.runner.forward.sampler
    choose = sampler.choose

    def recorded(hidden: torch.Tensor, lm_head: torch.Tensor, *draws: Any) -> torch.Tensor:
        rows.append(backend.logits(hidden[-1:], lm_head)[0])
        return choose(hidden, lm_head, *draws)

    sampler.choose = recorded  # type: ignore[method-assign, assignment]
    try:
        core.run([Request("logits", (*prompt, *text[:at]), max_tokens=1)])
    finally:
        sampler.choose = choose  # type: ignore[method-assign]
    logits = rows[-1].float()
    return float(logits.max() - torch.minimum(logits[text[at]], logits[other]))


class Runs:
    """Runs of the same greedy requests, each made when it is first asked for."""

    def __init__(self, device: str, num_prompts: int, dtype: str = "bfloat16") -> None:
        self._num_prompts = num_prompts
        self._on_device: Callable[[str], Run] = cache(lambda way: self._run(way, device, dtype))
        self._on_cpu: Callable[[str], Run] = cache(lambda dtype: self._run("eager", "cpu", dtype))

    def against_cpu(self, way: str) -> Result:
        found, exact, rough = self._on_device(way), self._on_cpu("float32"), self._on_cpu("bfloat16")
        result = self._compared(exact, found)
        acceptance = {"device": found.acceptance_length, "CPU float32": exact.acceptance_length}
        same = [name for name, text in exact.texts.items() if found.texts[name] == text]
        ours, theirs = (run.acceptance_length_of(same) for run in (found, exact))
        return result | {
            "identical_to_bfloat16": sum(found.texts[name] == text for name, text in rough.texts.items()),
            "acceptance_length": acceptance | {"CPU bfloat16": rough.acceptance_length},
            "of_same_texts": {"device": ours, "CPU float32": theirs},
            "passed": result["passed"] and (way == "plain" or abs(ours - theirs) <= ACCEPTANCE * theirs),
            "found": f"{result['found']}, acceptance length {found.acceptance_length:.4g}, on the CPU "
            f"{exact.acceptance_length:.4g}",
        }

    def against_eager(self, way: str) -> Result:
        expected, found = self._on_device("eager"), self._on_device(way)
        return self._compared(expected, found) | {"same_acceptance_in_every_step": expected.accepted == found.accepted}

    def _run(self, way: str, device: str, dtype: str) -> Run:
        core = demo_engine(device, dtype, **WAYS[way]).core
        wanted = requests(self._num_prompts, greedy=True, speculate=way != "plain", max_tokens=MAX_TOKENS)
        return run(core, wanted)

    def _compared(self, expected: Run, found: Run) -> Result:
        """Return how many texts are the same, and a case for each that differs."""
        cases, prompts = [], demo.token_ids(self._num_prompts)
        for number, (name, text) in enumerate(expected.texts.items()):
            at = first_difference(text, other := found.texts[name])
            if at is not None:
                both_go_on = at < min(len(text), len(other))
                distance = gap(prompts[number], text, at, other[at]) if both_go_on else None
                cases.append({"prompt": number, "token": at, "gap": distance})
        count, tokens = len(expected.texts), sum(map(len, expected.texts.values()))
        return {
            "prompts": count,
            "tokens": tokens,
            "identical": count - len(cases),
            "cases": cases,
            "passed": all(case["gap"] is not None and case["gap"] <= MAX_GAP for case in cases),
            "found": f"{count - len(cases)} of {count} texts are the same",
        }
