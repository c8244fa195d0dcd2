"""Every family of targets writes what Transformers writes for it, with DFlash and without, for 50 prompts."""

from pathlib import Path

import pytest
import torch

from tests.exhaustive.live import load_transformers
from tests.fast.engine.lossless import LUCKY, Case, Comparison, Subject, assert_lossless, cap, random_prompts
from tests.fast.engine.pairs import FAMILIES, make_pair

torch.set_num_threads(1)
CASES = [
    Case(concurrency=4, page_size=4, chunked=True),
    Case(concurrency=4, page_size=16, preempted=True, block_size=8),
    Case(concurrency=16, page_size=4, path="graphs", temperature=None, cached=True),
]


@pytest.mark.parametrize("shape", FAMILIES)
def test_text_with_dflash_is_text_without_is_transformers(tmp_path: Path, shape: str) -> None:
    pair = make_pair(tmp_path, **LUCKY | FAMILIES[shape])
    subject = Subject(shape, pair.target, pair.draft, random_prompts(pair.vocab_size, 50), load_transformers)
    total = subject.compare(list(subject.plain(Case())), Case())
    verified = emitted = 0
    for case in CASES:
        run = subject.run(case)
        total += subject.compare(run.texts, case)
        verified, emitted = verified + run.verify_steps, emitted + run.verify_tokens
    assert_lossless(total)
    assert len(total.differences) <= cap(total.tokens)
    print(f"{total.tokens} tokens, acceptance length {emitted / verified:.2f}")
    assert total.tokens > 50 * 4 * 4 and emitted > verified


def test_a_family_read_as_another_is_caught(tmp_path: Path) -> None:
    """The comparison has teeth: Llama's scaled RoPE left out changes the text."""
    pair = make_pair(tmp_path, **LUCKY | FAMILIES["Llama 3.1"])
    subject = Subject("Llama", pair.target, pair.draft, random_prompts(pair.vocab_size, 10), load_transformers)
    texts = list(subject.plain(Case()))
    config = pair.target / "config.json"
    config.write_text(config.read_text().replace('"factor": 8.0', '"factor": 1.0'))
    assert subject.compare(texts, Case()) != Comparison(subject.compare(texts, Case()).tokens)
