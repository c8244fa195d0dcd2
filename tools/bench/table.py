"""One table of tensor parallelism and drafts, like SGLang's published ones: `python -m tools.bench table`.

For each size of --tensor-parallel-size the bench starts a server without drafts, and then one with DFlash, which have
the devices to themselves. At each concurrency both get the same problems once, after a warm-up. The exit code is 1 if
a request failed, and 2 after a mistake in the command line.
"""

import argparse
import asyncio
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from app.config.error import ConfigError
from tools.bench.cell import Cell
from tools.bench.command import guarded, out_folder
from tools.bench.eval import OFF, ON, add_dataset_flags, ask_all
from tools.bench.flags import add_out_flag, add_sampling_flags, add_serve_flags, counts
from tools.bench.http import loads, servers
from tools.bench.markdown import Row, Table, describe_host
from tools.bench.prompts import Dataset, named
from tools.bench.report import as_json, notes
from tools.bench.traffic import Load, run_round
from tools.parts import ToolParser

MEANING = (
    "Accuracy: right answers with DFlash, and in brackets without, where it differs. Acceptance length: tokens of a "
    "request's step that verified drafts, the bonus included. Speeds are of one round, a server after the other."
)


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    return guarded(lambda: tabulate(options, f"python -m tools.bench table {shlex.join(arguments)}"))


def tabulate(options: argparse.Namespace, command: str) -> int:
    datasets = named(options.dataset, options.seed, options.instruction)
    if len(datasets) > 1 or not all(prompt.judge for prompt in datasets[0].first(datasets[0].size or 1)):
        raise ConfigError(f"--dataset {options.dataset}: a table is of one dataset that has right answers")
    wanted, folder, console = loads(options), out_folder(options), Console(stderr=True)
    cells: dict[int, list[Cell]] = {}
    about: list[str] = []
    try:
        for size in options.tensor_parallel_size:
            plain = list(_cells(options, size, OFF, datasets[0], wanted, console, about))
            drafted = _cells(options, size, ON, datasets[0], wanted, console, about)
            cells[size] = []
            for one, other in zip(plain, drafted, strict=True):
                cells[size].append(Cell(one.text, one.load, one.prompts, {**one.rounds, **other.rounds}))
    finally:
        _publish(cells, about, folder, command)
    return int(any(cell.num_failures for of_size in cells.values() for cell in of_size))


def _cells(
    options: argparse.Namespace,
    size: int,
    variant: str,
    dataset: Dataset,
    wanted: Sequence[Load],
    console: Console,
    about: list[str],
) -> Iterator[Cell]:
    """Start a server and yield its answers at each load."""
    serve_args = [*options.serve_args, "--tensor-parallel-size", str(size)]
    sized = argparse.Namespace(**{**vars(options), "serve_args": serve_args})
    with servers(sized, [variant], console) as (found, lines), asyncio.Runner() as runner:
        about += lines
        for load in wanted:
            asked = dataset.first(load.num_prompts or dataset.size or load.usual_prompts)
            runner.run(run_round(found[0], asked[: load.concurrency], load))
            yield ask_all(runner, found, f"{dataset.name}, TP {size}", asked, load, console)


def row_of(size: int, cell: Cell) -> Row:
    shares = {name: f"{100 * (cell.accuracy(name) or 0):.1f} %" for name in (ON, OFF)}
    length = cell.acceptance_length(ON)
    return {
        "TP": size,
        "concurrency": cell.load.concurrency,
        "accuracy": shares[ON] + (f" ({shares[OFF]})" if shares[ON] != shares[OFF] else ""),
        "acceptance length": f"{length:.2f}" if length else "-",
        "baseline tok/s": f"{cell.speed(OFF):.0f}",
        "DFlash tok/s": f"{cell.speed(ON):.0f}",
        "speed-up": f"{cell.speed(ON) / cell.speed(OFF):.2f}x",
    }


def _publish(cells: dict[int, list[Cell]], about: Sequence[str], folder: Path | None, command: str) -> None:
    """Print what was measured, also if an error ended it early."""
    every = [cell for of_size in cells.values() for cell in of_size]
    if not every:
        return
    rows = [row_of(size, cell) for size, of_size in cells.items() for cell in of_size]
    table = Table("table", f"{every[0].text.rpartition(', ')[0]}, tensor parallelism and drafts", MEANING, rows)
    print(describe_host(), "", *(f"- {line}" for line in about), "", table, *notes(every), sep="\n")
    if folder:
        results = as_json(every, [table], command=command, servers=list(about))
        (folder / "results.json").write_text(json.dumps(results, indent=1))


def parser() -> argparse.ArgumentParser:
    parser = ToolParser(
        prog="python -m tools.bench table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(base_url=[], api_key=None, model=None)
    about = "processes that share the model, a server for each number [default: 1]"
    parser.add_argument("--tensor-parallel-size", type=counts, default=[1], metavar="N,N", help=about)
    add_dataset_flags(parser, concurrency=[1, 2, 4, 8])
    add_serve_flags(parser)
    add_out_flag(parser, "results.json")
    add_sampling_flags(parser, max_tokens=512)
    return parser
