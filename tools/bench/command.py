"""Exit codes, progress and the output folder, alike in every part of the bench."""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.config.error import ConfigError
from tools.bench.client import ServerError

INTERRUPTED = 130


def guarded(work: Callable[[], int]) -> int:
    """Return the exit code of `work`. Its errors are printed in a line each, and SIGTERM ends it like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return work()
    except ConfigError as error:
        return error.show()
    except ServerError as error:
        ConfigError(str(error), error.hint).show()
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt, because a shell's background job ignores SIGINT itself."""
    raise KeyboardInterrupt


def progress(console: Console | None = None) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console or Console(stderr=True))


def out_folder(options: argparse.Namespace) -> Path | None:
    """Make the folder of --out before the measurement, because an error afterwards would lose its results."""
    folder: Path | None = options.out
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}", "give a folder that can be made") from None
    return folder
