"""The demo answers what people type first: 200 questions that were written apart from its training."""

import json
from pathlib import Path

from tests.exhaustive.demo_answers import answer_ids, ask, final_number, tokenizer

QUESTIONS = json.loads(Path(__file__).with_name("first_questions.json").read_text("utf-8"))
LONG = 300


def test_few_answers_are_long_and_most_sums_are_right() -> None:
    answers = answer_ids([ask(question["question"]) for question in QUESTIONS], 2 * LONG, max_model_len=1024)
    asked = [
        (question["answer"], ids) for question, ids in zip(QUESTIONS, answers, strict=True) if "answer" in question
    ]
    right = sum(final_number(tokenizer().decode(ids)) == answer for answer, ids in asked)
    long = sum(len(ids) > LONG for ids in answers)
    print(f"{right} of {len(asked)} sums are right, and {long} of {len(answers)} answers have more than {LONG} tokens")
    assert len(asked) == 70 and len({question["question"] for question in QUESTIONS}) == 200
    assert right >= 0.8 * len(asked)
    assert long <= 2
