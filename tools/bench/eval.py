"""Accuracy and acceptance length, with and without drafts: `python -m tools.bench eval`.

Every problem is asked once at each concurrency, with DFlash and without. --base-url names one server, which is asked
with `speculate: false` as well, or several. Otherwise the bench starts two servers. A --dataset FILE in the published
format of GSM8K, MATH-500, HumanEval, MBPP, MMLU, Alpaca or MT-Bench is recognised by its fields. Numbers, boxes and
letters are compared, and code is run against its tests in a sandbox. Alpaca and MT-Bench have no right answers. The
exit code is 1 if a request failed, if `speculate` was ignored or if the acceptance length is not the expected one. It
is 2 after a mistake in the command line.
"""

import argparse
import asyncio
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from app.config.error import ConfigError
from tools.bench import prompts
from tools.bench.cell import Cell
from tools.bench.client import Server, ServerError
from tools.bench.command import guarded, out_folder, progress
from tools.bench.flags import add_sampling_flags, add_server_flags, amount, counts
from tools.bench.formats import BOXED, Prompt
from tools.bench.http import loads, servers
from tools.bench.report import Publication
from tools.bench.traffic import Load, Round, run_round
from tools.parts import ToolParser

TOLERANCE = 0.03
"""Relative difference of acceptance lengths that a few hundred problems cannot resolve."""
ON, OFF = "dflash", "plain"


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    return guarded(lambda: evaluate(options, f"python -m tools.bench eval {shlex.join(arguments)}"))


def evaluate(options: argparse.Namespace, command: str) -> int:
    datasets = prompts.named(options.dataset, options.seed, options.instruction)
    wanted = loads(options)
    if options.base_url and options.serve_args:
        raise ConfigError("--base-url names servers that run, --serve-args start our own", "give one of them")
    publication = Publication(out_folder(options), {}, command)
    cells, console = publication.cells, Console(stderr=True)
    with publication, servers(options, (ON, OFF), console) as (found, publication.about), asyncio.Runner() as runner:
        ways = _on_and_off(found[0]) if len(found) == 1 else found
        for dataset in datasets:
            for load in wanted:
                asked = dataset.first(load.num_prompts or dataset.size or load.usual_prompts)
                cells.append(ask_all(runner, ways, dataset.name, asked, load, console))
    complaints = [*_ignored(cells, ways), *_unexpected(cells, options.expect_acceptance)]
    for complaint in complaints:
        print(f"- {complaint}")
    if options.expect_acceptance and not complaints:
        print(f"- every acceptance length is within {100 * TOLERANCE:.0f} % of {options.expect_acceptance:g}")
    return int(bool(complaints) or publication.has_failures)


def _on_and_off(server: Server) -> list[Server]:
    """Return one server under two names, the second of which asks for no drafts."""
    return [replace(server, name=ON), replace(server, name=OFF, fields={**server.fields, "speculate": False})]


def ask_all(
    runner: asyncio.Runner,
    ways: Sequence[Server],
    name: str,
    asked: Sequence[Prompt],
    load: Load,
    console: Console,
) -> Cell:
    """Ask each server every prompt once. Raises ServerError if every request to one failed."""
    played: dict[str, list[Round]] = {}
    with progress(console) as bar:
        for way in ways:
            task = bar.add_task(f"{name}, {load}: {way.name}", total=len(asked))
            found = runner.run(run_round(way, asked, load, partial(bar.advance, task)))
            if not found.tokens:
                hint = f"two servers can be compared: --base-url {ON}=URL --base-url {OFF}=URL"
                why = found.failures[0]
                raise ServerError(f"every request to {way.name} failed: {why}", hint if "speculate" in why else "")
            played[way.name] = [found]
    return Cell(name, load, asked, played)


def _ignored(cells: Sequence[Cell], ways: Sequence[Server]) -> Iterator[str]:
    for way in ways:
        plain = way.fields.get("speculate") is False
        if plain and any(cell.acceptance_length(way.name) for cell in cells):
            yield f"the server does not heed `speculate: false`: {way.name} had drafts too"


def _unexpected(cells: Sequence[Cell], expected: float | None) -> Iterator[str]:
    """Yield a line for each acceptance length of the first server outside the tolerance."""
    for cell in cells if expected else ():
        length = cell.acceptance_length(next(iter(cell.rounds)))
        where = f"{cell.text}, {cell.load}"
        if length is None:
            yield f"{where}: the server counts no drafts, so its acceptance length is unknown"
        elif expected and abs(length / expected - 1) > TOLERANCE:
            away = f"{100 * (length / expected - 1):+.1f} % away, allowed are {100 * TOLERANCE:.0f} %"
            yield f"{where}: the acceptance length is {length:.2f}, not {expected:g} ({away})"


def parser() -> argparse.ArgumentParser:
    parser = ToolParser(
        prog="python -m tools.bench eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_dataset_flags(parser, concurrency=[1, 8])
    parser.add_argument("--expect-acceptance", type=amount, metavar="X", help="the expected tokens a step")
    add_server_flags(parser)
    add_sampling_flags(parser, max_tokens=512)
    return parser


def add_dataset_flags(parser: argparse.ArgumentParser, concurrency: list[int]) -> None:
    add = parser.add_argument
    about = (
        "a file of a published evaluation (.jsonl or .json), gsm8k-long:IN,OUT (made-up problems of about IN tokens, "
        "answers of at most OUT), or demo:DOMAIN,... [default: demo:math]"
    )
    add("--dataset", default="demo:math", help=about)
    parser.set_defaults(request_rate=None)
    about = "the first N problems; several N are one for each --concurrency [default: all]"
    add("--num-prompts", "--limit", type=counts, metavar="N,N", help=about)
    default = ",".join(map(str, concurrency))
    add("--concurrency", type=counts, default=concurrency, metavar="N,N", help=f"[default: {default}]")
    instructions = parser.add_mutually_exclusive_group()
    about = "follows every question of an evaluation [default: its own one, which is --boxed for GSM8K and MATH-500]"
    instructions.add_argument("--instruction", help=about)
    about = f"the instruction is: {BOXED}".replace("%", "%%")
    instructions.add_argument("--boxed", action="store_const", const=BOXED, dest="instruction", help=about)
