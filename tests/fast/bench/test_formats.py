"""Published evaluations are recognised by their fields and asked as published."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.config.error import ConfigError
from tools.bench.formats import BOXED, HUMAN_EVAL, IN_A_BLOCK, LETTER, prompts_of
from tools.bench.formats import MBPP as TASK
from tools.bench.prompts import from_file

GSM8K = {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
MATH = {"problem": "What is $1/2$?", "solution": r"$\boxed{\frac12}$.", "answer": r"\frac{1}{2}", "level": 1}
MMLU = {"question": "Which is red?", "subject": "art", "choices": ["grass", "blood"], "answer": 1}
MMLU_COLUMNS = {"question": "Which is red?", "A": "grass", "B": "blood", "C": "sky", "D": "snow", "answer": "B"}
FUNCTION = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Return the sum."""\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
}
MBPP = {"task_id": 1, "text": "Write double.", "code": "...", "test_list": ["assert double(2) == 4"]}
SANITISED = {"prompt": "Write root.", "test_imports": ["import math"], "test_list": ["assert root(4) == math.sqrt(4)"]}
ALPACA = {"instruction": "Translate.", "input": "hello", "output": "hallo"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorten it."]}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        (GSM8K, f"What is 2 + 3?\n{BOXED}"),
        (MATH, f"What is $1/2$?\n{BOXED}"),
        (MMLU, f"Which is red?\nA. grass\nB. blood\n{LETTER}"),
        (MMLU_COLUMNS, f"Which is red?\nA. grass\nB. blood\nC. sky\nD. snow\n{LETTER}"),
        (FUNCTION, f"{HUMAN_EVAL}\n```python\n{FUNCTION['prompt']}\n```\n{IN_A_BLOCK}"),
        (MBPP, f"{TASK} Write double. Your code should pass these tests:\n\nassert double(2) == 4\n{IN_A_BLOCK}"),
        (
            SANITISED,
            f"{TASK} Write root. Your code should pass these tests:\n\nassert root(4) == math.sqrt(4)\n{IN_A_BLOCK}",
        ),
        (ALPACA, "Translate.\n\nInput:\nhello"),
        (ALPACA | {"input": ""}, "Translate."),
    ],
)
def test_questions_have_their_instruction(fields: dict[str, Any], content: str) -> None:
    (prompt,) = prompts_of(fields)
    assert prompt.body == {"messages": [{"role": "user", "content": content}]} and not prompt.follows


def test_mt_benchs_second_turn_follows_its_first() -> None:
    first, second = prompts_of(MT_BENCH)
    assert (first.follows, second.follows) == (False, True)
    assert second.body == {"messages": [{"role": "user", "content": "Shorten it."}]}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (MMLU | {"choices": ["x"] * 11}, "it has 11 choices, at most 10 have letters"),
        (MBPP | {"test_list": "assert"}, "test_list is 'assert', not a list of texts"),
        (MATH | {"problem": 5}, "problem is 5, not a text"),
        (MT_BENCH | {"turns": []}, "turns is empty"),
        ({"query": "x", "response": "y"}, "its fields (query, response) are of no known format"),
    ],
)
def test_an_entry_that_cannot_be_asked_is_explained(tmp_path: Path, fields: Any, complaint: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([ALPACA, fields], indent=1))
    with pytest.raises(ConfigError) as caught:
        from_file(path)
    assert str(caught.value) == f"{path}, entry 2: {complaint}"
    for name in ("GSM8K", "MATH-500", "HumanEval", "MBPP", "MMLU", "Alpaca", "MT-Bench"):
        assert name in caught.value.hint


def test_lists_and_lines_are_the_same_prompts(tmp_path: Path) -> None:
    entries = [ALPACA | {"output": "a\u2028b"}, MT_BENCH]
    as_list, as_lines = tmp_path / "x.json", tmp_path / "x.jsonl"
    as_list.write_text(json.dumps(entries, indent=1))
    as_lines.write_text("\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries))
    (listed,), (lined,) = from_file(as_list), from_file(as_lines)
    assert listed.first(4) == lined.first(4)
    as_list.write_text("[{]")
    with pytest.raises(ConfigError, match="not JSON"):
        from_file(as_list)
