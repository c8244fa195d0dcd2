"""One command starts a server for each size and variant in turn, and prints one table."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.bench import table
from tools.bench.cell import Cell
from tools.bench.client import Answer, Drafting, Server, ServerError
from tools.bench.formats import Prompt
from tools.bench.traffic import Load, Round

DRAFTING = Drafting({("drafts", None): 10, ("accepted_tokens", None): 52})


class Servers:
    """Stands for servers. DFlash is three times as fast, and half of the answers without it are wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[list[str]] = []
        self.warmed_up: list[int] = []
        self.fails_at: tuple[str, int] | None = None
        for name in ("servers", "ask_all", "run_round"):
            monkeypatch.setattr(table, name, getattr(self, name))

    @contextmanager
    def servers(self, options: argparse.Namespace, variants: Sequence[str], _: Any) -> Iterator[Any]:
        self.started.append([*options.serve_args, *variants])
        yield [Server(name, "http://nowhere") for name in variants], [f"{name}: started" for name in variants]

    async def run_round(self, _: Server, asked: Sequence[Prompt], load: Load) -> None:
        self.warmed_up.append(len(asked))

    def ask_all(self, _: Any, ways: Sequence[Server], name: str, asked: Sequence[Prompt], load: Load, __: Any) -> Cell:
        way = ways[0].name
        if self.fails_at == (way, load.concurrency):
            raise ServerError("it is gone")
        seconds, text = (1.0, "right") if way == "dflash" else (3.0, "wrong")
        answers = [Answer(0.0, [seconds], seconds, 3, 0, 30, "right" if i % 2 else text) for i in range(len(asked))]
        judged = [Prompt(prompt.body, judge=lambda said: said == "right") for prompt in asked]
        return Cell(name, load, judged, {way: [Round(answers, DRAFTING if way == "dflash" else None)]})


def test_the_table_has_a_row_for_each_size_and_concurrency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = Servers(monkeypatch)
    load = "--concurrency 1,2 --num-prompts 2,4 --serve-args=--seed=1".split()
    assert table.main(["--tensor-parallel-size", "1,2", *load, "--out", str(tmp_path)]) == 0
    flags = [["--seed=1", "--tensor-parallel-size", size] for size in "12"]
    assert servers.started == [[*flags[0], "plain"], [*flags[0], "dflash"], [*flags[1], "plain"], [*flags[1], "dflash"]]
    assert servers.warmed_up == [1, 2] * 4
    printed = capsys.readouterr().out
    assert "| TP | concurrency | accuracy | acceptance length | baseline tok/s | DFlash tok/s | speed-up |" in printed
    for row in ("1 | 1", "1 | 2", "2 | 1", "2 | 2"):
        tokens = 60 if row.endswith("1") else 120
        assert f"| {row} | 100.0 % (50.0 %) | 6.20 | {tokens / 3:.0f} | {tokens} | 3.00x |" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["tables"]["table"]) == 4 and len(results["requests"]) == 2 * 2 * (2 + 4)
    assert {row["dataset"] for row in results["requests"]} == {"math, TP 1", "math, TP 2"}


def test_rows_before_a_failure_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Servers(monkeypatch).fails_at = ("dflash", 2)
    assert table.main("--concurrency 1,2 --num-prompts 2".split()) == 1
    told = capsys.readouterr()
    assert "| 1 | 1 | 100.0 %" in told.out and "| 1 | 2 |" not in told.out and "it is gone" in told.err


def test_a_table_is_of_one_dataset_with_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for dataset in ("demo:math,copy", "demo:prose"):
        assert table.main(["--dataset", dataset]) == 2
        assert f"--dataset {dataset}: a table is of one dataset that has right answers" in capsys.readouterr().err
