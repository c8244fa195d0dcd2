"""A hybrid target's texts are Transformers' own, with DFlash in every way that could disturb a state.

test_target_parity.py has its logits, tests/fast/engine/test_hybrid.py the states themselves, and faults.
"""

import math
from pathlib import Path
from random import Random

import pytest

from app.messages import Request
from tests.costs import landing_ones
from tests.exhaustive.live import load_transformers
from tests.fast.engine.feeder import HYBRIDS, assert_logits_close, random_checkpoint
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.hybrid_reference import HybridReference
from tests.fast.engine.lossless import (
    LUCKY,
    Case,
    Comparison,
    Subject,
    assert_lossless,
    covering_cases,
    make_engine,
    near_ties_capped,
    random_prompts,
)
from tests.fast.engine.planted import PlannedRun
from tests.fast.engine.planted import make_engine as make_planted_engine
from tests.fast.engine.reference import features, greedy, teacher_forced

PROMPTS = 50
WINDOW = 40
"""Tokens in which every accepted count falls on every position."""


def tokens_of(length: int) -> list[int]:
    draw = Random(length)
    return [draw.randrange(97) for _ in range(length)]


@pytest.mark.parametrize("shape", [shape for shape in HYBRIDS if not shape.endswith("Next")])
def test_the_reference_of_the_fast_tests_is_transformers(tmp_path: Path, shape: str):
    folder, tokens = random_checkpoint(tmp_path, **HYBRIDS[shape]).folder, tokens_of(120)
    target, reference = load_transformers(folder), HybridReference(folder)
    assert_logits_close(teacher_forced(reference, tokens), teacher_forced(target, tokens))
    assert_logits_close(features(reference, tokens, (0, 1, 2)), features(target, tokens, (0, 1, 2)))


# Texts


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    pair = make_hybrid_pair(tmp_path_factory.mktemp("lucky"), **LUCKY)
    return Subject("hybrid", pair.target, pair.draft, random_prompts(pair.vocab_size, PROMPTS), load_transformers)


near_ties = pytest.fixture(scope="module")(near_ties_capped)


def test_plain_decoding_is_transformers_own(subject: Subject, near_ties: list[Comparison]):
    comparison = subject.compare(list(subject.plain(Case())), Case())
    assert_lossless(comparison)
    near_ties.append(comparison)


CASES = covering_cases(2, path=("eager", "graphs", "overlap"), page_size=(1, 4, 16))


@pytest.mark.parametrize("case", landing_ones(CASES, CASES[::4]), ids=str)
def test_dflash_changes_no_token(subject: Subject, near_ties: list[Comparison], case: Case):
    run = subject.run(case)
    comparison = subject.compare(run.texts, case)
    print(f"acceptance length {run.acceptance_length:.2f}, {run.preemptions} preemptions")
    assert_lossless(comparison)
    near_ties.append(comparison)
    assert (run.verify_steps > 0) == (case.speculation != "off")
    assert math.isnan(run.acceptance_length) or run.acceptance_length > 1.1


@pytest.mark.parametrize("draft", [True, False], ids=["with DFlash", "plain"])
def test_a_conversation_from_the_prefix_cache_says_transformers_text(tmp_path: Path, draft: bool):
    pair = make_hybrid_pair(tmp_path, seed=4, max_position_embeddings=256)
    target, text = load_transformers(pair.target), tokens_of(19)
    of_draft = pair.draft if draft else None
    core = make_engine(pair.target, of_draft, page_size=4, max_model_len=256, prefix_caching=True).core
    hits = []
    for turn in range(4):
        text = text + tokens_of(3 + turn)
        (answer,) = core.run([Request(str(turn), tuple(text), 20 + turn)]).values()
        assert answer == greedy(target, text, 20 + turn)
        hits.append(core.scheduler.prefix_cache_hits - sum(hits))
        text = text + answer
    assert hits[0] == 0 and all(found > 30 for found in hits[1:]), "beyond the prompt of the turn before"


@pytest.mark.parametrize("cut", landing_ones(range(16), (0, 7, 15)))
def test_every_accepted_count_at_every_position_says_transformers_text(tmp_path: Path, cut: int):
    """A step at each position of a window accepts `cut` drafts, and the steps around it draw theirs."""
    pair = make_hybrid_pair(tmp_path, seed=4, block_size=16, max_position_embeddings=256)
    target, prompt = load_transformers(pair.target), tokens_of(11)
    text = [*prompt, *greedy(target, prompt, WINDOW + 16)]
    engine = make_planted_engine(pair, page_size=16, max_model_len=96, max_num_seqs=8)

    def cut_of(name: str, length: int) -> int:
        return cut if length == int(name) else Random(f"{name} {length}").randrange(16)

    names = [str(length) for length in range(len(prompt) + 1, len(prompt) + WINDOW)]
    run = PlannedRun(engine, dict.fromkeys(names, text), cut_of)
    emitted = run.run([Request(name, tuple(prompt), WINDOW) for name in names])
    assert emitted == dict.fromkeys(names, text[len(prompt) : len(prompt) + WINDOW])
