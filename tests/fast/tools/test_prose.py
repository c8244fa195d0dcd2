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


def test_every_clean_folder_exists() -> None:
    assert all((ROOT / folder).is_dir() for folder in prose.CLEAN)


def test_a_folder_that_is_not_clean_yet_is_counted_and_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "CLEAN", ("app/clean",))
    for folder in ("app/clean", "app/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text('"""What it does."""\n' if folder == "app/other" else "x = 1\n")
    assert prose.main([]) == 0 and capsys.readouterr().out == ""
    assert prose.main(["--all"]) == 0 and capsys.readouterr().out.split() == ["0", "app/clean", "1", "app/other"]
    (tmp_path / "app/clean/b.py").write_text("x = 1  # nobody\n")
    assert prose.main([]) == 1
    assert capsys.readouterr().out == "app/clean/b.py:1: name the thing instead of 'nobody'\n"
