"""`--out` is a folder in every part of the bench."""

import pytest

from tools.bench.__main__ import PARTS, main


@pytest.mark.parametrize("part", list(PARTS))
def test_a_file_is_no_folder_and_that_is_said_before_anything_is_measured(part, tmp_path, capsys):
    (tmp_path / "results.json").write_text("")
    assert main([part, "--out", str(tmp_path / "results.json")]) == 2
    assert "results.json: File exists" in capsys.readouterr().err


def test_every_part_says_that_it_takes_a_folder(capsys):
    for part in PARTS:
        with pytest.raises(SystemExit, match="0"):
            main([part, "--help"])
        assert "--out FOLDER" in capsys.readouterr().out, part
