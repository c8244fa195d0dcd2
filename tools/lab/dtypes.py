"""The engine in float32, in bfloat16 and with weights in int8 on a CPU, by turns: decode steps and prompts, with random
weights.

It tells whether `--dtype auto` may keep bfloat16 on a processor. All engines are in memory at once.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from app.engine.core import EngineCore
from app.messages import Request
from tools.bench.command import out_folder, progress
from tools.bench.flags import add_out_flag, count, counts
from tools.bench.markdown import Table
from tools.bench.paired import ratio
from tools.lab import random_weights, step
from tools.lab.publish import publish
from tools.lab.step_timing import Bench, Measured, Shape
from tools.parts import ToolParser

WAYS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
"""Flags of `tools.lab step` for an engine."""
ACCEPTED = "4"
"""Mean acceptance length, so that whole blocks move on."""
MEANING = (
    "Milliseconds of a step, medians of rounds in which all run, and ratios within rounds. A prompt is read to its "
    "first token. Plain steps keep the draft's context too. int8 are weights of a target in bfloat16."
)

Timed = Callable[[], float]


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    flags = [_step_flags(options, way) for way in WAYS.values()]
    engines = [step.load(step.settled(step.parser().parse_args(own)))[0] for own in flags]
    timed = [_timed(Bench(engine), engine.core, options) for engine in engines]
    times: dict[str, list[list[float]]] = {name: [[] for _ in WAYS] for name in timed[0]}
    with progress() as bar:
        task = bar.add_task("", total=len(times) * (options.rounds + 1))
        for number in range(options.rounds + 1):
            for name, of_ways in times.items():
                bar.update(task, advance=1, description=name)
                for found, of_engine in zip(of_ways, timed, strict=True):
                    taken = of_engine[name]()
                    if number:  # the first round does lazy work
                        found.append(taken)
    rows = [
        {"step": name}
        | {f"{way} ms": f"{median(found):.1f}" for way, found in zip(WAYS, of_ways, strict=True)}
        | {"float32 / bfloat16": str(ratio(*of_ways[:2])), "bfloat16 / int8": str(ratio(*of_ways[1:]))}
        for name, of_ways in times.items()
    ]
    about = [random_weights.BANNER, step.describe(engines[0])]
    table = Table("dtypes", "Dtypes by turns", MEANING, rows)
    return publish("dtypes", arguments, [table], folder, about=about)


def _step_flags(options: argparse.Namespace, way: dict[str, str]) -> list[str]:
    """Return the flags of `tools.lab step` for an engine."""
    most, longest = max(options.batches), max(options.context, *options.prompts)
    flags = {
        "random-weights": options.random_weights,
        "simulate-acceptance": ACCEPTED,
        "device": "cpu",
        **way,
        "threads": options.threads,
        "batches": most,
        "context": options.context,
        "contexts": longest,
        "context-batches": 1,
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _timed(bench: Bench, core: EngineCore, options: argparse.Namespace) -> dict[str, Timed]:
    """Return functions that return the milliseconds of a step, by its name."""

    def decode(shape: Shape) -> float:
        bench.time(shape, found := Measured())
        return found.ms

    def prefill(length: int) -> float:
        request = Request("prompt", tuple(range(length)), max_tokens=1, cache_salt=str(time.perf_counter_ns()))
        start = time.perf_counter()
        core.run([request])
        return 1000 * (time.perf_counter() - start)

    timed: dict[str, Timed] = {}
    for batch in options.batches:
        for drafts, kind in ((False, "plain"), (True, "whole block")):
            shape = Shape(batch, options.context, drafts)
            timed[f"{kind}, at once {batch}"] = partial(decode, shape)
    for length in options.prompts:
        timed[f"prompt of {length}"] = partial(prefill, length)
    return timed


def parser() -> argparse.ArgumentParser:
    made = ToolParser(prog="python -m tools.lab dtypes", description=__doc__)
    about = "sizes, as of `step` [default: qwen3-0.6b]"
    made.add_argument("--random-weights", default="qwen3-0.6b", metavar="NAME", help=about)
    made.add_argument("--batches", type=counts, default=[1, 4, 16], metavar="N,N", help="[default: 1,4,16]")
    made.add_argument("--context", type=count, default=256, metavar="N", help="of decode steps [default: 256]")
    made.add_argument("--prompts", type=counts, default=[64, 512], metavar="N,N", help="[default: 64,512]")
    made.add_argument("--rounds", type=count, default=6, metavar="N", help="[default: 6]")
    made.add_argument("--threads", type=count, default=torch.get_num_threads(), metavar="N")
    add_out_flag(made, "dtypes.json")
    return made
