"""Servers compared over HTTP, interleaved: `python -m tools.bench`.

--base-url names OpenAI-compatible servers of any make. Otherwise the bench starts a server for each variant. Every
round asks each server the same prompts once, in a random order. Rounds end when each ratio to the first server is known
well enough. Exits with 1 if a request failed or an --at-least was not met, and with 2 for a wrong command line.
"""

import argparse
import asyncio
import random
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from rich.console import Console

from app.config.error import ConfigError
from tools.bench import prompts
from tools.bench.cell import Cell
from tools.bench.client import Server, ServerError, ask, first_model, positions
from tools.bench.command import guarded, out_folder, progress
from tools.bench.flags import add_sampling_flags, add_server_flags, amount, count, counts, limit, listed, rates, spreads
from tools.bench.formats import Prompt
from tools.bench.markdown import split_page
from tools.bench.own_server import WISHES, OwnServer, flags_of
from tools.bench.paired import MIN_ROUNDS, Claim, rounds
from tools.bench.report import Publication
from tools.bench.traffic import Load, Round, run_round
from tools.parts import ToolParser

MAX_ROUNDS = 40
SYNTHETIC_LEN = 128


def main(arguments: Sequence[str]) -> int:
    made = parser()
    options = made.parse_args(arguments)
    by_mean = options.input_len or options.output_len
    if bool(options.dataset) + bool(by_mean) + bool(options.lengths) > 1:
        made.error("--dataset, --lengths, and --input-len or --output-len exclude each other")
    if options.dataset_name and not by_mean:
        made.error("--dataset-name random wants --input-len or --output-len")
    if options.len_spread and not by_mean:
        made.error("--len-spread is of --input-len and --output-len")
    return guarded(lambda: bench(options, f"python -m tools.bench {shlex.join(arguments)}"))


def bench(options: argparse.Namespace, command: str) -> int:
    synthetic = options.input_len or options.output_len or options.lengths
    datasets = [] if synthetic else prompts.named(options.dataset or "demo:math", options.seed)
    variants, wanted = _variants(options), loads(options)
    if options.into:
        split_page(options.into)
    publication = Publication(out_folder(options), dict(options.goodput), command, options.into)
    console = Console(stderr=True)
    with publication, servers(options, variants, console) as (peers, publication.about), asyncio.Runner() as runner:
        for dataset in datasets or [_synthetic(runner, peers[0], options)]:
            for load in wanted:
                publication.cells.append(measure(runner, peers, dataset, load, options, console))
    cells = publication.cells
    verdicts = {cell.comparison.verdict(claim) for cell in cells for claim in cell.comparison.claims}
    return int(publication.has_failures or (options.at_least is not None and not verdicts <= {"met"}))


def measure(
    runner: asyncio.Runner,
    peers: Sequence[Server],
    dataset: prompts.Dataset,
    load: Load,
    options: argparse.Namespace,
    console: Console,
) -> Cell:
    """Warm the servers up, then run interleaved rounds until the ratios are known or there are enough rounds.

    Raises ServerError if every request of a round failed.
    """
    asked = dataset.first(load.num_prompts or load.usual_prompts)
    played: dict[str, list[Round]] = {server.name: [] for server in peers}

    def play(server: Server) -> float:
        result = runner.run(run_round(server, asked, load))
        if not result.tokens:
            raise ServerError(f"every request to {server.name} failed: {result.failures[0]}")
        played[server.name].append(result)
        return result.speed

    ways = {server.name: partial(play, server) for server in peers}
    claims = [Claim(name, peers[0].name, options.at_least) for name in list(ways)[1:]]
    max_rounds = options.max_rounds or (MAX_ROUNDS if claims else MIN_ROUNDS)
    where = f"{dataset.name}, {load}"
    with progress(console) as bar:
        task = bar.add_task(f"{where}: warm-up", total=max_rounds)
        for way in ways.values():
            way()
        warm_up_failures = {name: played_rounds.pop().failures for name, played_rounds in played.items()}
        for comparison in rounds(ways, claims, max_rounds=max_rounds, tight=options.tight, seed=options.seed):
            known = sum(comparison.verdict(claim) != "unsettled" for claim in claims)
            ratios = f", {known} of {len(claims)} ratios known" if claims else ""
            bar.update(task, advance=1, description=f"{where}{ratios}")
    return Cell(dataset.name, load, asked, played, comparison, warm_up_failures)


@contextmanager
def servers(
    options: argparse.Namespace, variants: Sequence[str], console: Console
) -> Iterator[tuple[list[Server], list[str]]]:
    """Yield the servers of --base-url, or those that it starts and ends, with a line about each."""
    names = [name for name, _ in options.base_url]
    if len(set(names)) < len(names):
        raise ConfigError(f"--base-url: {' and '.join(names)} need different names", "NAME=URL")
    with ExitStack() as stack:
        urls, about = dict(options.base_url), [f"{name}: {url}" for name, url in options.base_url]
        for variant in variants if not urls else ():
            server = OwnServer(variant, options.serve_args)
            with console.status(f"starting {variant}") as status:
                stack.enter_context(server).wait_until_ready(status.update)
            about.append(f"{variant}: {server}")
            urls = urls | {variant: server.url}
        peers = [Server(name, url, "", options.api_key, options.extra_body) for name, url in urls.items()]
        yield [replace(peer, model=options.model or asyncio.run(first_model(peer))) for peer in peers], about


def _variants(options: argparse.Namespace) -> list[str]:
    """Return the variants of --compare. Raises ConfigError for an unknown or repeated one."""
    if options.base_url and (options.compare or options.serve_args):
        raise ConfigError("--base-url names servers that run, --compare and --serve-args start our own")
    variants = options.compare or ["plain", "dflash"]
    for variant in variants:
        flags_of(variant)
    if options.at_least is not None and len(options.base_url or variants) < 2:
        raise ConfigError("--at-least: there is nothing to be held against", "name a second server")
    if len(set(variants)) < len(variants):
        raise ConfigError(f"--compare {','.join(variants)}: a variant is there twice", "name each of them once")
    return variants


def loads(options: argparse.Namespace) -> list[Load]:
    """Return a load for each request rate or concurrency, at each temperature.

    Raises ConfigError if --num-prompts has another length.
    """
    loads = [Load(concurrency) for concurrency in options.concurrency]
    if options.request_rate:
        loads = [Load(rate=rate) for rate in options.request_rate]
    numbers = options.num_prompts or [None]
    if len(numbers) not in (1, len(loads)):
        given = ",".join(map(str, numbers))
        raise ConfigError(f"--num-prompts {given}: there are {len(loads)} loads", "give one, or one for each load")
    sampling = {"max_tokens": options.max_tokens, "seed": options.seed, "timeout": options.timeout}
    return [
        replace(load, temperature=temperature, num_prompts=numbers[i % len(numbers)], **sampling)
        for temperature in options.temperature
        for i, load in enumerate(loads)
    ]


def _synthetic(runner: asyncio.Runner, server: Server, options: argparse.Namespace) -> prompts.Dataset:
    """Return texts of the wished lengths in this server's tokens. Two requests measure the tokens of a word."""

    async def tokens(count: int) -> int:
        prompt = Prompt({"prompt": prompts.words(count, random.Random(count))})
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
        means = options.input_len or SYNTHETIC_LEN, options.output_len or SYNTHETIC_LEN
        lengths = prompts.Lengths(*means, *(options.len_spread or (0.0, 0.0)))
    return prompts.synthetic(lengths, per_word, options.seed, runner.run(positions(server)))


def parser() -> argparse.ArgumentParser:
    parser = ToolParser(prog="python -m tools.bench", description=__doc__)
    add_server_flags(parser)
    add = parser.add_argument_group("servers that the bench starts").add_argument
    about = f"{WISHES}; ratios are to the first"
    add("--compare", type=listed, default=[], metavar="A,B", help=about)
    add = parser.add_argument_group("prompts").add_argument
    about = (
        "demo:DOMAIN,..., or a .jsonl or .json file of texts, chats, or a published evaluation: GSM8K, MATH-500, MMLU, "
        "HumanEval, MBPP, MT-Bench or Alpaca, recognised by its fields; FILE:KIND,... takes the entries of each "
        "`kind` by themselves [default: demo:math]"
    )
    add("--dataset", help=about)
    add("--input-len", "--random-input-len", type=count, metavar="N", help="synthetic prompts of about N tokens")
    add("--output-len", "--random-output-len", type=count, metavar="N", help="and answers of N tokens, by ignore_eos")
    about = "vLLM's: `random` is --input-len and --output-len, and a file is --dataset"
    add("--dataset-name", choices=["random"], help=about)
    about = "log-normal lengths of sigma S, answers of the second [default: 0, alike]"
    add("--len-spread", type=spreads, metavar="S[,S]", help=about)
    about = (
        "synthetic prompts and answers as long as ShareGPT's in vLLM's benchmarks: log-normal, about 220 tokens in the "
        "mean (sigma 1.2) and about 200 (sigma 1), none above 8 times the mean or the model's positions"
    )
    add("--lengths", choices=prompts.PRESETS, help=about)
    add_sampling_flags(parser, max_tokens=256)
    add = parser.add_argument_group("load and duration").add_argument
    add("--concurrency", "--max-concurrency", type=counts, default=[1, 4, 16], metavar="N,N", help="[default: 1,4,16]")
    about = "Poisson arrivals, R a second, instead of a fixed number at once"
    add("--request-rate", type=rates, metavar="R,R", help=about)
    about = "one number, or one for each load [default: 3 x concurrency, but at least 8; 32 at a rate]"
    add("--num-prompts", type=counts, metavar="N,N", help=about)
    add("--tight", type=amount, default=0.03, help="width of a known ratio's interval [default: 0.03]")
    add("--at-least", type=amount, metavar="X", help="the aim of every ratio; rounds end when it is decided")
    about = f"[default: {MAX_ROUNDS}; one server {MIN_ROUNDS}]"
    add("--max-rounds", type=count, metavar="N", help=about)
    add("--goodput", type=limit, nargs="+", default=[], metavar="KIND:MS", help="ttft:500 tpot:50 e2el:5000")
    about = (
        "put the speeds into a Markdown file, between <!-- bench --> marks, or for PLACE between <!-- bench PLACE -->"
    )
    add("--into", metavar="PAGE[#PLACE]", help=about)
    return parser
