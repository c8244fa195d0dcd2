"""Transformers still says what tests/golden holds, and the reference's own target says what Transformers says."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from app import demo
from tests.exhaustive.golden import made
from tests.exhaustive.live import load_transformers
from tests.fast.engine.feeder import SHAPES, random_checkpoint
from tests.fast.engine.lossless import PLAIN_CASES, demo_folder, demo_prompts, lucky_subject
from tests.fast.engine.reference import features, load_target, teacher_forced
from tests.golden.transformers import golden

ROUNDING = 2e-5
"""Largest difference, as a share of the largest value."""


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= ROUNDING * wanted.abs().max()


def test_what_is_committed_is_what_transformers_says(tmp_path: Path) -> None:
    live, committed = made(tmp_path), golden()
    assert live.weights == committed.weights and live.lossless == committed.lossless
    assert live.rows.keys() == committed.rows.keys() == SHAPES.keys()
    for name, kind in itertools.product(SHAPES, ("logits", "features")):
        assert_close(torch.tensor(live.rows[name][kind]), torch.tensor(committed.rows[name][kind]))


@pytest.mark.parametrize("name", [*SHAPES, "demo"])
def test_the_references_target_is_transformers(name: str, tmp_path: Path) -> None:
    folder = demo_folder("target") if name == "demo" else random_checkpoint(tmp_path, **SHAPES[name]).folder
    ours, theirs = load_target(folder), load_transformers(folder)
    assert torch.equal(ours.get_input_embeddings().weight, theirs.get_input_embeddings().weight)
    assert torch.equal(ours.get_output_embeddings().weight, theirs.get_output_embeddings().weight)
    rng = random.Random(0)
    text = [rng.randrange(theirs.config.vocab_size) for _ in range(60)]
    assert_close(teacher_forced(ours, text), teacher_forced(theirs, text))
    taps = range(theirs.config.num_hidden_layers - 1)
    assert_close(features(ours, text, taps), features(theirs, text, taps))
    our_cache, their_cache = None, DynamicCache(config=theirs.config)
    for rows in (text[:7], *([token] for token in text[7:20])):
        out = ours(torch.tensor([rows]), cache=our_cache)
        our_cache = out.cache
        with torch.no_grad():
            wanted = theirs(torch.tensor([rows]), cache=their_cache, use_cache=True)
        assert_close(out.logits, wanted.logits)


def test_it_is_in_bf16_too(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, dtype=torch.bfloat16).folder
    ours, theirs = (load(folder, torch.bfloat16) for load in (load_target, load_transformers))
    text = [*range(40)]
    found, wanted = features(ours, text, (0, 1)), features(theirs, text, (0, 1))
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert (found.float() - wanted.float()).abs().max() <= 0.02 * wanted.float().abs().max()


def test_its_texts_are_transformers(tmp_path: Path) -> None:
    subject = lucky_subject(tmp_path)
    for case in PLAIN_CASES:
        assert list(subject.plain(case)) == golden().texts(subject, case)


@pytest.mark.parametrize("domain", demo.held_out())
def test_prompts_of_the_demo_pair_are_those_of_its_tokenizer_in_transformers(domain: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder("target"), local_files_only=True)
    for asked, prompt in zip(demo.held_out()[domain], demo_prompts(domain, 20, 8), strict=False):
        text = tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
        assert list(prompt.token_ids) == tokenizer.encode(text, add_special_tokens=False)
        assert prompt.stop_token_ids == {tokenizer.eos_token_id}
