"""A trained hybrid pair: its drafts keep hitting however the engine is run.

Text alone cannot see a broken draft. Random drafts are right by chance, so only a trained one shows a broken context.
The target is Transformers' own Qwen3.5 with three Gated DeltaNet layers and one of attention. It continues tunes, which
are random notes that repeat. Its trainer, tools/hybrid_pair.py, last stood in commit 8788056.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest

from app.engine.load.engine import Engine
from app.messages import Request
from tests.exhaustive.live import load_transformers
from tests.fast.engine.lossless import Run, make_engine, run_engine
from tests.fast.engine.reference import greedy

CHECKPOINT = Path(__file__).with_name("hybrid_pair")
NOTES, PERIOD = 63, 20
"""Different notes, and notes until a tune repeats, as in the draft's training. None stands twice among them."""
TUNES = [5 * Random(f"held out {i}").sample(range(NOTES), PERIOD) for i in range(8)]
PROMPT = 30
FLOOR = 12.5
"""Acceptance length (tokens per verify step, the bonus included, block 16), a little below the pair's own 13.80."""


def requests() -> list[Request]:
    return [Request(str(i), tuple(notes[:PROMPT]), len(notes) - PROMPT) for i, notes in enumerate(TUNES)]


def engine(**settings) -> Engine:
    sizes = {"max_num_seqs": 8, "page_size": 16, "max_model_len": 128, "prefix_caching": False}
    return make_engine(CHECKPOINT / "target", **{"draft": CHECKPOINT / "draft"} | sizes | settings)


@cache
def plain() -> list[list[int]]:
    return run_engine(engine(draft=None), requests()).texts


def from_the_cache() -> Run:
    """Every prompt a second time, from a state that is kept."""
    warm = engine(prefix_caching=True)
    run_engine(warm, requests())
    run = run_engine(warm, requests())
    assert run.cached_tokens > 0
    return run


WAYS: dict[str, Callable[[], Run]] = {
    "together": lambda: run_engine(engine(), requests()),
    "alone": lambda: run_engine(engine(max_num_seqs=1), requests()),
    "prompts in chunks": lambda: run_engine(engine(max_num_seqs=2, max_num_batched_tokens=32), requests()),
    "from the cache": from_the_cache,
}


def test_the_target_has_learned_its_tunes_and_says_what_transformers_says():
    right = [
        a == b for text, notes in zip(plain(), TUNES, strict=True) for a, b in zip(text, notes[PROMPT:], strict=True)
    ]
    print(f"{sum(right)} of {len(right)} notes are right")
    assert sum(right) > 0.98 * len(right)
    target = load_transformers(CHECKPOINT / "target")
    for text, notes in list(zip(plain(), TUNES, strict=True))[:2]:
        assert text == greedy(target, notes[:PROMPT], len(text))


@pytest.mark.parametrize("way", WAYS)
def test_drafts_hit_and_change_no_token(way: str):
    run = WAYS[way]()
    print(f"{way}: acceptance length {run.acceptance_length:.2f} over {run.verify_steps} steps")
    assert run.texts == plain()
    assert run.acceptance_length >= FLOOR
