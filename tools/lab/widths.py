"""`--verify auto` by turns against plain decoding and whole blocks: `python -m tools.lab widths`.

The demo pair answers every kind of text at several concurrencies, in this process. Exits with 1 if a bound was missed.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from app.engine.checkpoint.files import DEMO
from tools.bench.command import out_folder, progress
from tools.bench.flags import add_out_flag, count
from tools.bench.markdown import Row, Table
from tools.bench.paired import Claim, Comparison, rounds
from tools.lab import in_process, loads
from tools.lab.publish import publish
from tools.parts import ToolParser

KEEPS_CONTEXT = "k=1"
"""The variant that loads a draft and keeps its context, but never drafts."""
VARIANTS = ("plain", KEEPS_CONTEXT, "full", "auto")
BOUNDS = {"plain": 0.95, "full": 0.97}
"""The least ratios of `auto` on any text."""
MIXED_BOUNDS = {"plain": 1.05, "full": 1.05}
MEANING = (
    f'"plain" loads no draft, "{KEEPS_CONTEXT}" loads it and never drafts. A ratio is of paired rounds, with its 95 % '
    "interval; *drafting* is the share of decoding sequences' steps that verified drafts, in the last round."
)


def claims(load: str) -> list[Claim]:
    bounds = MIXED_BOUNDS if load == loads.MIXED else BOUNDS
    return [Claim("auto", against, bound) for against, bound in bounds.items()]


def compare(options: argparse.Namespace) -> list[Row]:
    """Return a row for each load and concurrency."""
    make = partial(in_process.engine, target=DEMO / "target", draft=DEMO / "draft")
    engines = {name: make(name, max_num_seqs=max(options.concurrency)) for name in VARIANTS}
    rows = []
    cells = [(load, concurrency) for load in options.loads for concurrency in options.concurrency]
    with progress() as bar:
        task = bar.add_task("widths", total=len(cells))
        for load, concurrency in cells:
            bar.update(task, description=f"{load}, {concurrency} at once")
            requests = loads.requests(load, max(8, 3 * concurrency // 2))
            last: dict[str, in_process.Outcome] = {}

            def run(name: str) -> float:
                last[name] = in_process.run(engines[name], requests, concurrency)  # noqa: B023
                return last[name].speed  # noqa: B023

            ways = {name: partial(run, name) for name in engines}
            for way in ways.values():
                way()
            *_, comparison = rounds(ways, claims(load), max_rounds=options.max_rounds)
            rows.append(row(load, concurrency, comparison, last["auto"].drafting_share))
            bar.console.print(*rows[-1].values(), sep=" | ")
            bar.advance(task)
    return rows


def row(load: str, concurrency: int, comparison: Comparison, drafting_share: float) -> Row:
    cells: Row = {"text": load, "concurrency": concurrency}
    cells |= {f"{name} tok/s": f"{median(speeds):.0f}" for name, speeds in comparison.speeds.items()}
    cells[f"{KEEPS_CONTEXT} / plain"] = str(comparison.ratio(Claim(KEEPS_CONTEXT, "plain")))
    verdicts = {claim.against: comparison.verdict(claim) for claim in comparison.claims}
    for claim in comparison.claims:
        unknown = " inconclusive" if verdicts[claim.against] == "inconclusive" else ""
        cells[f"auto / {claim.against}"] = f"{comparison.ratio(claim)}{unknown}"
    missed = ", ".join(against for against, verdict in verdicts.items() if verdict == "missed")
    return cells | {
        "drafting": f"{100 * drafting_share:.0f} %",
        "rounds": comparison.num_rounds,
        "missed": missed or "-",
    }


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    table = Table("widths", "Whether to draft, and how much to verify", MEANING, compare(options))
    return publish("widths", arguments, [table], folder) or int(any(row["missed"] != "-" for row in table.rows))


def parser() -> argparse.ArgumentParser:
    made = ToolParser(
        prog="python -m tools.lab widths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--loads", nargs="+", choices=loads.LOADS, default=loads.LOADS, metavar="TEXT")
    made.add_argument("--concurrency", nargs="+", type=count, default=[1, 4, 16, 32], metavar="N")
    made.add_argument("--max-rounds", type=count, default=40, metavar="N")
    made.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    add_out_flag(made, "widths.json")
    return made
