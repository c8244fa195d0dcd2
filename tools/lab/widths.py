"""What `--verify auto` is worth: against plain decoding and whole blocks, on every kind of text, at several
concurrencies, on the demo pair in this process: `python -m tools.lab widths`. Exits with 1 if a bound was missed."""

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from app.bench.command import guarded, out_folder, progress, tell
from app.bench.flags import add_out_flag, count
from app.bench.machine import describe
from app.bench.paired import Claim, Comparison, rounds
from app.bench.report import Table
from app.config.checkpoint import DEMO
from app.engine.core import EngineCore
from app.engine.sequence import Request
from tools.lab import in_process, loads

KEEPS_CONTEXT = "k=1"
"""Never drafts, and keeps the draft's context all the same: what is lost against "plain" before anything is decided."""
VARIANTS = ("plain", KEEPS_CONTEXT, "full", "auto")
LEAST = {"plain": 0.95, "full": 0.97}
"""How many times as fast as these `auto` is on any text."""
MIXED_LEAST = {"plain": 1.05, "full": 1.05}
MEANING = (
    f'"plain" loads no draft, "{KEEPS_CONTEXT}" loads it and never drafts. A ratio is of paired rounds, with its 95 % '
    "interval; *drafting* is the share of decoding sequences' steps that verified drafts, in the last round."
)


class Way:
    """An engine with its requests; calling it runs them all and says how many tokens a second came out."""

    def __init__(self, core: EngineCore, requests: Sequence[Request], concurrency: int) -> None:
        self._run = partial(in_process.run, core, requests, concurrency)
        self.last = in_process.Outcome()

    def __call__(self) -> float:
        self.last = self._run()
        return self.last.speed


def claims(load: str) -> list[Claim]:
    bounds = MIXED_LEAST if load == loads.MIXED else LEAST
    return [Claim("auto", against, bound) for against, bound in bounds.items()]


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each load and concurrency."""
    engines = {
        name: in_process.engine(name, DEMO / "target", DEMO / "draft", max_num_seqs=max(options.concurrency))
        for name in VARIANTS
    }
    rows = []
    cells = [(load, concurrency) for load in options.loads for concurrency in options.concurrency]
    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("widths", total=len(cells))
        for load, concurrency in cells:
            bar.update(task, description=f"{load}, {concurrency} at once")
            requests = loads.requests(load, max(8, 3 * concurrency // 2))
            ways = {name: Way(core, requests, concurrency) for name, core in engines.items()}
            for way in ways.values():
                way()
            *_, comparison = rounds(ways, claims(load), max_rounds=options.max_rounds)
            rows.append(row(load, concurrency, comparison, ways["auto"].last))
            bar.console.print(*rows[-1].values(), sep=" | ")
            bar.advance(task)
    return rows


def row(load: str, concurrency: int, comparison: Comparison, auto: in_process.Outcome) -> dict[str, Any]:
    cells: dict[str, Any] = {"text": load, "concurrency": concurrency}
    cells |= {f"{name} tok/s": f"{median(speeds):.0f}" for name, speeds in comparison.speeds.items()}
    cells[f"{KEEPS_CONTEXT} / plain"] = str(comparison.ratio(Claim(KEEPS_CONTEXT, "plain")))
    for claim in comparison.claims:
        verdict = comparison.verdict(claim)
        said = verdict if verdict == "inconclusive" else ""
        cells[f"auto / {claim.against}"] = f"{comparison.ratio(claim)} {said}".strip()
    drafting = f"{100 * auto.drafting_share:.0f} %"
    missed = [claim.against for claim in comparison.claims if comparison.verdict(claim) == "missed"]
    return cells | {"drafting": drafting, "rounds": comparison.num_rounds, "missed": ", ".join(missed) or "-"}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    return guarded(lambda: bench(options, shlex.join(["python", "-m", "tools.lab", "widths", *arguments])))


def bench(options: argparse.Namespace, command: str) -> int:
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    table = Table("widths", "Whether to draft, and how much to verify", MEANING, compare(options))
    tell(table, describe(), command, folder, _draw)
    return int(any(row["missed"] != "-" for row in table.rows))


def _draw(path: Path, table: Table) -> None:
    from tools.lab import bar_plots

    bar_plots.widths(path, table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.lab widths", description=__doc__)
    parser.add_argument("--loads", nargs="+", choices=loads.LOADS, default=loads.LOADS, metavar="TEXT")
    parser.add_argument("--concurrency", nargs="+", type=count, default=[1, 4, 16, 32], metavar="N")
    parser.add_argument("--max-rounds", type=count, default=40, metavar="N")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    add_out_flag(parser, "widths.json and a PNG of the table")
    return parser
