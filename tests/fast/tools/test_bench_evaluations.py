"""Published evaluations are recognised by their fields, asked as published, and judged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.config.error import ConfigError
from tools.bench import eval as evaluation
from tools.bench.formats import BOXED, LETTER, Prompt, prompts_of
from tools.bench.judges import box_is, final_code, final_letter
from tools.bench.prompts import from_file, named

MATH = {"problem": "What is $1/2$?", "solution": r"$\boxed{\frac12}$.", "answer": r"\frac{1}{2}", "level": 1}
MMLU = {"question": "Which is red?", "subject": "art", "choices": ["grass", "blood"], "answer": 1}
MMLU_COLUMNS = {"question": "Which is red?", "A": "grass", "B": "blood", "C": "sky", "D": "snow", "answer": "B"}
HUMAN_EVAL = {
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


def asked(fields: dict[str, Any], instruction: str | None = None) -> tuple[Prompt, str]:
    """Return the only prompt of an entry, and what is asked."""
    (prompt,) = prompts_of(fields, instruction)
    (message,) = prompt.body["messages"]
    return prompt, message["content"]


@pytest.mark.parametrize(
    ("fields", "content", "right", "wrong"),
    [
        (MATH, f"What is $1/2$?\n{BOXED}", r"So \boxed{0.5}.", "It is 0.5."),
        (MMLU, f"Which is red?\nA. grass\nB. blood\n{LETTER}", "Answer: B", "Answer: A"),
        (MMLU_COLUMNS, f"Which is red?\nA. grass\nB. blood\nC. sky\nD. snow\n{LETTER}", "B", "C"),
    ],
)
def test_questions_have_their_instruction_and_judge(fields: Any, content: str, right: str, wrong: str) -> None:
    prompt, said = asked(fields)
    assert said == content and prompt.judge is not None
    assert prompt.judge(right) and not prompt.judge(wrong)


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        (HUMAN_EVAL, "Sure:\n```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```\nDone."),
        (HUMAN_EVAL, "    return sum(xs)\n"),
        (MBPP, "```\ndouble = 3\n```\nNo:\n```py\ndef double(x):\n    return 2 * x\n```"),
        (SANITISED, "def root(x):\n    return x ** 0.5"),
    ],
)
def test_code_is_run_against_its_tests(fields: Any, right: str) -> None:
    prompt, said = asked(fields)
    assert prompt.judge is not None and prompt.judge(right)
    assert not prompt.judge(right.replace("return", "return 1 +"))
    assert "block of Python code" in said and (fields.get("text") or fields["prompt"]) in said
    assert "test_list" not in fields or fields["test_list"][0] in said


def test_alpaca_has_its_input_and_nobody_to_judge_it() -> None:
    prompt, said = asked(ALPACA)
    assert said == "Translate.\n\nInput:\nhello" and prompt.judge is None
    assert asked(ALPACA | {"input": ""})[1] == "Translate."


def test_mt_benchs_second_turn_follows_its_first() -> None:
    first, second = prompts_of(MT_BENCH)
    assert (first.follows, second.follows) == (False, True) and first.judge is second.judge is None
    assert second.body == {"messages": [{"role": "user", "content": "Shorten it."}]}


def test_an_instruction_replaces_the_evaluations_own_one() -> None:
    parse = evaluation.parser().parse_args
    boxed, brief, own = (parse(flags).instruction for flags in (["--boxed"], ["--instruction", "Be brief."], []))
    assert asked(ALPACA | {"input": ""}, boxed)[1] == f"Translate.\n{BOXED}"
    assert asked(MATH, brief)[1] == "What is $1/2$?\nBe brief." and asked(MATH, "")[1] == "What is $1/2$?"
    assert asked(ALPACA | {"input": ""}, own)[1] == "Translate." and BOXED in asked(MATH, own)[1]
    with pytest.raises(SystemExit):
        parse(["--boxed", "--instruction", "x"])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (MMLU | {"answer": 2}, "answer is 2, not one of 2 choices"),
        (MMLU_COLUMNS | {"answer": "E"}, "answer is 'E', not one of 4 choices"),
        (MBPP | {"test_list": "assert"}, "test_list is 'assert', not a list of texts"),
        (MATH | {"answer": 5}, "answer is 5, not a text"),
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
    assert from_file(as_list).first(3) == from_file(as_lines).first(3) and from_file(as_list).size == 3
    as_list.write_text("[{]")
    with pytest.raises(ConfigError, match="not JSON"):
        from_file(as_list)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (r"\frac{1}{2}", r"\boxed{\dfrac12}"),
        (r"\frac{1}{2}", r"first \boxed{3}, but \boxed{1/2}"),
        (r"-\frac{3}{4}", r"\boxed{-0.75}"),
        ("1000", r"\boxed{1,000}"),
        ("10{,}080", r"\boxed{10080.0}"),
        ("5", r"$\boxed{x = 5 \text{ cm}^2}$"),
        ("5", r"\boxed{\$5}"),
        ("25", r"\boxed{25\%}"),
        ("90", r"\boxed{90^\circ}"),
        ("12", r"\boxed{12 square units}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\frac{\pi}{2})}"),
        (r"\text{Evelyn}", r"\boxed{Evelyn}"),
        (r"\text{(C)}", r"\boxed{C}"),
        (r"\frac{\sqrt{3}}{2}", r"\boxed{\tfrac{\sqrt3}{2}}"),
        (r"\begin{pmatrix} -2 \\ \frac{1}{2} \end{pmatrix}", r"\boxed{\begin{pmatrix}-2\\\tfrac12\end{pmatrix}}"),
        (r"\{1, 2\}", r"\boxed{\{1,2\}}"),
        ("6", r"<think>\boxed{5}</think>\boxed{6}"),
    ],
)
def test_a_box_is_compared_by_its_meaning(answer: str, said: str) -> None:
    assert box_is(answer)(said)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("5", r"\boxed{5x}"),
        ("5", "5"),
        ("5", r"\boxed{5"),
        ("5", r"\boxed{5} no, \boxed{6}"),
        ("12", r"\boxed{1,2}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
        (r"1", r"\boxed{\frac{1}{0}}"),
        ("5", r"<think>\boxed{5}</think> I do not know."),
    ],
)
def test_another_box_is_wrong(answer: str, said: str) -> None:
    assert not box_is(answer)(said)


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("C", "C"),
        ("(B) Paris", "B"),
        ("D. because A and B are wrong", "D"),
        ("A is wrong. Answer: C", "C"),
        ("The correct answer is **(B)**.", "B"),
        (r"So the answer is $\boxed{\text{D}}$", "D"),
        ("Answer: A, no. Answer: B", "B"),
        ("The answer is option C.", "C"),
        ("**Answer:** A because it is", "A"),
        ("<think>Answer: A</think>Answer: D", "D"),
        ("A tree is green.", None),
        ("The answer is a tree.", None),
        ("", None),
    ],
)
def test_the_letter_of_typical_completions(said: str, letter: str | None) -> None:
    assert final_letter(said) == letter


def test_code_is_the_last_block_even_if_it_was_cut() -> None:
    assert final_code("<think>```\nno\n```</think>Here:\n```python\nx = 1\n```\nIt is 1.") == "x = 1\n"
    assert final_code("```python\nx = 1\ny = 2") == "x = 1\ny = 2" and final_code("x = 1") == "x = 1"


def test_long_questions_have_the_length_and_the_answer_that_was_asked() -> None:
    (dataset,) = named("gsm8k-long:350,150", seed=0)
    asked = dataset.first(20)
    assert asked[0].body == named("gsm8k-long:350,150", seed=0)[0].first(1)[0].body != asked[1].body
    assert asked[0].body != named("gsm8k-long:350,150", seed=1)[0].first(1)[0].body
    for prompt in asked:
        said = prompt.body["messages"][0]["content"]
        assert 4 * 350 < len(said) < 4 * 350 + 200 and prompt.max_tokens == 150 and said.endswith(BOXED)
        assert prompt.judge is not None and prompt.judge(rf"\boxed{{{solved(said)}}}")


def solved(question: str) -> int:
    """Return the answer that the sentences about the person give."""
    total = 0
    for sentence in question.split(". "):
        numbers = [int(number) for number in re.findall(r"\d+", sentence)]
        if " boxes with " in sentence:
            total = numbers[0] * numbers[1]
        elif " more " in sentence:
            total += numbers[0]
        elif "on each of" in sentence:
            total += numbers[0] * numbers[1]
        elif " away" in sentence:
            total -= numbers[0]
        elif "sells half" in sentence:
            total //= 2
        elif "collector" in sentence:
            total *= numbers[0]
    return total


@pytest.mark.parametrize("lengths", ["", "350", "0,5", "a,b", "1,2,3"])
def test_long_questions_need_two_lengths(lengths: str) -> None:
    with pytest.raises(ConfigError, match="needs the tokens of prompts and of answers"):
        named(f"gsm8k-long:{lengths}", 0)
