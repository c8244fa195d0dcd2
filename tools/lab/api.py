"""The way through HTTP: what it costs a token, and how soon it is there: `python -m tools.lab api`.

A scripted engine says tokens as fast as they are taken, so that the API process is all there is to measure; the demo
pair says what that is of a real run. What counts is CPU time, which other work on the machine changes least. Exits with
1 if a bound was missed; with 2 for a mistake in what was asked for.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from app.bench.command import guarded, out_folder, progress, save
from app.bench.flags import add_out_flag, count, counts, listed
from app.bench.machine import describe_host
from app.bench.report import Table
from app.config.settings import ConfigError
from tools.lab import api_cpu, api_share, api_start, api_streaming
from tools.lab.verdict import Verdict

PARTS = {"streaming": api_streaming.measure, "share": api_share.measure, "start": api_start.measure}
PICTURES = {
    "streaming": (["tokens a step", "engine"], ["tokens per second", "tokens per CPU second", "tokens an event"]),
    "share": (["text"], ["API µs a token", "engine µs a token", "added"]),
    "start": (["command"], ["seconds", "CPU seconds"]),
}
"""Of each part's table, the columns that say what a row is of, and those that its picture has a panel for."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    return guarded(lambda: bench(options, shlex.join(["python", "-m", "tools.lab", "api", *arguments])))


def bench(options: argparse.Namespace, command: str) -> int:
    for part in options.parts:
        if part not in PARTS:
            raise ConfigError(f"--parts: there is no part {part!r}", f"there are {', '.join(PARTS)}")
    api_cpu.check()
    folder = out_folder(options)
    tables: list[Table] = []
    verdicts: list[Verdict] = []
    with progress(Console(stderr=True)) as bar:
        for part in options.parts:
            table, more = _measured(part, options, bar)
            tables.append(table)
            verdicts += more
    print(f"{describe_host()}\n")
    print("\n".join(map(str, tables)))
    print("\n".join(f"- {verdict}" for verdict in verdicts))
    if folder:
        rows = {table.name: table.rows for table in tables}
        told = {"command": command, "machine": describe_host(), "verdicts": list(map(str, verdicts)), **rows}
        save(folder, "api", told, lambda: _draw(folder, tables))
    return int(any(verdict.holds is False for verdict in verdicts))


def _draw(folder: Path, tables: Sequence[Table]) -> None:
    from tools.lab import bar_plots

    for table in tables:
        bar_plots.of_columns(folder / f"{table.name}.png", table, *PICTURES[table.name])


def _measured(part: str, options: argparse.Namespace, bar: Progress) -> tuple[Table, list[Verdict]]:
    task = bar.add_task(part, total=None)
    try:
        return PARTS[part](options, lambda text: bar.update(task, description=f"{part}: {text}"))
    finally:
        bar.remove_task(task)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lab api", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=listed, default=list(PARTS), metavar="PART,...", help=f"[default: {','.join(PARTS)}]"
    )
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="of each part [default: 5]")
    group = parser.add_argument_group("streaming")
    group.add_argument("--connections", type=count, default=64, metavar="N", help="[default: 64]")
    group.add_argument(
        "--tokens-a-step", type=counts, default=[1, 4, 8], metavar="N,...", help="1 is plain decoding [default: 1,4,8]"
    )
    group.add_argument("--steps", type=count, default=256, metavar="N", help="of every answer [default: 256]")
    group = parser.add_argument_group("share")
    group.add_argument("--concurrency", type=count, default=16, metavar="N", help="[default: 16]")
    group.add_argument("--num-prompts", type=count, default=48, metavar="N", help="of each text [default: 48]")
    group.add_argument("--max-tokens", type=count, default=128, metavar="N", help="[default: 128]")
    group.add_argument("--dataset", default="demo", metavar="NAME", help="demo, demo:math,prose [default: demo]")
    add_out_flag(parser, "api.json and a PNG of each table")
    return parser
