"""Servers against one another, over HTTP and by turns: `dflash-server bench`.

Any OpenAI-compatible server can be asked (--base-url), or servers of our own are started, one for each variant. Every
round asks each server the same once, in an order that turns; rounds go on until each ratio to the first server is known
well enough. Exits with 1 if a request failed or an --at-least was not met, with 2 for a mistake in what was asked for.
"""

import argparse
import asyncio
import json
import random
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.bench import prompts, report
from app.bench.client import Server, ServerError, ask, first_model
from app.bench.own_server import WISHES, OwnServer, flags
from app.bench.paired import MIN_ROUNDS, Claim, rounds
from app.bench.traffic import Pressure, Round, Wishes, run_round
from app.config import ConfigError

MAX_ROUNDS = 40
MADE_UP_LEN = 128
INTERRUPTED = 130
NO_MATPLOTLIB = "no pictures: matplotlib is not installed; pip install 'dflash-server[bench]'"

Play = Callable[[], Round]


class Way:
    """A server with what it is asked; calling it plays a round and says how many tokens a second came out."""

    def __init__(self, name: str, play: Play) -> None:
        self._name = name
        self._play = play
        self.rounds: list[Round] = []

    def __call__(self) -> float:
        turn = self._play()
        if not turn.tokens:
            raise ServerError(f"every request to {self._name} failed: {turn.failures[0]}")
        self.rounds.append(turn)
        return turn.speed

    def warm_up(self) -> list[str]:
        """A round that does not count, but for the reasons of its failures."""
        self()
        return self.rounds.pop().failures


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    options.synthetic = bool(options.input_len or options.output_len)
    if options.synthetic and options.dataset:
        parser.error("--dataset and --input-len or --output-len exclude each other")
    return guarded(lambda: bench(options, shlex.join(["dflash-server", "bench", "http", *arguments])))


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`, whose troubles are told in a line. Ctrl-C and SIGTERM end our servers on the way out."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
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


def bench(options: argparse.Namespace, command: str) -> int:
    datasets = [] if options.synthetic else prompts.named(options.dataset or "demo:math", options.seed)
    variants = _variants(options)
    publication = Publication(out_folder(options), dict(options.goodput), command)
    console = Console(stderr=True)
    with publication, servers(options, variants, console) as (peers, publication.about), asyncio.Runner() as runner:
        for dataset in datasets or [_made_up(runner, peers[0], options)]:
            for pressure in _pressures(options):
                publication.cells.append(measure(runner, peers, dataset, pressure, options, console))
    cells = publication.cells
    verdicts = {c.comparison.verdict(claim) for c in cells if c.comparison for claim in c.comparison.claims}
    return int(publication.has_failures or (options.at_least is not None and not verdicts <= {"met"}))


def measure(
    runner: asyncio.Runner,
    peers: Sequence[Server],
    dataset: prompts.Dataset,
    pressure: Pressure,
    options: argparse.Namespace,
    console: Console,
) -> report.Cell:
    """Warm-up, then rounds by turns until the ratios are known or there have been enough."""
    asked = dataset.first(options.num_prompts or pressure.usual_prompts)
    wishes = Wishes(options.max_tokens, options.temperature, options.seed)

    def play(server: Server) -> Round:
        return runner.run(run_round(server, asked, pressure, wishes, options.timeout))

    ways = {server.name: Way(server.name, partial(play, server)) for server in peers}
    claims = [Claim(name, peers[0].name, options.at_least) for name in list(ways)[1:]]
    most = options.max_rounds or (MAX_ROUNDS if claims else MIN_ROUNDS)
    with progress(console) as bar:
        task = bar.add_task(f"{dataset.name}, {pressure}: warm-up", total=most)
        failures = {name: way.warm_up() for name, way in ways.items()}
        bar.update(task, description=f"{dataset.name}, {pressure}")
        for comparison in rounds(ways, claims, max_rounds=most, tight=options.tight, seed=options.seed):
            known = sum(comparison.verdict(claim) != "inconclusive" for claim in claims)
            told = f", {known} of {len(claims)} ratios known" if claims else ""
            bar.update(task, advance=1, description=f"{dataset.name}, {pressure}{told}")
    played = {name: way.rounds for name, way in ways.items()}
    return report.Cell(dataset.name, pressure, asked, played, comparison, failures)


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


@contextmanager
def servers(
    options: argparse.Namespace, variants: Sequence[str], console: Console
) -> Iterator[tuple[list[Server], list[str]]]:
    """Those that were named, or our own, which end with the context; and a line about each."""
    names = [name for name, _ in options.base_url]
    if len(set(names)) < len(names):
        raise ConfigError(f"--base-url: {' and '.join(names)} need names of their own", "NAME=URL")
    with ExitStack() as stack:
        found = [Server(name, url) for name, url in options.base_url]
        about = [f"{name}: {url}" for name, url in options.base_url]
        for variant in variants if not found else ():
            own = OwnServer(variant, options.serve_args)
            with console.status(f"starting {variant}") as status:
                stack.enter_context(own).wait_until_ready(status.update)
            found.append(Server(variant, own.url))
            about.append(f"{variant}: {own}")
        known = [replace(peer, api_key=options.api_key, fields=options.extra_body) for peer in found]
        models = [options.model or asyncio.run(first_model(peer)) for peer in known]
        yield [replace(peer, model=model) for peer, model in zip(known, models, strict=True)], about


@dataclass(slots=True)
class Publication:
    """A context at whose end everything is printed as Markdown, and written to a folder, if there is one: whatever was
    measured by then, if something ended it early. `limits` are goodput's, in seconds; `about` is a line a server."""

    folder: Path | None
    limits: dict[str, float]
    command: str
    about: list[str] = field(default_factory=list)
    cells: list[report.Cell] = field(default_factory=list)

    @property
    def has_failures(self) -> bool:
        return any(cell.failures(name) for cell in self.cells for name in cell.rounds)

    def __enter__(self) -> "Publication":
        return self

    def __exit__(self, *_: object) -> None:
        if self.cells:
            tables = report.tables(self.cells, self.limits)
            self._tell(tables)
            if self.folder:
                self._save(self.folder, tables)

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
        try:
            from app.bench import plots
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            print(NO_MATPLOTLIB, file=sys.stderr)
            return
        plots.write(folder, self.cells, tables, self.limits)


def out_folder(options: argparse.Namespace) -> Path | None:
    """Made before anything is measured, so that hours of work are not lost to a folder that cannot be."""
    folder: Path | None = options.out
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}", "give a folder that can be made") from None
    return folder


def _variants(options: argparse.Namespace) -> list[str]:
    """Those of --compare and --block-sizes. Raises ConfigError for one that does not exist, or is there twice."""
    if options.base_url and (options.compare or options.block_sizes or options.serve_args):
        raise ConfigError("--base-url names servers that run, --compare, --block-sizes, --serve-args start our own")
    blocks = [f"b={size}" for size in options.block_sizes]
    variants = (options.compare or (["plain"] if blocks else ["plain", "dflash"])) + blocks
    for variant in variants:
        flags(variant)
    if len(set(variants)) < len(variants):
        raise ConfigError(f"--compare {','.join(variants)}: a variant is there twice", "name each of them once")
    return variants


def _pressures(options: argparse.Namespace) -> list[Pressure]:
    if options.request_rate:
        return [Pressure(rate=rate) for rate in options.request_rate]
    return [Pressure(count) for count in options.concurrency]


def _made_up(runner: asyncio.Runner, server: Server, options: argparse.Namespace) -> prompts.Dataset:
    """Texts of the wished lengths in tokens of this server's model, of which two requests tell how long words are."""

    async def tokens(count: int) -> int:
        prompt = prompts.Prompt({"prompt": prompts.words(count, random.Random(count))})
        async with server.connect(options.timeout) as http:
            answer = await ask(http, server, prompt, {"max_tokens": 1})
        if answer.error:
            raise ServerError(f"{server.name} does not answer /v1/completions: {answer.error}")
        return answer.prompt_tokens

    few, many = runner.run(tokens(32)), runner.run(tokens(96))
    input_len, output_len = options.input_len or MADE_UP_LEN, options.output_len or MADE_UP_LEN
    per_word = max(1.0, (many - few) / 64)
    return prompts.synthetic(input_len, output_len, options.len_spread, per_word, options.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-server bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_flags(parser)
    group = parser.add_argument_group("our own servers")
    group.add_argument(
        "--compare", type=_names, default=[], metavar="A,B", help=f"{WISHES}; the first is what others are held against"
    )
    group.add_argument("--block-sizes", type=counts, default=[], metavar="N,N", help="blocks of N rows, against plain")
    group = parser.add_argument_group("what is asked")
    group.add_argument("--dataset", help="demo:DOMAIN,... or a .jsonl file [default: demo:math]")
    group.add_argument("--input-len", type=count, metavar="N", help="made-up prompts of about N tokens")
    group.add_argument("--output-len", type=count, metavar="N", help="and answers of N tokens, by ignore_eos")
    group.add_argument(
        "--len-spread", type=amount, default=0.0, metavar="S", help="log-normal lengths of sigma S [default: 0, alike]"
    )
    add_sampling_flags(parser, max_tokens=256)
    group = parser.add_argument_group("how it is asked, and for how long")
    group.add_argument("--concurrency", type=counts, default=[1, 4, 16], metavar="N,N", help="[default: 1,4,16]")
    group.add_argument(
        "--request-rate", type=_rates, metavar="R,R", help="Poisson arrivals, R a second, instead of so many at once"
    )
    group.add_argument(
        "--num-prompts", type=count, metavar="N", help="[default: 3 x concurrency, but at least 8; 32 at a rate]"
    )
    group.add_argument("--tight", type=amount, default=0.03, help="width of a known ratio's interval [default: 0.03]")
    group.add_argument("--at-least", type=amount, metavar="X", help="what every ratio should be; ends when it is known")
    group.add_argument(
        "--max-rounds", type=count, metavar="N", help=f"[default: {MAX_ROUNDS}; one server {MIN_ROUNDS}]"
    )
    group.add_argument(
        "--goodput", type=_limit, nargs="+", default=[], metavar="KIND:MS", help="ttft:500 tpot:50 e2el:5000"
    )
    return parser


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--base-url",
        type=_named_url,
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a server that runs, of whatever make; several are compared",
    )
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument("--model", metavar="NAME", help="[default: the first of /v1/models]")
    group.add_argument(
        "--serve-args", type=shlex.split, default=[], metavar="'...'", help="flags of `serve` for servers of our own"
    )
    group.add_argument(
        "--timeout", type=amount, default=600.0, metavar="S", help="seconds of silence that are a failure"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write results.json and a PNG of each table there")


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument("--temperature", type=amount, default=0.0, metavar="T", help="[default: 0]")
    group.add_argument("--max-tokens", type=count, default=max_tokens, metavar="N", help=f"[default: {max_tokens}]")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="[default: 0]")
    group.add_argument(
        "--extra-body",
        type=_object,
        default={},
        metavar="JSON",
        help="""more fields of every request: '{"chat_template_kwargs": {"enable_thinking": false}}'""",
    )


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _rates(text: str) -> list[float]:
    rates = [amount(part) for part in text.split(",")]
    if 0.0 in rates:
        raise argparse.ArgumentTypeError("a rate is more than 0 requests a second")
    return rates


def _limit(text: str) -> tuple[str, float]:
    """ "ttft:500" -> ("ttft", 0.5)"""
    kind, _, limit = text.partition(":")
    if kind not in report.LIMITED:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(f'{k}:MS' for k in report.LIMITED)}")
    return kind, amount(limit) / 1000


def _named_url(text: str) -> tuple[str, str]:
    """ "peer=http://host:1/v1" -> ("peer", "http://host:1"); without a name it is host:port."""
    found = re.fullmatch(r"(?:([^=/:]+)=)?(https?://([^/]+).*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not URL or NAME=URL, with http:// or https://")
    name, url, host = found.groups()
    return name or host, url.rstrip("/").removesuffix("/v1")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
