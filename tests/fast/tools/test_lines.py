"""Budgets of lines: every file of app/ counts once, for the deepest folder of the table."""

from pathlib import Path

import pytest

from tools.lines import budgets, over, spent


def write(path: Path, lines: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * lines, encoding="utf-8")


def test_a_file_counts_for_the_deepest_folder_and_a_new_folder_for_its_parent(tmp_path: Path) -> None:
    for name, lines in (("cli.py", 3), ("engine/core.py", 5), ("engine/step/deep/new.py", 7), ("fresh/room.py", 11)):
        write(tmp_path / "app" / name, lines)
    assert spent(tmp_path, ["app", "app/engine", "app/engine/step"]) == {
        "app": 14,
        "app/engine": 5,
        "app/engine/step": 7,
    }


@pytest.mark.parametrize(("lines", "expected"), [(9, []), (10, []), (11, ["app"])])
def test_one_line_over_the_budget_is_over(lines: int, expected: list[str]) -> None:
    assert over({"app": lines}, {"app": 10}) == expected


def test_the_budgets_are_no_larger_in_sum_than_agreed() -> None:
    assert sum(budgets().values()) <= 21_900
