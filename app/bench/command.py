"""What every part of the bench does as a command: exit codes, progress, and the pages and pictures at the end."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.bench import page, report
from app.bench.client import ServerError
from app.config.settings import ConfigError

INTERRUPTED = 130


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`, whose troubles are told in a line. Ctrl-C and SIGTERM end our servers on the way out."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return work()
    except (ConfigError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    """As Ctrl-C does, also where a shell has put the command in the background, deaf to SIGINT."""
    raise KeyboardInterrupt


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def out_folder(options: argparse.Namespace) -> Path | None:
    """Made before anything is measured, so that hours of work are not lost to a folder that cannot be."""
    folder: Path | None = options.out
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}", "give a folder that can be made") from None
    return folder


def save(folder: Path, name: str, results: dict[str, Any], pictures: Callable[[], object]) -> None:
    """NAME.json, and what `pictures` draws."""
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    draw(pictures)


def tell(
    table: report.Table,
    machine: str,
    command: str,
    folder: Path | None,
    picture: Callable[[Path, report.Table], object],
) -> None:
    """Print the one table of a part, and write it and its `picture` to the folder, if there is one."""
    print(f"\n{machine}\n\n{table}")
    if folder:
        results = {"command": command, "machine": machine, "rows": table.rows}
        save(folder, table.name, results, lambda: picture(folder / f"{table.name}.png", table))


def draw(pictures: Callable[[], object]) -> None:
    """Call `pictures`, which imports matplotlib; say so where it is not installed."""
    try:
        pictures()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("no pictures: matplotlib is not installed; pip install 'dflash-server[bench]'", file=sys.stderr)


@dataclass(slots=True)
class Publication:
    """A context at whose end everything is printed as Markdown, and written to a folder, if there is one: whatever was
    measured by then, if something ended it early. A page gets its table only of a whole bench. `limits` are goodput's,
    in seconds; `about` is a line a server."""

    folder: Path | None
    limits: dict[str, float]
    command: str
    page: Path | None = None
    about: list[str] = field(default_factory=list)
    cells: list[report.Cell] = field(default_factory=list)

    @property
    def has_failures(self) -> bool:
        return any(cell.failures(name) for cell in self.cells for name in cell.rounds)

    def __enter__(self) -> "Publication":
        return self

    def __exit__(self, ended_by: type[BaseException] | None, *_: object) -> None:
        if self.cells:
            tables = report.tables(self.cells, self.limits)
            self._tell(tables)
            if self.folder:
                self._save(self.folder, tables)
            if self.page and not ended_by:
                page.write(self.page, self.cells, self.command)

    def _tell(self, tables: Sequence[report.Table]) -> None:
        print(f"{report.describe_host()}\n")
        print("".join(f"- {line}\n" for line in self.about))
        print(f"{report.lengths(self.cells)}.\n")
        for table in tables:
            print(table)
        for note in report.notes(self.cells):
            print(f"- {note}")

    def _save(self, folder: Path, tables: Sequence[report.Table]) -> None:
        """results.json, and a PNG for each table if matplotlib is there."""
        results = report.as_json(self.cells, tables, command=self.command, servers=self.about)
        (folder / "results.json").write_text(json.dumps(results))
        draw(lambda: self._draw(folder, tables))

    def _draw(self, folder: Path, tables: Sequence[report.Table]) -> None:
        from app.bench import plots

        plots.write(folder, self.cells, tables, self.limits)
