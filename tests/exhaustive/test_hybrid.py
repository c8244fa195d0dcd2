"""A hybrid target is Transformers' own: logits, and texts with DFlash in every way that could disturb a state.

tests/fast/engine/test_hybrid.py has the states themselves, and faults.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from app.messages import Request
from tests.exhaustive.live import load_transformers
from tests.fast.engine.feeder import Feeder, assert_logits_close
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.hybrid_reference import HybridReference
from tests.fast.engine.lossless import (
    LUCKY,
    Case,
    Comparison,
    Subject,
    assert_lossless,
    cap,
    covering_cases,
    make_engine,
    random_prompts,
)
from tests.fast.engine.pairs import Pair
from tests.fast.engine.planted import PlannedRun
from tests.fast.engine.planted import make_engine as make_planted_engine
from tests.fast.engine.reference import features, greedy, teacher_forced

PROMPTS = 50
BF16 = 1.5
"""Largest RMS error of bf16 logits against Transformers' own, as of other families (test_target_parity.py)."""
WINDOW = 40
"""Tokens in which every accepted count falls on every position."""
SHAPES: dict[str, dict] = {
    "4 v heads to 2": {},
    "every second layer, mha": {"layer_types": ("linear_attention", "full_attention") * 2, "num_kv_heads": 4},
    "3 v heads to each": {"k_heads": 2, "v_heads": 6, "k_dim": 16, "v_dim": 8, "tied": True},
    "experts": {"experts": 8},
    "Next": {"experts": 8, "grouped": True},
    "attention first": {"layer_types": ("full_attention", *("linear_attention",) * 4), "k_heads": 4},
}
pytestmark = pytest.mark.usefixtures("kept")


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_hybrid_pair(tmp_path_factory.mktemp("hybrid"), seed=4, **SHAPES[request.param])


def tokens_of(length: int) -> list[int]:
    draw = Random(length)
    return [draw.randrange(97) for _ in range(length)]


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_prefill_in_chunks_gives_transformers_logits_and_hidden_states(pair: Pair, chunk: int | None):
    tokens, target = tokens_of(300), load_transformers(pair.target)
    feeder = Feeder(make_engine(pair.target, pair.draft, page_size=4, max_model_len=320, max_num_seqs=2))
    seq = feeder.sequence(tokens)
    seq.state_slot = 1
    while seq.num_computed < seq.num_tokens:
        feeder.feed(prefills=[(seq, chunk or len(tokens))])
    assert_logits_close(feeder.logits(seq), teacher_forced(target, tokens))
    assert_logits_close(feeder.features(seq), features(target, tokens, pair.taps))


def test_decoding_token_by_token_gives_transformers_logits(pair: Pair):
    tokens, target = tokens_of(300), load_transformers(pair.target)
    feeder = Feeder(make_engine(pair.target, pair.draft, page_size=16, max_model_len=320, max_num_seqs=2))
    seq = feeder.sequence(tokens)
    seq.state_slot = 1
    feeder.feed(prefills=[(seq, 5)])
    while seq.num_computed < seq.num_tokens:
        feeder.feed(decodes=[seq])
    assert_logits_close(feeder.logits(seq), teacher_forced(target, tokens))


@pytest.mark.parametrize("pair", [shape for shape in SHAPES if shape != "Next"], indirect=True)
def test_the_reference_of_the_fast_tests_is_transformers(pair: Pair):
    tokens, target = tokens_of(120), load_transformers(pair.target)
    reference = HybridReference(pair.target)
    assert_logits_close(teacher_forced(reference, tokens), teacher_forced(target, tokens))
    assert_logits_close(features(reference, tokens, (0, 1, 2)), features(target, tokens, (0, 1, 2)))


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("shape", ["4 v heads to 2", "experts", "Next"])
def test_bf16_logits_are_no_worse_than_transformers_bf16_logits(tmp_path: Path, shape: str, chunk: int | None):
    ours, theirs, tokens = 0.0, 0.0, tokens_of(60)
    for seed in range(4):
        pair = make_hybrid_pair(tmp_path / str(seed), seed=seed, dtype=torch.bfloat16, **SHAPES[shape])
        rival = load_transformers(pair.target, torch.bfloat16)
        engine = make_engine(pair.target, pair.draft, page_size=4, max_model_len=96, max_num_seqs=2, dtype="bfloat16")
        feeder = Feeder(engine)
        seq = feeder.sequence(tokens)
        seq.state_slot = 1
        while seq.num_computed < seq.num_tokens:
            feeder.feed(prefills=[(seq, chunk or len(tokens))])
        their_logits = teacher_forced(rival, tokens)
        exact = teacher_forced(rival.float(), tokens)  # the same rounded weights, so that only arithmetic differs
        ours += float((feeder.logits(seq) - exact).square().mean())
        theirs += float((their_logits - exact).square().mean())
    ratio = (ours / theirs) ** 0.5
    print(f"{shape}, chunk {chunk}: RMS error is {ratio:.2f} of Transformers'")
    assert theirs > 0
    assert ratio <= BF16, f"RMS error of bf16 logits is {ratio:.2f} times Transformers' own"


# Texts


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    pair = make_hybrid_pair(tmp_path_factory.mktemp("lucky"), **LUCKY)
    return Subject("hybrid", pair.target, pair.draft, random_prompts(pair.vocab_size, PROMPTS), load_transformers)


@pytest.fixture(scope="module")
def near_ties() -> Iterator[list[Comparison]]:
    comparisons: list[Comparison] = []
    yield comparisons
    total = sum(comparisons, Comparison(0))
    assert len(total.differences) <= cap(total.tokens), f"{len(total.differences)} near ties in {total.tokens} tokens"


def test_plain_decoding_is_transformers_own(subject: Subject, near_ties: list[Comparison]):
    comparison = subject.compare(list(subject.plain(Case())), Case())
    assert_lossless(comparison)
    near_ties.append(comparison)


CASES = covering_cases(2, path=("eager", "graphs", "overlap"), page_size=(1, 4, 16))


@pytest.mark.parametrize("case", CASES, ids=str)
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


@pytest.mark.parametrize("cut", range(16))
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
