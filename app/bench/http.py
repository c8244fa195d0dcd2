"""Servers against one another, over HTTP and by turns: `dflash-server bench`.

Any OpenAI-compatible server can be asked (--base-url), or servers of our own are started, one for each variant. Every
round asks each server the same once, in an order that turns; rounds go on until each ratio to the first server is known
well enough. Exits with 1 if a request failed or an --at-least was not met, with 2 for a mistake in what was asked for.
"""

import argparse
import asyncio
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from app.bench import page, prompts, report
from app.bench.client import Server, ServerError, ask, first_model, positions
from app.bench.command import Publication, guarded, out_folder, progress
from app.bench.flags import add_sampling_flags, add_server_flags, amount, count, counts, limit, listed, rates, spreads
from app.bench.own_server import WISHES, OwnServer, flags_of
from app.bench.paired import MIN_ROUNDS, Claim, rounds
from app.bench.traffic import Pressure, Round, Wishes, run_round
from app.config.settings import ConfigError

MAX_ROUNDS = 40
MADE_UP_LEN = 128

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
    by_mean = options.input_len or options.output_len
    options.synthetic = bool(by_mean or options.lengths)
    if bool(options.dataset) + bool(by_mean) + bool(options.lengths) > 1:
        parser.error("--dataset, --lengths, and --input-len or --output-len exclude each other")
    if options.len_spread and not by_mean:
        parser.error("--len-spread is of --input-len and --output-len")
    return guarded(lambda: bench(options, shlex.join(["dflash-server", "bench", "http", *arguments])))


def bench(options: argparse.Namespace, command: str) -> int:
    datasets = [] if options.synthetic else prompts.named(options.dataset or "demo:math", options.seed)
    variants = _variants(options)
    if options.into:
        page.check(options.into)
    publication = Publication(out_folder(options), dict(options.goodput), command, options.into)
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


def _variants(options: argparse.Namespace) -> list[str]:
    """Those of --compare and --block-sizes. Raises ConfigError for one that does not exist, or is there twice."""
    if options.base_url and (options.compare or options.block_sizes or options.serve_args):
        raise ConfigError("--base-url names servers that run, --compare, --block-sizes, --serve-args start our own")
    blocks = [f"b={size}" for size in options.block_sizes]
    variants = (options.compare or (["plain"] if blocks else ["plain", "dflash"])) + blocks
    for variant in variants:
        flags_of(variant)
    if options.at_least is not None and len(options.base_url or variants) < 2:
        raise ConfigError("--at-least: there is nothing to be held against", "name a second server")
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
    per_word = max(1.0, (many - few) / 64)
    if options.lengths:
        lengths = prompts.PRESETS[options.lengths]
    else:
        means = options.input_len or MADE_UP_LEN, options.output_len or MADE_UP_LEN
        lengths = prompts.Lengths(*means, *(options.len_spread or (0.0, 0.0)))
    return prompts.synthetic(lengths, per_word, options.seed, runner.run(positions(server)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-server bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_flags(parser)
    group = parser.add_argument_group("our own servers")
    group.add_argument(
        "--compare",
        type=listed,
        default=[],
        metavar="A,B",
        help=f"{WISHES}; the first is what others are held against",
    )
    group.add_argument("--block-sizes", type=counts, default=[], metavar="N,N", help="blocks of N rows, against plain")
    group = parser.add_argument_group("what is asked")
    group.add_argument("--dataset", help="demo:DOMAIN,... or a .jsonl file [default: demo:math]")
    group.add_argument("--input-len", type=count, metavar="N", help="made-up prompts of about N tokens")
    group.add_argument("--output-len", type=count, metavar="N", help="and answers of N tokens, by ignore_eos")
    group.add_argument(
        "--len-spread",
        type=spreads,
        metavar="S[,S]",
        help="log-normal lengths of sigma S, answers of the second [default: 0, alike]",
    )
    group.add_argument(
        "--lengths",
        choices=prompts.PRESETS,
        help="made-up prompts and answers as long as ShareGPT's in vLLM's benchmarks: log-normal, about 220 tokens in "
        "the mean (sigma 1.2) and about 200 (sigma 1), none above 8 times the mean or the model's positions",
    )
    add_sampling_flags(parser, max_tokens=256)
    group = parser.add_argument_group("how it is asked, and for how long")
    group.add_argument("--concurrency", type=counts, default=[1, 4, 16], metavar="N,N", help="[default: 1,4,16]")
    group.add_argument(
        "--request-rate",
        type=rates,
        metavar="R,R",
        help="Poisson arrivals, R a second, instead of so many at once",
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
        "--goodput", type=limit, nargs="+", default=[], metavar="KIND:MS", help="ttft:500 tpot:50 e2el:5000"
    )
    group.add_argument(
        "--into", type=Path, metavar="PAGE", help="put the speeds into a Markdown file, between <!-- bench --> marks"
    )
    return parser
