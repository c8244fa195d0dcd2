"""The real pair answers natural questions: its drafts are accepted, and change no text."""

from dataclasses import replace
from functools import cache

import pytest

from tests.costs import landing_ones
from tests.exhaustive.smollm2 import DRAFTED, FEW, FLOOR, QUESTIONS, check_installed, subject
from tests.fast.engine.lossless import Run, Subject, assert_lossless, cap

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(scope="module")
def installed() -> None:
    check_installed()


@cache
def asked(every: bool) -> Subject:
    return subject(QUESTIONS if every else FEW)


@cache
def drafted(every: bool) -> Run:
    return asked(every).run(DRAFTED)


how_many = pytest.mark.parametrize("every", landing_ones([False, True], (False,)), ids=["12", "48"])


def test_questions_are_48_of_all_kinds() -> None:
    assert len({question["id"] for question in QUESTIONS}) == 48 and len(FEW) == 12
    chats = [question["messages"] for question in QUESTIONS]
    assert all(chat[-1]["role"] == "user" for chat in chats)
    assert sum(chat[0]["role"] == "system" for chat in chats) >= 5
    assert sum(len(chat) >= 3 and chat[-2]["role"] == "assistant" for chat in chats) >= 4


@how_many
def test_drafts_are_accepted_above_the_floor(every: bool) -> None:
    run = drafted(every)
    print(f"acceptance length {run.acceptance_length:.2f} over {run.verify_steps} steps")
    assert run.acceptance_length >= FLOOR[len(run.texts)]


@how_many
def test_a_draft_in_int8_changes_no_token_and_is_accepted_as_well(every: bool) -> None:
    rounded = subject(QUESTIONS if every else FEW, draft_quantization="int8")
    run, wanted = rounded.run(DRAFTED), drafted(every).acceptance_length
    print(f"acceptance length {run.acceptance_length:.2f}, without {wanted:.2f}")
    assert_lossless(rounded.compare(run.texts, DRAFTED))
    assert run.acceptance_length >= 0.98 * wanted


@how_many
def test_dflash_changes_no_token_in_float32(every: bool) -> None:
    comparison = asked(every).compare(drafted(every).texts, DRAFTED)
    assert_lossless(comparison)
    assert len(comparison.differences) <= cap(comparison.tokens)


@how_many
def test_dflash_changes_no_token_in_batch_invariant_bfloat16(every: bool) -> None:
    invariant = subject(QUESTIONS if every else FEW, dtype="bfloat16", batch_invariant=True)
    run = invariant.run(DRAFTED)
    print(f"acceptance length {run.acceptance_length:.2f} over {run.verify_steps} steps")
    assert run.texts == invariant.off(0.0)
    assert run.acceptance_length >= 2.2


@pytest.mark.slow
def test_drafted_texts_are_the_references_own() -> None:
    """Which also shows that the reference, which judges margins, is of the same weights."""
    few = subject(FEW[:4], max_tokens=48)
    assert few.run(DRAFTED).texts == list(few.plain(DRAFTED))


@pytest.mark.slow
def test_dflash_changes_no_sampled_token() -> None:
    sampled = replace(DRAFTED, temperature=None)
    every = subject(QUESTIONS, max_tokens=64)
    assert_lossless(every.compare(every.run(sampled).texts, sampled))
