"""--batch-invariant, end to end in bfloat16: plain == DFlash == any batch, token for token and without any margin.

Each text is compared with that of its prompt decoded plainly and alone. By PyTorch's operators some text differs,
because products and attention of other shapes round otherwise.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.costs import landing_ones
from tests.fast.engine.lossless import Case, Subject, demo_subject, random_prompts
from tests.fast.engine.pairs import make_pair

PROMPTS = 10
CASES = [
    Case(concurrency=1),
    Case(concurrency=16, page_size=128),
    Case(concurrency=16, speculation="off", chunked=True),
    Case(concurrency=4, block_size=4, page_size=4, chunked=True, speculation="half"),
    Case(concurrency=4, page_size=4, preempted=True),
    Case(concurrency=4, page_size=4, cached=True, block_size=8),
    Case(concurrency=4, path="graphs"),
    Case(concurrency=4, temperature=None, sampling="all", chunked=True),
    Case(concurrency=4, temperature=None, sampling="all", path="graphs", block_size=8),
]


def subjects(folder: Path, **wishes: Any) -> Iterator[Subject]:
    """A random pair whose drafts hardly ever hit, and the demo pair, whose drafts do."""
    pair = make_pair(folder / "pair", seed=1, block_size=16)
    yield Subject("random", pair.target, pair.draft, random_prompts(pair.vocab_size, PROMPTS), wishes=wishes)
    demo = demo_subject(PROMPTS, max_tokens=32)
    demo.wishes = wishes
    yield demo


def alone(subject: Subject, case: Case) -> list[list[int]]:
    """Texts of plain decoding, one request at a time, as `case` samples."""
    asked = Case(speculation="off", temperature=case.temperature, sampling=case.sampling)
    key = case.temperature or 0.0, case.sampling
    if key not in subject.plain_texts:
        subject.plain_texts[key] = subject.run(asked).texts
    return subject.plain_texts[key]


def expected(subject: Subject, case: Case) -> list[list[int]]:
    """Return the texts of `alone`, each as often as `case` asks."""
    return [text for text in alone(subject, case) for _ in range(1 + case.cached)]


@pytest.fixture(scope="module", params=landing_ones([0, 1], (1,)), ids=["random", "demo"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    wishes = {"dtype": "bfloat16", "batch_invariant": True}
    return list(subjects(tmp_path_factory.mktemp("pairs"), **wishes))[request.param]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_token_depends_on_drafts_or_on_the_batch(subject: Subject, case: Case) -> None:
    run = subject.run(case)
    assert run.texts == expected(subject, case)
    assert (run.preemptions > 0) == case.preempted
    assert (run.cached_tokens > 0) == case.cached
    if subject.name == "demo" and case.speculation == "on" and case.temperature == 0:
        assert run.acceptance_length > 1.5
