"""DFlash on == off == Transformers, token for token, under every pair of settings; and the comparison itself can fail.

`make test` runs 16 prompts over a seeded pairwise selection of the settings, half of it on the demo pair and half on a
random one whose drafts are accepted now and then; what is marked `slow`, the other halves, all of it on one whose
drafts hardly ever are, what is compiled of all three, and 200 prompts over another selection and other pairs.
`python -m tests.proof` runs the most. What is compiled has a selection of its own in test_compiled.py.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.engine.build.engine import Engine
from app.engine.core import Step
from app.engine.sampling.sampler import Sampler
from tests.fast.engine import lossless
from tests.fast.engine.lossless import (
    MARGIN,
    SAMPLINGS,
    SETTINGS,
    TEMPERATURES,
    Case,
    Comparison,
    Difference,
    Subject,
    cap,
    combinations_in,
    covering_cases,
    demo_subject,
    random_prompts,
    random_subjects,
)
from tests.fast.engine.pairs import make_pair

PROMPTS, SLOW_PROMPTS = 16, 200
PLAIN_CASES = [Case(temperature=temperature) for temperature in TEMPERATURES]
PLAIN_CASES += [Case(temperature=None, sampling=sampling) for sampling in SAMPLINGS[1:]]
SUBJECTS = ("random-lucky", "demo", "random")
MORE_SHAPES: dict[str, dict] = {
    "gqa 4:1, wide heads": {"seed": 2, "num_kv_heads": 1, "head_dim": 24, "vocab_size": 12},
    "mha, all of its own": {"seed": 3, "num_kv_heads": 4, "own_embedding": True, "own_head": True, "vocab_size": 4},
    "tied, one tap, three draft layers": {"seed": 4, "tied": True, "taps": (2,), "draft_layers": 3, "vocab_size": 6},
}
pytestmark = pytest.mark.usefixtures("kept")


def on_subjects(cases: list[Case]) -> pytest.MarkDecorator:
    """All cases on all subjects, of which every second one on each of the first two is not slow."""

    def marks(case: Case, turn: int) -> list[pytest.MarkDecorator]:
        if case.path == "compiled":
            return [pytest.mark.slow]
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
        return demo_subject(prompts, max_tokens=24)
    return next(subject for subject in random_subjects(folder, prompts) if subject.name == name)


@pytest.fixture(scope="module")
def near_ties(subject: Subject) -> Iterator[list[Comparison]]:
    """What the cases of a subject found. Near ties are capped over all of them, once the last has run."""
    comparisons: list[Comparison] = []
    yield comparisons
    total = sum(comparisons, Comparison(0))
    assert len(total.differences) <= cap(total.tokens), f"{len(total.differences)} near ties in {total.tokens} tokens"


def assert_lossless(comparison: Comparison) -> None:
    for difference in comparison.differences:
        print(difference)
    assert not comparison.wrong, f"first of {len(comparison.wrong)}: {comparison.wrong[0]}"


@on_subjects(PLAIN_CASES)
def test_plain_decoding_is_transformers_own(subject: Subject, near_ties: list[Comparison], case: Case):
    """With filters and penalties that are counted anew for every token."""
    comparison = subject.compare(list(subject.transformers(case)), case)
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


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_stop_token_ends_the_text_wherever_it_lies_in_an_accepted_block(tmp_path: Path, temperature: float):
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

    def note(step: Step) -> None:
        nonlocal cut_inside
        cut_inside += sum(d.finish_reason == "stop" and len(d.token_ids) <= d.num_accepted for d in step.deltas)

    run = lossless.run_engine(lucky.engine(Case(concurrency=16)), requests, note)
    assert dict(zip(wanted, run.texts, strict=True)) == wanted
    assert cut_inside >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_dflash_changes_no_token_on_pairs_of_other_shapes(tmp_path: Path, shape: str):
    pair = make_pair(tmp_path, block_size=16, **MORE_SHAPES[shape])
    subject = Subject(shape, pair.target, pair.draft, random_prompts(pair.vocab_size, SLOW_PROMPTS, seed=1))
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


def test_cases_are_the_same_for_the_same_seed():
    assert covering_cases(2, seed=5) == covering_cases(2, seed=5) != covering_cases(2, seed=6)


# The comparison


@pytest.mark.parametrize(("tokens", "allowed"), [(0, 0), (1, 1), (50_000, 1), (50_001, 2), (560_000, 12)])
def test_near_ties_are_capped_at_one_per_50k_tokens_begun(tokens: int, allowed: int):
    assert cap(tokens) == allowed


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("random-lucky", 6, tmp_path_factory.mktemp("lucky"))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_replaced_token_is_a_difference_above_the_margin(lucky: Subject, temperature: float):
    texts = [list(text) for text in lucky.off(temperature)]
    vocab = lucky.reference.config.vocab_size
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    texts[longest][9] = (texts[longest][9] + 1) % vocab
    [difference] = lucky.compare(texts, Case(temperature=temperature)).wrong
    assert (difference.prompt, difference.index) == (longest, 9) and difference.margin > MARGIN


@pytest.mark.parametrize("damage", [lambda text: text[:-1], lambda text: [*text, 1]])
def test_a_text_of_another_length_is_no_near_tie(lucky: Subject, damage: Callable[[list[int]], list[int]]):
    texts = [list(text) for text in lucky.off(0.0)]
    texts[0] = damage(texts[0])
    [difference] = lucky.compare(texts, Case()).wrong
    assert difference.margin == float("inf")


def test_a_true_near_tie_is_counted_and_forgiven(lucky: Subject, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lossless, "margin", lambda *_: 0.9 * MARGIN)
    texts = [list(text) for text in lucky.off(0.0)]
    texts[0][3] += 1
    comparison = lucky.compare(texts, Case())
    assert len(comparison.differences) == 1 and comparison.wrong == []


def test_a_margin_that_is_no_number_is_not_forgiven():
    assert Comparison(1, (Difference(0, 0, 0.0, float("nan")),)).wrong


def accept_one_draft_too_many(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.core.runner
    launch = runner.launch

    def generous(batch):
        pending = launch(batch)
        result = pending.read()
        drafted = [rows.num_drafts for rows in batch.sampling]
        result.num_accepted = [min(n + 1, d) for n, d in zip(result.num_accepted, drafted, strict=True)]
        pending.read = lambda: result
        return pending

    monkeypatch.setattr(runner, "launch", generous)


def mix_up_pages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = engine.core.scheduler
    commit = scheduler.commit

    def careless(batch, result):
        for rows in batch.prefills:
            if len(rows.seq.pages) > 1:
                rows.seq.pages[0], rows.seq.pages[1] = rows.seq.pages[1], rows.seq.pages[0]
        return commit(batch, result)

    monkeypatch.setattr(scheduler, "commit", careless)


def draw_by_place_in_the_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Sampler.choose

    def unseeded(self, hidden, lm_head, *draws):
        choices = choose(self, hidden, lm_head, *draws)
        return choices if not any(draws) else (choices + torch.arange(len(choices)) % 2) % lm_head.shape[0]

    monkeypatch.setattr(Sampler, "choose", unseeded)


@pytest.mark.parametrize(
    ("fault", "temperature"),
    [(accept_one_draft_too_many, 0.0), (mix_up_pages, 0.0), (draw_by_place_in_the_batch, 1.0)],
)
def test_a_faulty_engine_is_found_out(lucky: Subject, monkeypatch: pytest.MonkeyPatch, fault, temperature: float):
    case = Case(concurrency=4, temperature=temperature)
    assert not lucky.compare(lucky.run(case).texts, case).differences
    engine = lucky.engine(case)
    fault(engine, monkeypatch)
    texts = lossless.run_engine(engine, lucky.requests(case)).texts
    assert lucky.compare(texts, case).wrong
