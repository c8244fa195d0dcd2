"""The demo answers what people type first: 200 questions that were written apart from its training."""

import json
from pathlib import Path

from app.messages import Request
from app.text.tokenizer import Tokenizer
from tests.exhaustive.acceptance import engine
from tests.fast.engine.lossless import demo_folder, run_engine
from tools.demo_pair.corpus.math import final_number
from tools.demo_pair.corpus.sample import ask

QUESTIONS = json.loads(Path(__file__).with_name("first_questions.json").read_text("utf-8"))
LONG = 300


def test_few_answers_are_long_and_most_sums_are_right() -> None:
    tokenizer = Tokenizer(demo_folder("target"))
    texts = [tokenizer.chat_template.render(ask(question["question"])) for question in QUESTIONS]
    requests = [
        Request(
            str(i), tuple(tokenizer.encode(text, add_special_tokens=False)), 2 * LONG, stop_token_ids=frozenset([2])
        )
        for i, text in enumerate(texts)
    ]
    answers = run_engine(engine(max_model_len=1024), requests).texts
    asked = [
        (question["answer"], ids) for question, ids in zip(QUESTIONS, answers, strict=True) if "answer" in question
    ]
    right = sum(final_number(tokenizer.decode(ids)) == answer for answer, ids in asked)
    long = sum(len(ids) > LONG for ids in answers)
    print(f"{right} of {len(asked)} sums are right, and {long} of {len(answers)} answers have more than {LONG} tokens")
    assert len(asked) == 70 and len(answers) == 200
    assert right >= 0.8 * len(asked)
    assert long <= 2
