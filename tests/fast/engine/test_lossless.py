"""DFlash on == off == Transformers, token for token, with each value of each setting; and the comparison can fail.

tests/exhaustive/test_lossless.py goes through every pair of settings, on three pairs of models, with Transformers live.
Its texts of these prompts are in tests/golden. `python -m tests.proof` runs the most.
"""

import pytest
import torch

from app.engine.load.engine import Engine
from app.engine.sampling.sampler import Sampler
from tests.fast.engine import lossless
from tests.fast.engine.lossless import (
    LUCKY_PROMPTS,
    MARGIN,
    PLAIN_CASES,
    TEMPERATURES,
    Case,
    Comparison,
    Difference,
    Subject,
    assert_lossless,
    cap,
    covering_cases,
    lucky_subject,
    near_ties_capped,
)
from tests.golden.transformers import golden

CASES = [case for seed in (1, 2) for case in covering_cases(1, seed)]
CASES += [Case(concurrency=4, temperature=None, speculation="capped")]
"""The last has a whole block, so that its caps on drafts hold something back."""


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return lucky_subject(tmp_path_factory.mktemp("lucky"))


near_ties = pytest.fixture(scope="module")(near_ties_capped)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_plain_decoding_is_transformers_own(lucky: Subject, near_ties: list[Comparison], case: Case):
    comparison = lucky.compare(golden().texts(lucky, case), case)
    assert_lossless(comparison)
    near_ties.append(comparison)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dflash_changes_no_token(lucky: Subject, near_ties: list[Comparison], case: Case):
    run = lucky.run(case)
    comparison = lucky.compare(run.texts, case)
    assert_lossless(comparison)
    near_ties.append(comparison)
    assert comparison.tokens > 10 * LUCKY_PROMPTS
    assert (run.preemptions > 0) == case.preempted
    assert (run.verify_steps > 0) == (case.speculation != "off")
    assert (run.cached_tokens > 0) == case.cached


# The comparison


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_replaced_token_is_a_difference_above_the_margin(lucky: Subject, temperature: float):
    texts = [list(text) for text in lucky.off(temperature)]
    vocab = lucky.reference.config.vocab_size
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    texts[longest][9] = (texts[longest][9] + 1) % vocab
    [difference] = lucky.compare(texts, Case(temperature=temperature)).wrong
    assert (difference.prompt, difference.index) == (longest, 9) and difference.margin > MARGIN


@pytest.mark.parametrize(("margin", "forgiven"), [(0.9 * MARGIN, True), (1.1 * MARGIN, False), (float("nan"), False)])
def test_a_true_near_tie_alone_is_forgiven_and_all_are_capped(margin: float, forgiven: bool):
    assert (not Comparison(1, (Difference(0, 0, 0.0, margin),)).wrong) == forgiven
    assert [cap(tokens) for tokens in (0, 1, 50_000, 50_001, 560_000)] == [0, 1, 1, 2, 12]


def accept_one_draft_too_many(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine.core
    launch = core.launch

    def generous(batch):
        pending = launch(batch)
        result = pending.read()
        drafted = [rows.num_drafts for rows in batch.sampling]
        result.num_accepted = [min(n + 1, d) for n, d in zip(result.num_accepted, drafted, strict=True)]
        pending.read = lambda: result
        return pending

    monkeypatch.setattr(core, "launch", generous)


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
