"""The check of prose sees what it forbids, and passes what it does not."""

from pathlib import Path

import pytest

from tests import ROOT
from tools import prose


@pytest.mark.parametrize(
    ("source", "complaints"),
    [
        ('"""What it does."""\n', ["begin with a verb or a noun, not with 'What'"]),
        ('def f():\n    """Whether it holds."""\n', ["begin with a verb or a noun, not with 'Whether'"]),
        ('x = 1\n"""How many there are."""\n', ["begin with a verb or a noun, not with 'How'"]),
        ("x = 1  # nobody reads it\n", ["name the thing instead of 'nobody'"]),
        (
            'def f():\n    """Drop it: who\n    leaves is gone, Whoever asks."""\n',
            ["name the thing instead of 'who leaves'"],
        ),
        (
            '"""Of what\nwaits."""\n',
            ["name the thing instead of 'what waits'", "begin with a verb or a noun, not with 'Of'"],
        ),
        ("x = 1  # kept, for it is read later\n", ["say because instead of 'for it is'"]),
    ],
)
def test_a_planted_one_is_seen(source: str, complaints: list[str]) -> None:
    found = [complaint for _, complaint in prose.findings(source)]
    assert set(complaints) <= set(found)


@pytest.mark.parametrize(
    "source", ['"""Whatever, Often, However."""\n', 'x = "nobody"\n', 'def f():\n    """Return what it does."""\n']
)
def test_plain_prose_and_data_pass(source: str) -> None:
    assert prose.findings(source) == []


LONG = " ".join(["word"] * 26)
SHORT = " ".join(["word"] * 25)
TOO_LONG = "26 words in one sentence: word word word word word word ..."


@pytest.mark.parametrize(
    ("name", "source", "lines"),
    [
        ("a.py", f'"""One.\n\n{LONG}.\n"""\n', [3]),
        ("a.py", f"x = 1\n# {LONG[:60]}\n# {LONG[60:].strip()}\n", [2]),
        ("a.py", f"x = 1  # {SHORT}\ny = 1  # {SHORT}\n# {SHORT}. {LONG}; {SHORT}\n", [3]),
        ("a.md", f"# Title\n\n{SHORT}: {SHORT}\n\n- {SHORT}\n- {LONG}\n1. [{LONG}](b.md)\n", [6, 7]),
        ("Makefile", f"# {SHORT}\nx:\n\techo\n# {LONG[:60]}\n# {LONG[60:].strip()}\n", [4]),
    ],
)
def test_a_long_sentence_is_seen_in_every_kind_of_file(
    tmp_path: Path, name: str, source: str, lines: list[int]
) -> None:
    (tmp_path / name).write_text(source)
    assert prose.findings_of(tmp_path / name) == [(line, TOO_LONG) for line in lines]


@pytest.mark.parametrize(
    "source",
    [
        f"| a table |\n|---|\n| {LONG} |\n",
        f"```console\n$ {LONG}\n\n{LONG}, nobody\n```\n",
        f"{SHORT}. `{LONG}, nobody` [a](b.md)\n",
        f"<!-- {LONG} -->\n",
    ],
)
def test_tables_and_code_on_a_page_pass(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.md").write_text(source)
    assert prose.findings_of(tmp_path / "a.md") == []


def test_columns_in_a_docstring_are_no_sentence() -> None:
    assert prose.findings(f'"""One.\n\npython -m a      {LONG}\n"""\n') == []


def test_every_clean_place_exists() -> None:
    assert all((ROOT / place).exists() for place in prose.CLEAN)


def test_a_folder_that_is_not_clean_yet_is_counted_and_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "CLEAN", ("app/clean",))
    for folder in ("app/clean", "app/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text('"""What it does."""\n' if folder == "app/other" else "x = 1\n")
    assert prose.main([]) == 0 and capsys.readouterr().out == ""
    assert prose.main(["--all"]) == 0
    found, *counts = capsys.readouterr().out.splitlines()
    assert found.startswith("app/other/a.py:1: ") and [line.split() for line in counts] == [
        ["0", "app/clean"],
        ["1", "app/other"],
    ]
    (tmp_path / "app/clean/b.py").write_text("x = 1  # nobody\n")
    assert prose.main([]) == 1
    assert capsys.readouterr().out == "app/clean/b.py:1: name the thing instead of 'nobody'\n"
