"""Lines by room: every file counts once, for its own folder, and a change is told by room since any commit."""

import subprocess
from pathlib import Path

import pytest

from tools import lines


def write(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * count, encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    for name, count in (
        ("app/cli.py", 3),
        ("app/engine/core.py", 5),
        ("app/engine/step/new.py", 7),
        ("tools/a.py", 11),
    ):
        write(tmp_path / name, count)
    return tmp_path


def git(folder: Path, *command: str) -> None:
    author = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *author, *command], check=True, capture_output=True)


def test_a_file_counts_once_for_its_own_folder(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "app" / "notes.md").write_text("no Python\n")
    assert lines.rooms(tree) == {"app": 3, "app/engine": 5, "app/engine/step": 7, "tools": 11}
    assert lines.main([]) == 0
    *_, app, tools, tests = capsys.readouterr().out.splitlines()
    assert app.split() == ["app", "in", "all", "15"] and tools.split()[-1] == "11" and tests.split()[-1] == "0"


def test_what_changed_since_a_commit_is_told_by_room_whatever_its_size(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "before")
    write(tree / "app" / "engine" / "core.py", 9_000)
    (tree / "app" / "engine" / "step" / "new.py").rename(tree / "tools" / "b.py")
    git(tree, "add", ".")
    assert lines.changes(tree, "HEAD") == {"app/engine": (8995, 0), "app/engine/step": (0, 7), "tools": (7, 0)}
    assert lines.main(["--since", "HEAD"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["app/engine", "+8,995", "0", "+8,995"]
    assert told[3].split() == ["app", "in", "all", "+8,995", "-7", "+8,988"]


def test_a_commit_that_does_not_exist_is_told_in_a_line(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tree, "init")
    assert lines.main(["--since", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: --since nowhere: ")
