"""`--out` is a folder in every part of the laboratory and of the bench: JSON of what was measured."""

import json

import pytest

from tools.bench import __main__ as bench
from tools.bench.paired import Comparison
from tools.lab import cpu
from tools.lab.__main__ import PARTS, main

SPEEDS = {"plain": [100.0, 110.0], "full": [250.0, 240.0], "auto": [251.0, 260.0]}


def rows_of_cpu(*_: object) -> list[dict[str, object]]:
    ways = {name: SPEEDS[name] for name in cpu.WAYS}
    alone = Comparison(ways | {cpu.TRANSFORMERS: [50.0, 51.0]}, cpu.CLAIMS[1])
    return cpu.rows_of(1, alone) + cpu.rows_of(4, Comparison(ways, cpu.CLAIMS[4]))


def test_a_folder_gets_json_of_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "compare", rows_of_cpu)
    folder = tmp_path / "new" / "folder"
    assert main(["cpu", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert cpu.MEANING in printed and "| concurrency |" in printed
    told = json.loads((folder / "cpu.json").read_text())
    assert told["tables"] == {"cpu": rows_of_cpu()} and told["command"].startswith("python -m tools.lab cpu --out ")
    assert {path.name for path in folder.iterdir()} == {"cpu.json"}


EVERY_PART = [*((main, part) for part in PARTS), (bench.main, "http")]


@pytest.mark.parametrize(("command", "part"), EVERY_PART, ids=lambda given: given if isinstance(given, str) else "")
def test_every_part_says_that_it_takes_a_folder_and_refuses_a_file_before_it_measures(command, part, tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        command([part, "--help"])
    assert "--out FOLDER" in capsys.readouterr().out
    (tmp_path / "results.json").write_text("")
    assert command([part, "--out", str(tmp_path / "results.json")]) == 2
    assert "results.json: File exists" in capsys.readouterr().err
