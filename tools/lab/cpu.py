"""The engine on a CPU and Transformers' `generate`, interleaved: `python -m tools.lab cpu`.

Whole math requests of the demo pair run in this process.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from app.config.error import ConfigError
from app.engine.checkpoint.files import DEMO
from app.engine.core import EngineCore
from app.messages import Request
from tools.bench.command import progress
from tools.bench.flags import count
from tools.bench.markdown import Row, Table
from tools.bench.paired import Claim, Comparison, rounds
from tools.lab import in_process, loads
from tools.lab.publish import part_parser, publish

WAYS = ("plain", "full", "auto")
TRANSFORMERS = "transformers"
CLAIMS = {
    1: [Claim("plain", TRANSFORMERS, 2.5), Claim("full", TRANSFORMERS, 7.0), Claim("full", "plain", 3.5)],
    4: [Claim("full", "plain", 3.0)],
    16: [Claim("full", "plain", 1.8), Claim("auto", "plain", 1.8)],
}
"""Aims by concurrency."""
MEANING = "Medians of interleaved rounds. A ratio is of paired rounds with a 95 % interval, which the verdict ignores."


class Transformers:
    """One request after the other through `generate`, greedily, like in its documentation."""

    def __init__(self, target: Path) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ConfigError("Transformers is not installed", "pip install transformers") from None
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> float:
        """Return output tokens per second."""
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


def speed(core: EngineCore, requests: Sequence[Request], concurrency: int) -> float:
    """Return output tokens per second."""
    return in_process.run(core, requests, concurrency).speed


def rows_of(concurrency: int, comparison: Comparison) -> list[Row]:
    """Return a row for each way, with the ratios of its claims."""
    rows = []
    for name, speeds in comparison.speeds.items():
        ratios = [(comparison.ratio(claim), claim) for claim in comparison.claims if claim.variant == name]
        rows.append(
            {
                "concurrency": concurrency,
                "way": name,
                "tok/s": f"{median(speeds):.0f}",
                "as fast as": "; ".join(f"{r} of {c.against}, aim {c.bound:g}" for r, c in ratios) or "-",
                "verdict": "; ".join("met" if r.middle >= (c.bound or 0) else "missed" for r, c in ratios) or "-",
            }
        )
    return rows


def compare(options: argparse.Namespace) -> list[Row]:
    pair, most = (DEMO / "target", DEMO / "draft"), max(CLAIMS)
    engines = {name: in_process.engine(name, *pair, max_num_seqs=most) for name in WAYS}
    theirs = Transformers(DEMO / "target")
    rows = []
    with progress() as bar:
        task = bar.add_task("cpu", total=len(CLAIMS) * options.rounds)
        for concurrency, claims in CLAIMS.items():
            requests = loads.requests("math", max(16, 4 * concurrency))
            ways: dict[str, Callable[[], float]] = {
                name: partial(speed, core, requests, concurrency) for name, core in engines.items()
            }
            if concurrency == 1:
                ways[TRANSFORMERS] = partial(theirs.run, requests)
            for way in ways.values():
                way()
            for comparison in rounds(ways, claims, max_rounds=options.rounds):  # noqa: B007
                bar.advance(task)
            rows += rows_of(concurrency, comparison)
    return rows


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    torch.set_num_threads(options.threads)
    return publish("cpu", arguments, [Table("cpu", "A CPU", MEANING, compare(options))], options.out)


def parser() -> argparse.ArgumentParser:
    made = part_parser("cpu", __doc__)
    made.add_argument("--rounds", type=count, default=6, metavar="N", help="[default: 6]")
    made.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    return made
