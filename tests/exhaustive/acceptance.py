"""Acceptance lengths of the demo pair, however the engine is run."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from app.engine.load.engine import Engine
from app.messages import Request
from tests.fast.engine.lossless import Prompt, Run, demo_folder, demo_prompts, make_engine, run_engine

PROMPTS = 20
MAX_TOKENS = 200
FLOOR = {"math": 10.3, "copy": 7.6}
"""Acceptance length, a little below what the shipped pair shows on these prompts."""
NEAR = 0.05
"""Largest distance of another run's acceptance length from the cold run's, as a share of it."""


@cache
def prompts(domain: str) -> list[Prompt]:
    return demo_prompts(domain, PROMPTS, MAX_TOKENS)


def requests(domain: str) -> list[Request]:
    return [
        Request(str(i), prompt.token_ids, prompt.max_tokens, stop_token_ids=prompt.stop_token_ids)
        for i, prompt in enumerate(prompts(domain))
    ]


def engine(draft: Path | None = None, **settings) -> Engine:
    """Without a prefix cache, where it is not asked for: every context is made by the run itself."""
    sizes = {"max_num_seqs": 16, "page_size": 16, "block_size": 16, "prefix_caching": False}
    return make_engine(demo_folder("target"), draft or demo_folder("draft"), **sizes | settings)


def cold(domain: str) -> Run:
    """Every prompt alone on an engine that has run nothing else."""
    return _joined(run_engine(engine(max_num_seqs=1), [request]) for request in requests(domain))


def batched(domain: str) -> Run:
    return run_engine(engine(), requests(domain))


def chunked(domain: str) -> Run:
    """Prompts in pieces of 16 rows and fewer, among the verify rows of others."""
    return run_engine(engine(max_num_seqs=4, max_num_batched_tokens=64), requests(domain))


def preempted(domain: str) -> Run:
    """Pages for little more than one sequence: the others are thrown out and recomputed."""
    within = [replace(r, max_tokens=len(text)) for r, text in zip(requests(domain), answers(domain), strict=True)]
    limit = max(len(request.token_ids) + request.max_tokens for request in within)
    run = run_engine(engine(page_size=4, max_model_len=limit, kv_pages=(limit + 32) // 4 + 4), within)
    assert run.preemptions >= (PROMPTS / 4 if domain == "math" else 2)  # Copied answers are short: few pages.
    return run


def near_the_length_limit(domain: str) -> Run:
    """Every answer ends at the last position that `max_model_len` allows, so that drafts reach past it."""
    runs = []
    for request, text in zip(requests(domain), answers(domain), strict=True):
        limit = len(request.token_ids) + len(text)
        runs.append(run_engine(engine(max_num_seqs=1, max_model_len=limit), [replace(request, max_tokens=len(text))]))
    return _joined(runs)


def on_pages_of_128(domain: str) -> Run:
    return run_engine(engine(page_size=128), requests(domain))


def from_the_cache(domain: str) -> Run:
    """Every prompt a second time, when all full pages of it are found."""
    warm = engine(prefix_caching=True)
    run_engine(warm, requests(domain))
    run = run_engine(warm, requests(domain))
    assert run.cached_tokens == sum((len(prompt.token_ids) - 1) // 16 * 16 for prompt in prompts(domain))
    return run


WAYS: dict[str, Callable[[str], Run]] = {
    "batched": batched,
    "chunked prefill": chunked,
    "after preemption": preempted,
    "near the length limit": near_the_length_limit,
    "pages of 128": on_pages_of_128,
    "from the cache": from_the_cache,
}


@cache
def cold_run(domain: str) -> Run:
    return cold(domain)


def answers(domain: str) -> list[list[int]]:
    return cold_run(domain).texts


def keeps(domain: str, run: Run) -> bool:
    """Return true if `run` accepts as the cold run does.

    A preemption may save a step, because the last row of the recompute yields a token without a verify step. So may a
    length limit, because a last token alone is not drafted. A saved step takes at least its own token along.
    """
    cold = cold_run(domain)
    saved, lost = cold.verify_steps - run.verify_steps, cold.verify_tokens - run.verify_tokens
    near = abs(run.acceptance_length / cold.acceptance_length - 1) <= NEAR
    return near or 0 < saved <= lost


def _joined(runs) -> Run:
    joined = Run([])
    for run in runs:
        joined.texts += run.texts
        joined.verify_steps += run.verify_steps
        joined.verify_tokens += run.verify_tokens
    return joined
