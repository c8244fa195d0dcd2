"""DFlash on == off == Transformers, token for token, under every pair of settings.

`make test-rest` runs 16 prompts over a seeded pairwise selection of the settings. Half of the cases use the demo pair,
and half a random pair whose drafts are accepted now and then. Tests marked `slow` run the other halves, and all cases
on a pair whose drafts are hardly ever accepted. They also run 100 prompts over another
selection and other pairs. `python -m tests.proof` runs the most prompts.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.messages import StepOutput
from tests.exhaustive.live import load_transformers
from tests.fast.engine import lossless
from tests.fast.engine.lossless import (
    PLAIN_CASES,
    SETTINGS,
    TEMPERATURES,
    Case,
    Comparison,
    Subject,
    assert_lossless,
    cap,
    combinations_in,
    covering_cases,
    demo_subject,
    near_ties_capped,
    random_prompts,
    random_subjects,
)
from tests.fast.engine.pairs import make_pair

PROMPTS, SLOW_PROMPTS = 16, 100
SUBJECTS = ("random-lucky", "demo", "random")
MORE_SHAPES: dict[str, dict] = {
    "gqa 4:1, wide heads": {"seed": 2, "num_kv_heads": 1, "head_dim": 24, "vocab_size": 12},
    "mha, all of its own": {"seed": 3, "num_kv_heads": 4, "own_embedding": True, "own_head": True, "vocab_size": 4},
    "tied, one tap, three draft layers": {"seed": 4, "tied": True, "taps": (2,), "draft_layers": 3, "vocab_size": 6},
}


def on_subjects(cases: list[Case]) -> pytest.MarkDecorator:
    """All cases on all subjects, of which every second one on each of the first two is not slow."""

    def marks(case: Case, turn: int) -> list[pytest.MarkDecorator]:
        return [] if turn == 0 else [pytest.mark.slow]

    every = [
        pytest.param(name, case, marks=marks(case, (i + number) % 2 if number < 2 else 1))
        for number, name in enumerate(SUBJECTS)
        for i, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(("subject", "case"), every, indirect=["subject"], ids=str, scope="module")


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, PROMPTS, tmp_path_factory.mktemp("pairs"))


def make_subject(name: str, prompts: int, folder: Path) -> Subject:
    if name == "demo":
        return demo_subject(prompts, max_tokens=32, load=load_transformers)
    return next(s for s in random_subjects(folder, prompts, load_transformers) if s.name == name)


@pytest.fixture(scope="module")
def near_ties(subject: Subject) -> Iterator[list[Comparison]]:
    """Results of a subject's cases."""
    yield from near_ties_capped()


@on_subjects(PLAIN_CASES)
def test_plain_decoding_is_transformers_own(subject: Subject, near_ties: list[Comparison], case: Case):
    comparison = subject.compare(list(subject.plain(case)), case)
    assert_lossless(comparison)
    near_ties.append(comparison)


@on_subjects(covering_cases(strength=2))
def test_dflash_changes_no_token(subject: Subject, near_ties: list[Comparison], case: Case):
    run = subject.run(case)
    comparison = subject.compare(run.texts, case)
    print(f"acceptance length {run.acceptance_length:.2f}, {run.preemptions} preemptions")
    assert_lossless(comparison)
    near_ties.append(comparison)
    assert comparison.tokens > 10 * len(subject.prompts)
    assert (run.preemptions > 0) == case.preempted
    assert (run.verify_steps > 0) == (case.speculation != "off")
    assert (run.cached_tokens > 0) == case.cached


@pytest.mark.parametrize(("path", "temperature"), [*(("eager", t) for t in TEMPERATURES), ("overlap", 0.0)])
def test_a_stop_token_ends_the_text_wherever_it_lies_in_an_accepted_block(
    tmp_path: Path, path: str, temperature: float
):
    lucky = make_subject("random-lucky", 24, tmp_path)
    lucky.prompts = [replace(prompt, stop_token_ids=frozenset()) for prompt in lucky.prompts]
    vocab, unstopped = lucky.reference.config.vocab_size, lucky.off(temperature)
    requests, wanted = [], {}
    for request, text in zip(lucky.requests(Case(temperature=temperature)), unstopped, strict=True):
        for stop in range(vocab):
            stopped = replace(request, request_id=f"{request.request_id} {stop}", stop_token_ids=frozenset([stop]))
            requests.append(stopped)
            wanted[stopped.request_id] = text[: text.index(stop) + 1] if stop in text else text
    cut_inside = 0

    def note(step: StepOutput) -> None:
        nonlocal cut_inside
        cut_inside += sum(d.finish_reason == "stop" and len(d.token_ids) <= d.steps[0].n_accepted for d in step.deltas)

    run = lossless.run_engine(lucky.engine(Case(concurrency=16, path=path)), requests, note)
    assert dict(zip(wanted, run.texts, strict=True)) == wanted
    assert cut_inside >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_dflash_changes_no_token_on_pairs_of_other_shapes(tmp_path: Path, shape: str):
    pair = make_pair(tmp_path, block_size=16, **MORE_SHAPES[shape])
    subject = Subject(
        shape, pair.target, pair.draft, random_prompts(pair.vocab_size, SLOW_PROMPTS, seed=1), load_transformers
    )
    total = Comparison(0)
    for case in covering_cases(strength=2, seed=1):
        run = subject.run(case)
        total += subject.compare(run.texts, case)
        assert (run.preemptions > 0) == case.preempted
    assert_lossless(total)
    assert len(total.differences) <= cap(total.tokens)


# The selection of cases


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_cases_cover_every_possible_combination(strength: int):
    seen = {combination for case in covering_cases(strength) for combination in combinations_in(case, strength)}
    every = (Case(*values) for values in itertools.product(*SETTINGS.values()))
    assert seen == {combination for case in every if case.possible for combination in combinations_in(case, strength)}
