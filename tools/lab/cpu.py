"""What the engine makes of a CPU: the demo pair's math against Transformers' `generate` and against itself, whole
requests in this process, by turns: `python -m tools.lab cpu`.

Beside each figure stands its floor: the matrix products alone that one of its runs was made of, run again one after the
other on the same weights.
"""

import argparse
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from app.bench.command import guarded, out_folder, progress, tell
from app.bench.flags import add_out_flag, count
from app.bench.machine import describe
from app.bench.paired import Claim, Comparison, rounds
from app.bench.report import Table
from app.config.checkpoint import DEMO
from app.config.settings import ConfigError
from app.engine.core import EngineCore
from app.engine.sequence import Request
from tools.lab import in_process, loads
from tools.lab.products import Products, by_operators

LOAD = "math"
WAYS = ("plain", "full", "auto")
TRANSFORMERS = "transformers"
ROUNDS = 6
CLAIMS = {
    1: [Claim("plain", TRANSFORMERS, 2.5), Claim("full", TRANSFORMERS, 7.0), Claim("full", "plain", 3.5)],
    4: [Claim("full", "plain", 3.0)],
    16: [Claim("full", "plain", 1.8), Claim("auto", "plain", 1.8)],
}
"""What is aimed at, by concurrency."""
MEANING = (
    "Medians of rounds by turns. `floor` is the matrix products alone of the same runs, by PyTorch's own operators. A "
    "ratio is of paired rounds, with its 95 % interval; the verdict is by the ratio itself."
)


class Transformers:
    """One request after the other through `generate`, greedily, as its documentation shows it."""

    def __init__(self, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> float:
        """Tokens a second."""
        tokens, started = 0, time.perf_counter()
        for request in requests:
            prompt = torch.tensor([request.token_ids])
            answer = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.max_tokens,
                do_sample=False,
                eos_token_id=list(request.stop_token_ids),
                pad_token_id=0,
            )
            tokens += answer.shape[1] - prompt.shape[1]
        return tokens / (time.perf_counter() - started)


def floor(core: EngineCore, run: Callable[[], in_process.Outcome]) -> float:
    """Tokens a second if matrix products were all there is; the best of three."""
    with by_operators(core.runner.forward), Products() as products:
        tokens = run().tokens
    return tokens / min(products.seconds() for _ in range(3))


def rows_of(concurrency: int, comparison: Comparison, floors: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each way, with the ratios that are claimed of it."""
    rows = []
    for name, speeds in comparison.speeds.items():
        claimed = [claim for claim in comparison.claims if claim.variant == name]
        ratios = [f"{comparison.ratio(claim)} of {claim.against}, aim {claim.bound:g}" for claim in claimed]
        rows.append(
            {
                "concurrency": concurrency,
                "way": name,
                "tok/s": f"{median(speeds):.0f}",
                "floor tok/s": f"{floors[name]:.0f}" if name in floors else "-",
                "as fast as": "; ".join(ratios) or "-",
                "verdict": "; ".join(reached(comparison, claim) for claim in claimed) or "-",
            }
        )
    return rows


def reached(comparison: Comparison, claim: Claim) -> str:
    """By the estimate itself: so many rounds are not enough for a narrow interval."""
    assert claim.bound is not None
    return "met" if comparison.ratio(claim).middle >= claim.bound else "missed"


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    make = partial(_engine, max_num_seqs=max(CLAIMS))
    engines = {name: make(name, compile=options.compile) for name in WAYS}
    theirs = _transformers()
    rows = []
    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("cpu", total=len(CLAIMS) * options.rounds)
        for concurrency, claims in CLAIMS.items():
            requests = loads.requests(LOAD, max(16, 4 * concurrency))
            ours = {name: partial(in_process.run, core, requests, concurrency) for name, core in engines.items()}
            ways: dict[str, Callable[[], float]] = {name: partial(_speed, run) for name, run in ours.items()}
            if concurrency == 1:
                ways[TRANSFORMERS] = partial(theirs.run, requests)
            for way in ways.values():
                way()
            *_, found = _counted(rounds(ways, claims, max_rounds=options.rounds), partial(bar.advance, task))
            floors = {name: floor(core, ours[name]) for name, core in engines.items()}
            rows += rows_of(concurrency, found, floors)
    return rows


def _transformers() -> Transformers:
    try:
        return Transformers(DEMO / "target")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ConfigError(
            "Transformers, which a CPU is held against, is not installed", "pip install transformers"
        ) from None


def _counted(comparisons: Iterable[Comparison], count: Callable[[], None]) -> Iterator[Comparison]:
    for comparison in comparisons:
        count()
        yield comparison


def _engine(name: str, **settings: Any) -> EngineCore:
    return in_process.engine(name, DEMO / "target", DEMO / "draft", **settings)


def _speed(run: Callable[[], in_process.Outcome]) -> float:
    return run().speed


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    return guarded(lambda: bench(options, shlex.join(["python", "-m", "tools.lab", "cpu", *arguments])))


def bench(options: argparse.Namespace, command: str) -> int:
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    table = Table("cpu", "A CPU", MEANING, compare(options))
    tell(table, describe(), command, folder, _draw)
    return 0


def _draw(path: Path, table: Table) -> None:
    from tools.lab import bar_plots

    bar_plots.cpu(path, table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.lab cpu", description=__doc__)
    parser.add_argument("--rounds", type=count, default=ROUNDS, metavar="N", help=f"[default: {ROUNDS}]")
    parser.add_argument("--compile", action="store_true", help="what `serve --compile` runs")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    add_out_flag(parser, "cpu.json and a PNG of the table")
    return parser
