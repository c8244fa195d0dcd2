"""The demo corpus: the same for the same seed, held-out templates truly held out, and answers judged strictly."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.demo_pair.corpus import DOMAINS, FIRST, TOOLS, Sample, drawn, is_right, samples
from tools.demo_pair.corpus.lexicon import _COPIED

ALL = (*DOMAINS, FIRST, TOOLS)
QUESTIONS = Path(__file__).parents[2] / "exhaustive" / "first_questions.json"


def take(domain: str, split: str, seed: int, count: int) -> list[Sample]:
    return list(itertools.islice(samples(domain, split, seed), count))  # type: ignore[arg-type]


@pytest.mark.parametrize("domain", ALL)
def test_a_seed_gives_the_same_samples_and_another_seed_others(domain: str) -> None:
    assert take(domain, "train", 7, 50) == take(domain, "train", 7, 50)
    assert take(domain, "train", 7, 50) != take(domain, "train", 8, 50)


def test_samples_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = (
        "import itertools, tools.demo_pair.corpus as c; "
        "print([list(itertools.islice(c.samples(d, 'heldout', 3), 5)) for d in (*c.DOMAINS, c.FIRST, c.TOOLS)])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


@pytest.mark.parametrize("domain", ALL)
def test_no_heldout_template_is_ever_used_in_training(domain: str) -> None:
    train = {d.template for d in itertools.islice(drawn(domain, "train", 0), 1500)}
    heldout = {d.template for d in itertools.islice(drawn(domain, "heldout", 0), 500)}
    assert len(heldout) >= 15
    assert not train & heldout


@pytest.mark.exhaustive
def test_the_first_questions_were_written_apart_from_the_training() -> None:
    """Greetings and a few small sums are the same, because there are not many of them."""
    questions = [question["question"] for question in json.loads(QUESTIONS.read_text("utf-8"))]
    trained = {sample.messages[-1]["content"] for domain in ALL for sample in take(domain, "train", 0, 5000)}
    assert len(questions) == len(set(questions)) == 200
    assert sum(question in trained for question in questions) <= 16


def test_heldout_echo_words_are_never_echoed_in_training() -> None:
    assert len(_COPIED["heldout"]) > 30
    assert not set(_COPIED["train"]) & set(_COPIED["heldout"])


@pytest.mark.parametrize("domain", (*DOMAINS, FIRST))
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_conversation_ends_with_the_user_and_its_answer_is_right(domain: str, split: str) -> None:
    for sample in take(domain, split, 1, 300):
        roles = [message["role"] for message in sample.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message["content"].strip() for message in sample.messages)
        assert sample.answer == sample.answer.strip() != ""
        assert "{" not in sample.answer or domain in ("copy", "jumble")
        assert is_right(sample, sample.answer)


def test_wrong_math_is_caught_however_it_is_written() -> None:
    sample = Sample("math", [{"role": "user", "content": "What is 40 + 2?"}], "40 + 2 = 42\n#### 42")
    assert is_right(sample, "It is 42.")
    assert is_right(sample, "40 + 2 = 42. The answer is 42.")
    assert not is_right(sample, "40 + 2 = 43\n#### 43")
    assert not is_right(sample, "42 is not the answer, 41 is")
    assert not is_right(sample, "I do not know.")
    assert not is_right(sample, "")


def test_a_copy_must_be_exact_but_for_the_space_around_it() -> None:
    sample = Sample("copy", [{"role": "user", "content": "Repeat this: red kite"}], "red kite")
    assert is_right(sample, " red kite\n")
    assert not is_right(sample, "red  kite")
    assert not is_right(sample, "Red kite")
    assert not is_right(sample, "red kite red kite")


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("domain", ["math", FIRST])
def test_every_worked_step_of_the_math_answers_holds(domain: str, split: str) -> None:
    for sample in take(domain, split, 2, 2000):
        for a, sign, b, result in re.findall(r"(\d+) ([+*/-]) (\d+) = (-?\d+)", sample.answer):
            wanted = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / max(1, int(b))}[
                sign
            ]
            assert int(result) == wanted, sample
        assert all(int(n) < 1000 for n in re.findall(r"\d+", sample.answer))
