"""`--out` is a folder in every part of the laboratory and of the bench: JSON of what was measured."""

import json
from argparse import Namespace

import pytest

from tools.bench import __main__ as bench
from tools.bench.paired import Comparison
from tools.lab import api, cpu, widths
from tools.lab.__main__ import PARTS, main

SPEEDS = {"plain": [100.0, 110.0], "k=1": [99.0, 108.0], "full": [250.0, 240.0], "auto": [251.0, 260.0]}


def rows_of_cpu(*_: object) -> list[dict[str, object]]:
    ways = {name: SPEEDS[name] for name in cpu.WAYS}
    alone = Comparison(ways | {cpu.TRANSFORMERS: [50.0, 51.0]}, cpu.CLAIMS[1])
    return cpu.rows_of(1, alone) + cpu.rows_of(4, Comparison(ways, cpu.CLAIMS[4]))


def rows_of_widths(*_: object) -> list[dict[str, object]]:
    found = [(load, concurrency) for load in ("math", "prose") for concurrency in (1, 4)]
    return [widths.row(*cell, Comparison(SPEEDS, widths.claims(cell[0])), 0.5) for cell in found]


@pytest.mark.parametrize(("part", "rows"), [(cpu, rows_of_cpu), (widths, rows_of_widths)])
def test_a_folder_gets_json_of_the_table(part, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(part, "compare", rows)
    name = part.__name__.rpartition(".")[2]
    assert main([name, "--out", str(tmp_path / "new" / "folder")]) == 0
    printed = capsys.readouterr().out
    assert part.MEANING in printed and f"| {next(iter(rows()[0]))} |" in printed
    folder = tmp_path / "new" / "folder"
    told = json.loads((folder / f"{name}.json").read_text())
    assert told["tables"] == {name: rows()} and told["command"].startswith(f"python -m tools.lab {name} --out ")
    assert {path.name for path in folder.iterdir()} == {f"{name}.json"}


EVERY_PART = [*((main, part) for part in PARTS), *((bench.main, part) for part in bench.PARTS)]


@pytest.mark.parametrize(("command", "part"), EVERY_PART, ids=lambda given: given if isinstance(given, str) else "")
def test_every_part_says_that_it_takes_a_folder_and_refuses_a_file_before_it_measures(command, part, tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        command([part, "--help"])
    assert "--out FOLDER" in capsys.readouterr().out
    (tmp_path / "results.json").write_text("")
    assert command([part, "--out", str(tmp_path / "results.json")]) == 2
    assert "results.json: File exists" in capsys.readouterr().err


def test_a_start_has_a_row_for_the_command_and_the_server(monkeypatch):
    monkeypatch.setattr(api, "help_once", lambda: (0.25, 0.25))
    monkeypatch.setattr(api, "start_once", lambda: (7.0, 6.0))
    table, verdicts = api.start(Namespace(rounds=1), lambda _: None)
    assert [(row["seconds"], row["CPU seconds"]) for row in table.rows] == [("0.25", "0.25"), ("7.00", "6.00")]
    assert [verdict.holds for verdict in verdicts] == [True, False]
