"""Answers as models write them, which the judges of tools/bench must not misread."""

import pytest

from tools.bench.judges import box_is, final_code, final_letter, final_number


@pytest.mark.parametrize(
    "text",
    [
        "#### Step 1: Count\n6 * 7 = 42\n#### Step 2: Sum\nThe answer is \\boxed{42}.",
        "#### 1. Find eggs\n#### 2. Final answer\n\\boxed{42}",
        "All in all:\n#### 42",
    ],
)
def test_a_heading_is_no_mark_of_an_answer(text: str) -> None:
    assert final_number(text) == 42


@pytest.mark.parametrize(
    ("wanted", "said", "is_right"),
    [
        ("3\\frac{1}{2}", "3.5", True),
        ("3\\frac{1}{2}", "31/2", False),
        ("-\\frac{3}{4}", "-0.75", True),
        ("4210_{5}", "4210_5", True),
        ("42105", "4210_5", False),
        ("x^{2}", "x^2", True),
        ("1", "1e99999999", False),
    ],
)
def test_mathematics_is_compared_by_its_value(wanted: str, said: str, is_right: bool) -> None:
    assert box_is(wanted)(f"So it is \\boxed{{{said}}}.") == is_right


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("\\boxed{\\textbf{C}}", "C"),
        ("Answer: \\textbf{C}", "C"),
        ("Answer: $\\mathbf{B}$", "B"),
        ("Answer: [B]", "B"),
        ("Answer: B is right", "B"),
        ("The answer is a matter of taste", None),
    ],
)
def test_a_letter_may_stand_in_bold_or_brackets(text: str, letter: str | None) -> None:
    assert final_letter(text) == letter


def test_an_example_of_use_is_not_the_solution() -> None:
    solution = "def add(a, b):\n    return a + b\n"
    text = f"```python\n{solution}```\nExample usage:\n```python\nprint(add(1, 2))\n```\nOutput:\n```\n3\n```\n"
    assert final_code(text) == solution
