"""Processes over Gloo decode what one does, with the demo pair and random pairs of all families."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config.engine import EngineConfig
from tests.costs import landing_ones
from tests.exhaustive.gloo_ranks import PROGRAM
from tests.exhaustive.rank_processes import Job, Result, run_on_ranks
from tests.fast.engine import lossless
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.lossless import LUCKY, Case, Subject, assert_lossless, demo_subject, random_prompts
from tests.fast.engine.pairs import FAMILIES, GPT_OSS, Pair, make_pair

FOUR = ("demo", "Qwen3.5")
"""Pairs that four processes share: one has two KV heads, and one two key heads. Two processes share the others."""
CASES = (
    Case(concurrency=4, temperature=None, sampling="all", cached=True),
    Case(concurrency=4, page_size=4, preempted=True, chunked=True),
)
FOUR_TOKENS = LUCKY | {"vocab_size": 4}
LUCKY_PAIRS: dict[str, Callable[[Path], Pair]] = {
    "Qwen3-MoE": lambda folder: make_pair(folder, **FOUR_TOKENS | {"seed": 6, "experts": 8}),
    "gpt-oss": lambda folder: make_pair(folder, **GPT_OSS | FOUR_TOKENS | {"seed": 14}),
    "Qwen3.5": lambda folder: make_hybrid_pair(folder, **FOUR_TOKENS | {"seed": 16}),
    "Qwen3-Next": lambda folder: make_hybrid_pair(folder, **FOUR_TOKENS | {"seed": 1, "experts": 8, "grouped": True}),
}
"""Random pairs, found by trying seeds, of whose drafts some are accepted."""


def subject_of(name: str, folder: Path) -> Subject:
    if name == "demo":
        return demo_subject(6, max_tokens=24)
    if name in LUCKY_PAIRS:  # short prompts before long ones, whose sequences are preempted
        pair = LUCKY_PAIRS[name](folder / "pair")
        prompts = [replace(prompt, max_tokens=40) for prompt in random_prompts(pair.vocab_size, 5)[2:]]
    else:
        pair = make_pair(folder / "pair", vocab_size=96, block_size=16, **FAMILIES[name])
        prompts = [replace(prompt, max_tokens=min(prompt.max_tokens, 12)) for prompt in random_prompts(96, 3)]
    return Subject(name, pair.target, pair.draft, prompts)


def job(subject: Subject, case: Case, size: int, **config: Any) -> Job:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless, "build_engine", lambda config: config)
        settled: EngineConfig = subject.engine(case)  # type: ignore[assignment]
    given = settled.kv_cache_memory and settled.kv_cache_memory * (2 if size == 4 and subject.name == "demo" else 1)
    sizes: dict[str, Any] = {"kv_cache_memory": given, "tensor_parallel_size": size, **config}
    return replace(settled, enforce_eager=True, **sizes), subject.requests(case)


@pytest.mark.parametrize(
    "name",
    landing_ones(["demo", "Llama 3.2, tied", "Qwen2.5", "Qwen3, biases", *LUCKY_PAIRS], ("demo", "gpt-oss", "Qwen3.5")),
)
def test_processes_decode_what_one_does(tmp_path: Path, name: str):
    size = 4 if name in FOUR else 2
    subject = subject_of(name, tmp_path)
    offs = [replace(case, speculation="off", preempted=False, chunked=False) for case in CASES]
    jobs = [job(subject, case, size) for case in (*CASES, *offs)]
    if name == "demo":
        jobs.append(job(subject, CASES[0], size, draft_tensor_parallel_size=1))
    results = run_on_ranks(jobs, tmp_path, PROGRAM)
    assert all(_agree(result) and len(result.digests) == size for result in results)
    for case, on, off in zip(CASES, results, results[len(CASES) :], strict=False):
        assert on.run.texts == off.run.texts
        assert_lossless(subject.compare(on.run.texts, case))
        alone = subject.run(case)
        assert (on.run.preemptions, on.run.cached_tokens) == (alone.preemptions, alone.cached_tokens)
        assert on.run.cached_tokens > 0 or not case.cached
        assert on.run.preemptions > 0 or not case.preempted or name == "demo"
        assert on.run.acceptance_length == pytest.approx(alone.acceptance_length, rel=0.05)
        assert on.run.acceptance_length > 1.1 or name not in LUCKY_PAIRS
    if name == "demo":
        assert results[-1].run.texts == results[0].run.texts
        assert results[0].run.acceptance_length > 2


def _agree(result: Result) -> bool:
    """Return True if all ranks verified alike in every step."""
    first, *others = result.digests
    return len(first) > 3 and all(digests == first for digests in others)
